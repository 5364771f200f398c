"""Coming in: objectives, early rejection, bounded queues, quotas, fairness, and the budget of retries."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from baton.config import ObjectivesConfig, TenantConfig
from baton.errors import ObjectiveUnreachable, Overloaded, RateLimited
from baton.messages import Accepted, Decode, LoadReport, Prefilled, Refused
from baton.messages import AttemptFailed as WorkerFailed
from router.frontend.grpc_api.grpc_calls import status_of
from router.placement.cluster_view import ClusterView
from router.placement.policy import LowestTtft, PlacementDecision
from router.placement.types import PlacementChoice, PlacementRequest, Reject, Wait
from router.queueing.quantile import Quantile, Spread
from tests.router.lab import Lab, held, lab_with
from tests.router.model import EOS


def finish(lab: Lab, worker: str, request: str, prompt: int, attempt: int = 1) -> None:
    lab.say(worker, Accepted(request, attempt))
    lab.tokens(worker, request, attempt, prompt, EOS, finish="stop", computed=prompt)


# --- objectives ---


class Watching(LowestTtft):
    """Baton's own rule, and what it was asked; or what a test makes it answer."""

    def __init__(self, answer: PlacementChoice | None = None) -> None:
        self.answer = answer
        self.requests: list[PlacementRequest] = []

    def place(self, ask: PlacementRequest, view: ClusterView) -> PlacementDecision:
        self.requests.append(ask)
        return PlacementDecision(self.answer) if self.answer else super().place(ask, view)


def test_objectives_come_from_the_request_or_from_its_class() -> None:
    placer = Watching()
    cluster = lab_with(
        placer, slo_classes={0: ObjectivesConfig(ttft_ms=2_000, tpot_ms=50), 1: ObjectivesConfig(tpot_ms=200)}
    )
    cluster.colocated()
    cluster.submit("a")
    cluster.submit("b", ttft=7.0)
    cluster.submit("c", priority=1)
    cluster.submit("d", priority=2)
    assert [(ask.ttft, ask.tpot) for ask in placer.requests] == [(2.0, 0.05), (7.0, 0.05), (None, 0.2), (None, None)]


def test_what_placement_rejects_is_refused_at_once_with_its_hint() -> None:
    cluster = lab_with(Watching(Reject("no worker has its first token in 0.5 s", retry_after=2.5)))
    cluster.colocated()
    cluster.submit(ttft=0.5)
    refusal = cluster.error("r")
    assert isinstance(refusal, ObjectiveUnreachable)
    code, metadata = status_of(refusal)
    assert code.name == "RESOURCE_EXHAUSTED"
    assert dict(metadata) == {"baton-reason": "objective", "retry-after-ms": "2500"}
    assert cluster.state.stats().rejected == {"objective": 1}


def test_what_has_been_begun_is_not_rejected_for_an_objective() -> None:
    placer = Watching()
    cluster = lab_with(placer)
    one, _ = cluster.colocated(2)
    cluster.submit(ttft=0.5)
    assert cluster.to(cluster.decode) == one
    cluster.say(one, Accepted("r", 1))
    cluster.now += 0.9
    placer.answer = Reject("too late")
    cluster.say(one, WorkerFailed("r", 1, "internal", "a step failed"))
    assert placer.requests[-1].ttft is None
    assert cluster.alive()
    placer.answer = None
    cluster.advance(0.01)
    assert cluster.decode.attempt == 2


def test_a_wait_that_outlasts_the_objective_ends_then() -> None:
    cluster = lab_with(Watching(Wait("every worker is busy")))
    (decode,) = cluster.colocated()
    cluster.submit(ttft=1.0)
    cluster.submit("patient")
    cluster.advance(0.9)
    cluster.beat(decode)
    assert cluster.alive()
    cluster.advance(0.2)
    assert isinstance(cluster.error("r"), ObjectiveUnreachable)
    assert "1.0 s" in str(cluster.error("r"))
    assert cluster.alive("patient")
    assert cluster.state.stats().rejected == {"objective_while_waiting": 1}


