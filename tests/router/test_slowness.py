"""Outlier detection: which worker is slow in the router's eyes, and what placement and running requests make of it."""

import msgspec
import pytest

from baton.messages import Accepted, Decode, Delta, StepSample
from router.placement.slowness import Slowness
from tests.router.lab import Lab, held
from tests.router.model import card
from tests.router.placing import Cluster

PERIOD = 0.25  # seconds between heartbeats
STEP = 0.01  # seconds


def workers(*names: str) -> Slowness:
    slowness = Slowness()
    for name in names:
        slowness.join(name, "decode")
    return slowness


def beats(slowness: Slowness, name: str, gap: float, start: float, end: float) -> float:
    now = start
    while now <= end:
        slowness.beat(name, PERIOD, 0.0, now)
        now += gap
    return now - gap


def decodes(
    slowness: Slowness, name: str, gap: float, start: float, count: int, *, step: float = STEP, request: str = "r"
) -> float:
    """The worker is to take `step` by its fit, STEP by its calibration, and its tokens come every `gap` seconds."""
    now = start
    for position in range(count):
        slowness.tokens(name, [Delta(request, 1, position, (7,))], step, STEP, now)
        now += gap
    return now - gap


def test_late_heartbeats_are_a_delay_and_timely_ones_end_it() -> None:
    slowness = workers("a", "b", "c")
    for name, gap in (("a", PERIOD), ("b", PERIOD + 0.015), ("c", 1.0)):
        beats(slowness, name, gap, 0.0, 10.0)
    assert [slowness.delay(name, 10.0) for name in "ab"] == [0.0, 0.0], "they jitter at most"
    assert slowness.delay("c", 10.0) == pytest.approx(0.73)
    beats(slowness, "a", PERIOD, 10.25, 13.5)
    beats(slowness, "b", PERIOD, 10.25, 13.5)
    beats(slowness, "c", PERIOD, 10.25, 13.5)
    assert slowness.delay("c", 13.5) == 0.0


def test_a_heartbeat_that_is_overdue_counts_before_it_comes() -> None:
    slowness = workers("a", "b")
    for name in "ab":
        beats(slowness, name, PERIOD, 0.0, 5.0)
    beats(slowness, "a", PERIOD, 5.25, 5.5)
    assert not slowness.silent("a", 5.6)
    assert slowness.silent("b", 5.6)
    assert slowness.delay("b", 5.6) == pytest.approx(0.33)
    slowness.extend(0.6)
    assert slowness.delay("b", 5.6) == 0.0, "the router itself stood still"


def test_a_main_loop_that_hangs_between_steps_is_a_delay() -> None:
    slowness = workers("a", "b")
    for i in range(12):
        slowness.beat("a", PERIOD, 0.05, i * PERIOD)
        slowness.beat("b", PERIOD, 0.85, i * PERIOD)
    assert slowness.delay("b", 11 * PERIOD) == pytest.approx(0.6)
    assert slowness.delay("a", 11 * PERIOD) == 0.0


@pytest.mark.technique("Grey failure: slow workers are left")
def test_a_worker_whose_tokens_come_later_than_its_steps_take_is_slow() -> None:
    slowness = workers("a", "b", "c")
    decodes(slowness, "a", 0.012, 0.0, 200)
    decodes(slowness, "b", 0.015, 0.0, 200)
    end = decodes(slowness, "c", 0.12, 0.0, 200)
    assert [slowness.pace(name, end) for name in "ab"] == [1.0, 1.0]
    assert slowness.pace("c", end) == pytest.approx(12 / 1.5)
    assert slowness.pace("c", end + 4.0) > 1.0, "it has no requests now, and nothing shows that it is well"
    assert slowness.pace("c", end + 6.0) == 1.0, "the next request tells"
    end = decodes(slowness, "c", 0.012, end + 6.0, 100, request="s")
    assert slowness.pace("c", end) == 1.0, "what was before that is forgotten"


