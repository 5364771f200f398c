"""Processes whose main loop stands still while their heart beats, and messages whose loss heartbeats repair."""

import pytest

from baton import messages as msg
from baton.clock import PauseDetector, Tick
from tests.router.lab import Lab, held

UNREAD = 1_001  # milliseconds, above cluster.heartbeat_timeout_ms
STUCK = 5_001  # above cluster.step_timeout_ms
SILENCE = 1.001  # seconds, above cluster.heartbeat_timeout_ms


# --- a loop that stands still is stuck ---


@pytest.mark.parametrize("role", ["decode", "prefill", "store"])
def test_a_process_whose_loop_stands_still_is_stuck_until_it_goes_on(lab: Lab, role: msg.Role) -> None:
    lab.split()
    victim = f"{role}-0.1"
    lab.beat(victim, loop=STUCK - 1)
    assert lab.gone()[f"{role}-0"] is None
    lab.beat(victim, loop=STUCK)
    assert lab.gone()[f"{role}-0"] == "stuck"
    assert lab.say(victim, msg.Heartbeat(0, msg.LoadReport(), loop_age_ms=STUCK + 250)) == []
    assert lab.sent(msg.RequestHello, victim) == []
    lab.say(victim, msg.Heartbeat(0, msg.LoadReport()))
    assert len(lab.sent(msg.RequestHello, victim)) == 1
    lab.join(role, f"{role}-0")
    assert lab.gone()[f"{role}-0"] is None


def test_a_silent_process_whose_heart_beats_again_while_its_loop_hangs_is_stuck(lab: Lab) -> None:
    """A loop that hangs may keep its heart from beating for a while, and on a busy machine the heart may be late."""
    lab.split()
    lab.advance(SILENCE)
    assert lab.gone()["store-0"] == "silent"
    assert lab.say("store-0.1", msg.Heartbeat(0, msg.LoadReport(), loop_age_ms=STUCK)) == []
    assert lab.gone()["store-0"] == "stuck"
    lab.say("store-0.1", msg.Heartbeat(0, msg.LoadReport()))
    assert len(lab.sent(msg.RequestHello, "store-0.1")) == 1


def test_a_router_whose_every_turn_is_late_still_notices_silence(lab: Lab) -> None:
    lab.split()
    beat = lab.config.cluster.heartbeat_ms / 1_000
    pauses = PauseDetector(tolerance=beat)
    for _ in range(round(3 * SILENCE / beat)):
        lab.now += 1.5 * beat
        lab.tell(Tick(pauses.tick(lab.now)))
    assert set(lab.gone().values()) == {"silent"}


def test_a_worker_that_was_stuck_and_joins_again_is_given_work(lab: Lab) -> None:
    """Nothing is placed meanwhile: placement sees an incarnation that never left, and another member of its name."""
    (one,) = lab.colocated(1)
    lab.submit("before")
    lab.tokens(one, "before", 1, 10, 50, 51, 52, 53, 54, 55, finish="length")
    lab.beat(one, loop=STUCK)
    lab.say(one, msg.Heartbeat(0, msg.LoadReport()))
    lab.join("decode", "decode-0")
    lab.beat(one)
    lab.submit("after")
    assert [lab.to(order) for order in lab.sent(msg.Decode)] == [one, one]


def test_a_long_step_is_judged_by_its_own_age(lab: Lab) -> None:
    """Its loop turned last when the step began, so both ages agree."""
    (one,) = lab.colocated()
    lab.beat(one, age=STUCK - 1, loop=STUCK - 1)
    assert lab.gone() == {"decode-0": None}


# --- what it has not read goes elsewhere ---