def test_the_time_that_computing_takes_is_no_time_to_wait() -> None:
    cluster = lab_with(Watching(Wait("every worker is busy")))
    (decode,) = cluster.colocated()
    cluster.report(decode, LoadReport(prefill_rate=100.0))
    cluster.submit(prompt=60, ttft=1.0)
    cluster.advance(0.3)
    assert cluster.alive()
    cluster.advance(0.2)
    assert isinstance(cluster.error("r"), ObjectiveUnreachable)


class OneByOne(LowestTtft):
    """Baton's own rule for as many requests as a test says. All further requests wait."""

    free = 1

    def place(self, ask: PlacementRequest, view: ClusterView) -> PlacementDecision:
        if not self.free:
            return PlacementDecision(Wait("every worker is busy"))
        self.free -= 1
        return super().place(ask, view)


@pytest.mark.technique("Admission by objectives")
def test_too_long_a_wait_is_refused_at_once() -> None:
    """A prompt of 40 tokens leaves the queue every third of a second, and 12 others wait for the one that comes."""
    placer = OneByOne()
    cluster = lab_with(placer, queue_timeout_ms=30_000)
    (decode,) = cluster.colocated()
    for turn in range(13):
        cluster.submit(f"r{turn}", prompt=40)
    for turn in range(13, 73):
        cluster.advance(1 / 3)
        cluster.submit(f"r{turn}", prompt=40)
        placer.free = 1
        finish(cluster, decode, cluster.decode.request, 40)
        cluster.beat(decode)
    assert cluster.state.stats().queued == 12
    cluster.submit("urgent", prompt=40, ttft=2.0, priority=-1)
    cluster.submit("in time", prompt=40, ttft=6.0)
    cluster.submit("too late", prompt=40, ttft=4.0)
    assert cluster.alive("urgent")
    assert cluster.alive("in time")
    refusal = cluster.error("too late")
    assert isinstance(refusal, ObjectiveUnreachable)
    assert 500 <= refusal.retry_after_ms <= 3_000


def test_too_long_a_wait_is_refused_without_objective() -> None:
    """Of the 40 tokens that leave the queue every second, 12 prompts in line leave nothing in time for another."""
    placer = OneByOne()
    cluster = lab_with(placer, queue_timeout_ms=10_000)
    (decode,) = cluster.colocated()
    for turn in range(7):
        cluster.submit(f"r{turn}", prompt=40)
    for turn in range(7, 30):
        cluster.advance(1.0)
        cluster.submit(f"r{turn}", prompt=40)
        placer.free = 1
        finish(cluster, decode, cluster.decode.request, 40)
        cluster.beat(decode)
    for turn in range(30, 42):
        cluster.submit(f"r{turn}", prompt=40)
    refusal = cluster.error("r41")
    assert type(refusal) is Overloaded
    assert "the queue would take" in str(refusal)
    assert cluster.alive("r30")


def test_a_line_is_forecast_from_how_it_was_drained_itself() -> None:
    """Two tokens in three are those of urgent prompts, none of which waits when the other newcomer comes."""
    placer = OneByOne()
    cluster = lab_with(placer, queue_timeout_ms=30_000, ageing_ms=60_000)
    (decode,) = cluster.colocated()
    for turn in range(5):
        cluster.submit(f"p{turn}", prompt=40, priority=1)
    for turn in range(45):
        cluster.advance(0.25)
        if turn % 3 < 2:
            cluster.submit(f"u{turn}", prompt=40)
        else:
            cluster.submit(f"p{turn + 5}", prompt=40, priority=1)
        placer.free = 1
        finish(cluster, decode, cluster.decode.request, 40)
        cluster.beat(decode)
    assert cluster.state.stats().waiting[1] >= 4
    cluster.submit("too late", prompt=40, priority=1, ttft=3.0)
    assert isinstance(cluster.error("too late"), ObjectiveUnreachable)
    cluster.submit("urgent", prompt=40, ttft=3.0)
    assert cluster.alive("urgent")


