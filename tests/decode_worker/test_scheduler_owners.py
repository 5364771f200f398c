"""Ownership of attempts on a decode worker: only the owning router's messages count."""

from baton.membership import RouterLost
from baton.messages import AttemptFailed, AttemptName, Cancel, Refused, Resend, RouterHeartbeat, Tokens
from tests.decode_worker.test_scheduler_decisions import PROMPT, order, tokens_of, worker
from tests.support.workers_and_stores import RigWorker, reference


def both(**config: int) -> RigWorker:
    one = worker(**config)
    one.handle(order(PROMPT, 8, "a"), "one")
    one.handle(order(PROMPT[::-1], 8, "b"), "two")
    one.turn()
    return one


def test_each_router_hears_of_its_own_and_how_busy_the_other_keeps_us() -> None:
    one = both()
    assert {
        (letter.router, letter.message.request) for letter in one.letters if not isinstance(letter.message, Tokens)
    } == {("one", "a"), ("two", "b")}
    for letter in one.letters:
        if isinstance(letter.message, Tokens):
            assert {delta.request for delta in letter.message.deltas} == {"a" if letter.router == "one" else "b"}
    beat = one.state.heartbeat(3, "one")
    assert [held.request for held in beat.attempts] == ["a"]
    assert (beat.load.running, beat.others.running) == (2, 1)
    assert beat.load.context == 2 * beat.others.context > 2 * len(PROMPT)


def test_no_router_ends_or_reads_what_is_anothers() -> None:
    one = both()
    one.messages.clear()
    one.handle(Cancel("a", 1), "two")
    one.handle(Resend("a", 1, len(PROMPT)), "two")
    assert not one.messages
    one.handle(RouterHeartbeat((AttemptName("b", 1),)), "two")
    one.handle(order(PROMPT, 8, "a", attempt=2), "two")
    assert [type(message) for message in one.messages] == [AttemptFailed]
    one.rig.settle()
    assert not one.state.heartbeat(0, "three").attempts
    assert len(tokens_of(one.messages, "a")) >= 7


def test_a_lost_router_takes_only_its_own_work_along() -> None:
    one = both()
    one.handle(RouterLost("two"))
    assert not one.state.heartbeat(0, "two").attempts
    one.rig.settle()
    assert tokens_of([letter.message for letter in one.letters if letter.router == "one"], "a") == reference(PROMPT, 8)
    one.handle(RouterHeartbeat(), "one")
    assert one.state.blocks.available == one.num_pages


def test_room_goes_to_the_router_that_was_refused_and_has_less() -> None:
    one = worker(pages=12)
    one.handle(order(PROMPT, 8, "a1"), "one")
    one.handle(order(PROMPT[::-1], 8, "a2"), "one")
    one.handle(order(PROMPT * 2, 8, "b1"), "two")
    one.handle(Cancel("a1", 1), "one")
    one.handle(order(PROMPT, 8, "a3"), "one")
    assert [m.request for m in one.messages if isinstance(m, Refused)] == ["b1", "a3"]
    one.handle(order(PROMPT, 8, "b2"), "two")
    assert [held.request for held in one.state.heartbeat(0, "two").attempts] == ["b2"]