def test_an_order_that_a_hung_worker_does_not_read_goes_to_another_one(lab: Lab) -> None:
    lab.colocated(2)
    lab.submit()
    first = lab.to(lab.decode)
    unread = lab.counts[first] - 1
    for age in (250, 500, 750, 1_000):
        lab.beat(first, heard=unread, loop=age)
    assert lab.decode.attempt == 1
    lab.beat(first, heard=unread, loop=UNREAD)
    second = lab.to(lab.decode)
    assert lab.decode.attempt == 2
    assert second != first
    assert lab.cancelled(first) == [1]
    # Its late answers, when it goes on, are of an attempt that is over.
    lab.say(second, msg.Accepted("r", 2))
    lab.say(first, msg.Accepted("r", 1))
    lab.tokens(first, "r", 1, 10, 50, 51)
    lab.tokens(second, "r", 2, 10, 50)
    lab.tokens(first, "r", 1, 11, 51, 52)
    assert lab.emitted() == [50]
    lab.tokens(second, "r", 2, 11, 51, 52, 53, 54, 55, finish="length")
    assert lab.emitted() == [50, 51, 52, 53, 54, 55]
    assert lab.end().summary.served.attempts == 2


def test_moving_does_not_count_against_the_attempts_of_a_request(lab: Lab) -> None:
    """More workers hang, one after the other, than it has attempts."""
    workers = lab.colocated(6)
    lab.submit()
    for attempt in range(1, 6):
        holder = lab.to(lab.decode)
        lab.beat(holder, heard=lab.counts[holder] - 1, loop=UNREAD)
        for _ in range(20):  # the router pauses between them
            if lab.decode.attempt == attempt:
                lab.advance(0.01)
    assert lab.decode.attempt == 6 > lab.config.router.max_attempts
    assert {lab.to(order) for order in lab.sent(msg.Decode)} == set(workers)
    assert lab.alive()


def test_what_it_has_read_stays(lab: Lab) -> None:
    """An attempt that runs there is left until cluster.step_timeout_ms: it may go on, and has done work."""
    one, _two = lab.colocated(2)
    lab.submit()
    assert lab.to(lab.decode) == one
    lab.say(one, msg.Accepted("r", 1))
    lab.beat(one, held("r", 1, 10), loop=STUCK - 1)
    assert len(lab.sent(msg.Decode)) == 1
    lab.beat(one, held("r", 1, 10), loop=STUCK)
    assert lab.decode.attempt == 2


def test_an_order_waits_for_the_end_of_a_long_step_where_no_other_worker_takes_it(lab: Lab) -> None:
    (one,) = lab.colocated()
    lab.submit()
    for age in range(UNREAD, STUCK, 250):
        lab.beat(one, heard=lab.counts[one] - 1, age=age, loop=age)
    assert len(lab.sent(msg.Decode)) == 1
    lab.beat(one, held("r", 1, 10))
    lab.beat(one, held("r", 1, 10))
    assert len(lab.sent(msg.Decode)) == 1
    assert lab.alive()


def test_an_order_does_not_go_to_and_fro_between_workers_in_long_steps(lab: Lab) -> None:
    one, two = lab.colocated(2)
    lab.submit()
    for _ in range(10):
        for worker in (one, two):
            lab.beat(worker, heard=lab.counts[worker] - 1, age=UNREAD, loop=UNREAD)
        for worker in (one, two):
            known = lab.to(lab.decode) == worker
            lab.beat(worker, *[held("r", lab.decode.attempt, 10)] * known, heard=0)
    assert len(lab.sent(msg.Decode)) <= 2
    assert lab.alive()


def test_a_hung_worker_gets_nothing_new_and_work_again_when_it_goes_on(lab: Lab) -> None:
    one, two = lab.colocated(2)
    lab.beat(one, loop=UNREAD)
    for index in range(6):
        lab.submit(f"r{index}")
    assert {lab.to(order) for order in lab.sent(msg.Decode)} == {two}
    lab.beat(two, *[held(f"r{index}", 1, 10) for index in range(6)], loop=UNREAD)
    lab.submit("late")
    assert not any(order.request == "late" for order in lab.sent(msg.Decode)), "there is no other, and it does not read"
    lab.beat(one, loop=30)
    assert lab.decode.request == "late"
    assert lab.to(lab.decode) == one