def test_a_rejection_changes_no_counter() -> None:
    """While a tenant's requests are refused none of them waits, and yet it is not lifted to those that do."""
    cluster = lab_with(max_queued=3)
    for i in range(3):
        cluster.submit(f"a{i}", tenant="a", prompt=40, priority=-1)
    cluster.submit("b0", tenant="b", prompt=40)
    assert isinstance(cluster.error("b0"), Overloaded)
    cluster.colocated()
    assert [order.request for order in cluster.sent(Decode)] == ["a0", "a1", "a2"]
    queue = cluster.state._admission.queue
    assert queue._fairness.counter("b") == 0.0
    assert queue._fairness.counter("a") > 0.0


def test_what_first_tokens_are_late_by_is_learned() -> None:
    late = Quantile(0.9, least=0.05)
    for turn in range(2_000):
        late.learn(turn % 100 / 50)  # evenly between 0 and 2 s
    assert 1.5 < late.seconds < 2.0
    for _ in range(600):
        late.learn(0.0)
    assert late.seconds < 0.5


def test_what_is_seldom_exceeded() -> None:
    spread = Spread()
    assert spread.most == 0.0
    for turn in range(1_000):
        spread.learn((turn % 5 - 2) / 10)  # evenly from -0.2 to 0.2, so 0.12 from their mean on average
    assert 0.3 < spread.most < 0.45
    for _ in range(300):
        spread.learn(-1.0)
    assert spread.most == 0.0


# --- bounds ---


def test_a_full_queue_turns_the_least_urgent_away() -> None:
    cluster = lab_with(max_queued=2)
    cluster.submit("batch", priority=1)
    cluster.submit("a")
    cluster.submit("b")
    assert isinstance(cluster.error("batch"), Overloaded)
    assert cluster.alive("a")
    assert cluster.alive("b")
    assert cluster.state.stats().rejected == {"queue_full": 1}
    assert cluster.state.stats().waiting == {0: 2}


def test_a_queue_is_full_by_tokens_too_but_takes_one_of_any_length() -> None:
    cluster = lab_with(max_queued_tokens=100)
    cluster.submit("long", prompt=200)
    assert cluster.alive("long")
    cluster.submit("short", prompt=10, priority=-1)
    assert isinstance(cluster.error("long"), Overloaded)
    assert cluster.alive("short")


def test_without_a_queue_no_request_waits() -> None:
    cluster = lab_with(max_queued=0)
    cluster.submit()
    assert isinstance(cluster.error("r"), Overloaded)


# --- tenants ---


def test_over_quota_is_refused_with_the_time_to_wait() -> None:
    cluster = lab_with(tenants={"a": TenantConfig(tokens_per_minute=60, burst_s=60)})
    (decode,) = cluster.colocated()
    cluster.submit("one", prompt=10, max_tokens=40, tenant="a")
    cluster.submit("two", prompt=10, max_tokens=40, tenant="a")
    cluster.submit("other", prompt=10, max_tokens=40, tenant="b")
    refusal = cluster.error("two")
    assert isinstance(refusal, RateLimited)
    assert refusal.retry_after_ms == 40_000
    assert [order.request for order in cluster.sent(Decode)] == ["one", "other"]
    finish(cluster, decode, "one", 10)  # after one token of the 40
    cluster.submit("three", prompt=9, max_tokens=40, tenant="a")
    assert cluster.decode.request == "three"
    assert cluster.state.stats().rejected == {"rate_limited": 1}


def test_an_unstarted_request_uses_no_quota() -> None:
    cluster = lab_with(max_queued=0, tenants={"a": TenantConfig(tokens_per_minute=60, requests_per_minute=1)})
    for name in ("one", "two", "three"):
        cluster.submit(name, prompt=10, max_tokens=40, tenant="a")
        assert type(cluster.error(name)) is Overloaded
    cluster.colocated()
    cluster.submit("four", prompt=10, max_tokens=40, tenant="a")
    assert cluster.decode.request == "four"