def test_a_worker_that_stays_slow_is_tried_less_and_less() -> None:
    slowness, held, now = workers("a", "b"), list[float](), 0.0
    decodes(slowness, "a", STEP, 0.0, 100)
    for trial in range(5):
        now = end = decodes(slowness, "b", 10 * STEP, now, 10, request=f"r{trial}")
        while slowness.pace("b", now) > 1:
            now += 0.5
        held.append(now - end)
    assert held == pytest.approx([5.5, 10.5, 20.5, 20.5, 20.5])
    decodes(slowness, "b", STEP, now, 100, request="well")
    decodes(slowness, "b", STEP, now + 60, 100, request="again")
    end = decodes(slowness, "b", 10 * STEP, now + 120, 10, request="ill")
    assert slowness.pace("b", end + 5) > 1
    assert slowness.pace("b", end + 5.5) == 1


def test_a_worker_whose_steps_have_become_slow_has_the_pace_it_tells_of() -> None:
    slowness = workers("a", "b")
    decodes(slowness, "a", STEP, 0.0, 100)
    end = decodes(slowness, "b", 10 * STEP, 0.0, 100, step=10 * STEP)
    assert slowness.pace("b", end) == 1.0, "its steps are priced as they are"
    assert slowness.slowdown("b", end) == pytest.approx(10.0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_where_all_are_slow_none_is(count: int) -> None:
    names = [f"w{i}" for i in range(count)]
    slowness = workers(*names)
    for name in names:
        beats(slowness, name, 1.0, 0.0, 10.0)
        decodes(slowness, name, 0.2, 0.0, 50)
    assert all(slowness.delay(name, 10.0) == 0.0 for name in names)
    assert all(slowness.pace(name, 10.0) == slowness.slowdown(name, 10.0) == 1.0 for name in names)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_at_most_half_of_the_workers_are_outliers(count: int) -> None:
    names = [f"w{i}" for i in range(count)]
    for slow in range(count + 1):
        slowness = workers(*names)
        for i, name in enumerate(names):
            beats(slowness, name, 1.0 if i < slow else PERIOD, 0.0, 10.0)
            decodes(slowness, name, 0.2 if i < slow else STEP, 0.0, 50)
        outliers = slow if 2 * slow <= count else 0
        assert sum(slowness.delay(name, 10.0) > 0 for name in names) == outliers
        assert sum(slowness.pace(name, 10.0) > 1 for name in names) == outliers


def test_only_tokens_that_were_owed_all_the_time_tell() -> None:
    slowness = workers("a", "b")
    decodes(slowness, "a", STEP, 0.0, 100)
    now = 0.0
    for request in range(20):  # a worker with nothing to do in between
        slowness.tokens("b", [Delta(f"r{request}", 1, 0, (7,))], STEP, STEP, now)
        slowness.tokens("b", [Delta(f"r{request}", 1, 1, (7,), finish="stop")], STEP, STEP, now + STEP)
        now += 1.0
    assert slowness.pace("b", now) == 1.0
    slowness.tokens("b", [Delta("s", 1, 0, (7,))], STEP, STEP, now)
    slowness.tokens("b", [Delta("s", 1, 1, (7,) * 100)], STEP, STEP, now + 1.0)
    assert slowness.pace("b", now + 1.0) == 1.0, "a message with many tokens takes as many steps"


def test_placement_leaves_a_slow_worker_by_price() -> None:
    cluster = Cluster()
    slow, quick = cluster.decoder("slow"), cluster.decoder("quick")
    cluster.runs(quick, 4)
    before = cluster.costs()
    assert cluster.plan().decode == "slow", "it has less to do"
    slow.rate_slowness(0.5, 10.0, 10.0)
    after = cluster.costs()
    row = cluster.view.table.index["slow"]
    assert cluster.plan().decode == "quick"
    assert after.predict(None, row).delay == 0.5
    assert after.compute[row] == pytest.approx(10 * before.compute[row])
    slow.rate_slowness(0.0, 1.0, 1.0)
    assert cluster.plan().decode == "slow"


def test_a_slow_prefill_worker_is_left_as_well() -> None:
    cluster = Cluster()
    cluster.decoder(busy=30)
    slow, _ = cluster.prefiller("p0"), cluster.prefiller("p1")
    cluster.store()
    slow.rate_slowness(0.7, 1.0, 1.0)
    assert {cluster.plan().prefill for _ in range(4)} == {"p1"}


# --- running requests ---


def two_workers() -> tuple[Lab, str, str]:
    """Workers that take STEP for a step, and a running request on the first one."""
    lab = Lab()
    samples = (*(StepSample(0, 0, rows, 64 * rows, STEP) for rows in (1, 2, 4)), StepSample(64, 2_080, 0, 0, STEP))
    for name in ("decode-0", "decode-1"):
        lab.join("decode", name, model=msgspec.structs.replace(card(), steps=samples, pool_pages=1_000))
    lab.submit("r", max_tokens=200)
    victim = lab.to(lab.decode)
    (other,) = {"decode-0.1", "decode-1.1"} - {victim}
    lab.submit("s", max_tokens=200)
    assert lab.to(lab.decode) == other
    return lab, victim, other


def stream(lab: Lab, victim: str, other: str, gap: float, seconds: float) -> None:
    """Both requests get tokens, one of them late. Both workers send heartbeats."""
    begun, position, due = lab.now, {"r": 10, "s": 10}, {"r": gap, "s": 0.02}
    next_beat = 0.0
    while (passed := lab.now - begun) < seconds and lab.alive():
        for request, sender in (("r", victim), ("s", other)):
            every = gap if request == "r" else 0.02
            if passed >= due[request] and lab.cancelled(victim) == []:
                lab.tokens(sender, request, 1, position[request], 9)
                position[request] += 1
                due[request] += every
        if passed >= next_beat:
            for sender, request in ((victim, "r"), (other, "s")):
                if lab.cancelled(victim) == []:
                    lab.beat(sender, held(request, 1, position[request]))
            next_beat += PERIOD
        lab.advance(0.01)


def test_a_request_moves_from_a_slow_worker_with_its_tokens_and_counts_no_failure() -> None:
    lab, victim, other = two_workers()
    stream(lab, victim, other, gap=0.2, seconds=3.6)
    assert lab.cancelled(victim) == [1]
    order = [each for each in lab.sent(Decode, other) if each.request == "r"][-1]
    assert order.attempt == 2
    assert len(order.tokens) // 4 == 10 + len(lab.emitted("r"))
    assert lab.state.stats().counts.moved == 1
    record = lab.state.explain("r")
    assert record.request.history.failures == 0
    assert record.request.history.excluded == {victim}, "it moves no more often than there are workers"
    assert f"{victim[:-2]} is slow" in record.attempts[0].end_reason
    assert "elsewhere" in record.attempts[0].end_reason
    candidates, _ = record.attempts[1].candidates()
    steps = {one.decode: one.predicted.step for one in candidates}
    assert steps[victim[:-2]] > 5 * steps[other[:-2]], "so Explain shows why it is not chosen again"


def test_a_request_stays_with_a_healthy_worker() -> None:
    lab, victim, other = two_workers()
    stream(lab, victim, other, gap=0.02, seconds=3.0)
    assert lab.cancelled(victim) == []
    assert lab.state.stats().counts.moved == 0


def test_an_order_that_a_late_worker_does_not_answer_goes_elsewhere() -> None:
    lab, victim, other = two_workers()
    for sender, request in ((victim, "r"), (other, "s")):
        lab.say(sender, Accepted(request, 1))
    for _ in range(8):
        lab.beat(victim, held("r", 1, 10))
        lab.beat(other, held("s", 1, 10))
        lab.advance(PERIOD)
    lab.submit("t", prompt=12, max_tokens=20)
    late = lab.to(lab.decode)
    quick = other if late == victim else victim
    for _ in range(3):
        lab.beat(quick, *[held("s" if quick == other else "r", 1, 10)])
        for _ in range(5):
            lab.advance(PERIOD / 5)
    assert lab.cancelled(late, "t") == [1]
    assert lab.to(lab.decode) == quick
    assert lab.decode.request == "t"