def test_a_prompt_that_a_hung_prefill_worker_does_not_read_goes_to_another_one(lab: Lab) -> None:
    decode, first, _ = lab.split()
    second = lab.join("prefill", "prefill-1")
    lab.accepted(prompt=40)
    holder = lab.to(lab.prefill)
    lab.beat(holder, heard=lab.counts[holder] - 1, age=UNREAD, loop=UNREAD)
    assert lab.cancelled(holder) == [1]
    lab.say(decode, msg.Accepted("r", 2))
    assert lab.prefill.attempt == 2
    assert lab.to(lab.prefill) == ({first, second} - {holder}).pop()
    lab.say(holder, msg.Prefilled("r", 1, 39, 0, 9))
    lab.tokens(decode, "r", 2, 40, 50)
    assert lab.emitted() == [50]


@pytest.mark.parametrize("hangs", [True, False])
def test_without_another_prefill_worker_the_decode_worker_computes_what_a_hung_one_does_not_read(
    lab: Lab, decode: str, prefill: str, store: str, hangs: bool
) -> None:
    lab.accepted(prompt=40)
    assert lab.to(lab.prefill) == prefill
    lab.beat(prefill, heard=lab.counts[prefill] - 1, age=0 if hangs else UNREAD, loop=UNREAD)
    assert lab.decode.attempt == 1 + hangs
    assert lab.cancelled(prefill) == [1] * hangs
    if hangs:
        assert lab.decode.fetch == 0
        assert len(lab.sent(msg.Prefill)) == 1


def test_a_hung_store_is_not_used_and_is_when_it_goes_on(lab: Lab) -> None:
    _decode, _prefill, store = lab.split()
    order = lab.submit("first", prompt=40)
    lab.holds(store, order, 9)
    lab.beat(store, loop=UNREAD)
    lab.submit("second", prompt=40)
    assert lab.decode.request == "second"
    assert lab.decode.fetch == 0
    lab.beat(store)
    lab.submit("third", prompt=40)
    assert lab.decode.request == "third"
    assert lab.decode.fetch > 0


# --- messages whose loss heartbeats repair ---


def test_a_lost_have_is_repaired_by_two_heartbeats(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.accepted(prompt=40)
    lab.beat(decode, held("r", 1, 40, short=True))
    assert lab.decode.attempt == 1, "the Have may still be on its way"
    lab.beat(decode, held("r", 1, 40, short=True))
    assert lab.decode.attempt == 2
    assert "has only 0 of" in next(note for note in lab.notes() if "attempt 1 is over" in note)


def test_a_have_that_comes_after_all_counts_once(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.accepted(prompt=40)
    lab.beat(decode, held("r", 1, 40, short=True))
    lab.say(decode, msg.FetchIncomplete("r", 1, 0))
    assert lab.decode.attempt == 2
    lab.beat(decode, held("r", 1, 40, short=True))
    lab.beat(decode, held("r", 2, 40))
    lab.say(decode, msg.FetchIncomplete("r", 1, 0))
    assert lab.decode.attempt == 2


@pytest.mark.parametrize("started", [False, True])
def test_a_lost_prefilled_is_repaired_by_two_heartbeats(
    lab: Lab, decode: str, prefill: str, store: str, started: bool
) -> None:
    """The slot of its prefill worker is free for another prompt."""
    for name in ("a", "b", "c"):
        lab.submit(name, prompt=40, max_tokens=100)
    for name in ("a", "b"):
        lab.say(decode, msg.Accepted(name, 1))
    assert [order.request for order in lab.sent(msg.Prefill)] == ["a", "b"]
    if started:
        lab.say(decode, msg.Started("a", 1, 0, 9))
    both = [held("a", 1, 39, ended=True), held("b", 1, 5)]
    lab.beat(prefill, *both)
    assert lab.cancelled(prefill, "a") == []
    assert not any(order.request == "c" for order in lab.sent(msg.Decode))
    lab.beat(prefill, *both)
    assert lab.decode.request == "c"
    assert lab.cancelled(prefill, "a") == [1] * started, "until it has started, the pages must be held"
    if not started:
        lab.say(decode, msg.Started("a", 1, 0, 9))
        assert [message.request for message in lab.sent(msg.Cancel, prefill)] == ["a"]
    lab.tokens(decode, "a", 1, 40, 50)
    assert lab.emitted("a") == [50]