def test_tokens_by_tenant_are_told() -> None:
    cluster = lab_with()
    (decode,) = cluster.colocated()
    cluster.submit(prompt=10, tenant="a")
    finish(cluster, decode, "r", 10)
    assert cluster.state.stats().tenant_tokens == {("a", "computed"): 10, ("a", "cached"): 0, ("a", "generated"): 1}


@settings(max_examples=25, deadline=None)
@given(
    flood=st.integers(2, 8),
    prompts=st.tuples(st.integers(5, 60), st.integers(5, 60)),
    outputs=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    slots=st.integers(1, 3),
)
def test_a_tenant_that_waits_has_its_share_whatever_the_other_sends(
    flood: int, prompts: tuple[int, int], outputs: tuple[int, int], slots: int
) -> None:
    """Both always have something waiting: what they were served differs by what runs at once, twice."""
    cluster = lab_with(max_queued=100)
    (decode,) = cluster.colocated()
    served, waiting, running = {"a": 0, "b": 0}, {"a": 0, "b": 0}, dict[str, tuple[str, int]]()
    count, seen = 0, 0
    for _ in range(40):
        for tenant, most in (("a", flood), ("b", 1)):
            while waiting[tenant] < most:
                count, at = count + 1, "ab".index(tenant)
                cluster.submit(f"{tenant}{count}", prompts[at], outputs[at], seed=count, tenant=tenant)
                waiting[tenant] += 1
        new = cluster.sent(Decode)[seen:]
        seen += len(new)
        for order in new:
            if len(running) >= slots:
                cluster.say(decode, Refused(order.request, order.attempt, "busy"))
            else:
                cluster.say(decode, Accepted(order.request, order.attempt))
                running[order.request] = (order.request[0], order.attempt)
                waiting[order.request[0]] -= 1
        oldest = next(iter(running), None)
        if oldest is not None:
            tenant, attempt = running.pop(oldest)
            at = "ab".index(tenant)
            tokens = [50] * outputs[at]
            cluster.tokens(decode, oldest, attempt, prompts[at], *tokens, finish="length", computed=prompts[at])
            served[tenant] += prompts[at] + 2 * outputs[at]
        cluster.advance(0.01)
        cluster.beat(decode, *(held(name, attempt, 0) for name, (_, attempt) in running.items()))
    once = max(p + 2 * o for p, o in zip(prompts, outputs, strict=True)) * (slots + 16)
    assert abs(served["a"] - served["b"]) <= 2 * once


def computes(cluster: Lab, decode: str, seconds: float) -> None:
    """The worker takes so long for a prompt of 40 tokens."""
    cluster.report(decode, LoadReport(prefill_rate=40 / seconds))


def test_where_several_tenants_are_a_worker_has_no_more_prompts_than_it_needs() -> None:
    """The other prompts wait in the router's fair queue, where a later request cannot overtake them."""
    cluster = lab_with()
    (decode,) = cluster.colocated()
    computes(cluster, decode, 0.4)
    for i in range(4):
        cluster.submit(f"a{i}", tenant="a", prompt=40)
    assert len(cluster.sent(Decode)) == 4, "one tenant alone gains nothing by waiting here"
    for name in ("b0", "b1"):
        cluster.submit(name, tenant="b", prompt=40)
    cluster.submit("a4", tenant="a", prompt=40)
    assert cluster.state.stats().queued == 3
    assert "prompts enough" in cluster.state.explain("b0").waits
    for i in range(3):
        finish(cluster, decode, f"a{i}", 40)
    assert [order.request for order in cluster.sent(Decode)][4:] == ["b0"]
    finish(cluster, decode, "a3", 40)
    assert cluster.decode.request == "b1"


def test_held_back_requests_are_not_overtaken() -> None:
    cluster = lab_with()
    (decode,) = cluster.colocated()
    computes(cluster, decode, 0.4)
    for i in range(2):
        cluster.submit(f"a{i}", tenant="a", prompt=40)
    cluster.submit("b0", tenant="b", prompt=40)
    assert cluster.state.stats().queued == 1
    computes(cluster, decode, 0.01)
    cluster.submit("a2", tenant="a", prompt=40)
    assert cluster.state.stats().queued == 2
    cluster.advance(0.01)
    assert [order.request for order in cluster.sent(Decode)] == ["a0", "a1", "b0", "a2"]


def test_short_prompts_are_not_held_back() -> None:
    cluster = lab_with()
    (decode,) = cluster.colocated()
    computes(cluster, decode, 0.01)
    for i in range(12):
        cluster.submit(f"r{i}", tenant="ab"[i % 2], prompt=40)
    assert len(cluster.sent(Decode)) == 12


# --- retries ---


def test_a_sick_worker_does_not_multiply_the_work() -> None:
    """It accepts everything and fails it. Past the budget, attempts are repeated no faster than that fills."""
    cluster = lab_with(max_attempts=1_000, retries_per_s=1.0, retry_share=0.0, queue_timeout_ms=60_000)
    (decode,) = cluster.colocated()
    for i in range(4):
        cluster.submit(f"r{i}")
    answered = 0
    for _ in range(200):
        for order in cluster.sent(Decode)[answered:]:
            answered += 1
            cluster.say(decode, Accepted(order.request, order.attempt))
            cluster.say(decode, WorkerFailed(order.request, order.attempt, "internal", "sick"))
        cluster.advance(0.1)
        cluster.beat(decode)
    assert 4 + 10 + 18 <= cluster.state.stats().counts.attempts <= 4 + 10 + 21
    assert all(cluster.alive(f"r{i}") for i in range(4))  # they wait; none has failed


def test_waiting_for_a_retry_has_a_deadline() -> None:
    cluster = lab_with(max_attempts=1_000, retries_per_s=0.001, retry_share=0.0)
    (decode,) = cluster.colocated()
    cluster.submit()
    for attempt in (1, 2):
        cluster.say(decode, Accepted("r", attempt))
        cluster.say(decode, WorkerFailed("r", attempt, "internal", "sick"))
    assert cluster.decode.attempt == 2
    for _ in range(60):
        cluster.advance(0.1)
        cluster.beat(decode)
    assert isinstance(cluster.error("r"), Overloaded)


def test_a_death_costs_no_retry() -> None:
    cluster = lab_with(retries_per_s=0.001, retry_share=0.0)
    one, two = cluster.colocated(2)
    for i in range(6):
        cluster.submit(f"r{i}")
    for order in cluster.sent(Decode):
        cluster.say(cluster.to(order), Accepted(order.request, 1))
    cluster.leaves(one)
    assert sorted(order.request for order in cluster.sent(Decode) if order.attempt == 2) == sorted(
        order.request for order in cluster.sent(Decode, one)
    )
    assert cluster.state.stats().queued == 0
    assert cluster.sent(Decode, two)


def test_first_attempts_earn_retries() -> None:
    cluster = lab_with(max_attempts=1_000, retries_per_s=0.001, retry_share=0.5)
    (decode,) = cluster.colocated()
    for i in range(10):
        cluster.submit(f"r{i}")
        finish(cluster, decode, f"r{i}", 10)
    cluster.submit("sick")
    for attempt in range(1, 10):
        cluster.say(decode, Accepted("sick", attempt))
        cluster.say(decode, WorkerFailed("sick", attempt, "internal", "sick"))
        if cluster.decode.attempt == attempt:
            break
    assert cluster.decode.attempt == 2  # a burst of one: no tenant accumulates retries


def test_prompts_that_pass_by_do_not_hide_those_that_wait() -> None:
    """What is placed at once beside a queue counts as served, by what it had to compute."""
    cluster = lab_with()
    decode, prefill, store = cluster.split()
    for i in range(3):
        cluster.submit(f"r{i}", prompt=41, seed=i)
    assert cluster.state.stats().queued == 1
    cluster.say(decode, Accepted("r0", 1))
    cluster.say(prefill, Prefilled("r0", 1, 40, 0, 10))
    assert cluster.state.stats().queued == 0
    cluster.beat(store)
