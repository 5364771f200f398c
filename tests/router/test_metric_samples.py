"""What the router counts for its metrics: objectives met, hops, lost processes, and the ceiling of prefix reuse."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.config import ObjectivesConfig, TenantConfig
from baton.messages import Accepted, Prefilled, SamplingParams, Started
from baton.metrics import TABLE
from baton.timeline import Timeline
from router.events import ClientGone, ServingAccount, Shutdown, Summary
from router.frontend.metric_samples import VllmMetrics, heartbeat_age, metric_samples
from router.frontend.served_model import ServedModel
from router.placement.reuse_ceiling import ReuseCeiling
from router.queueing.admission import ModelLimits
from router.requests.hops import HOPS, ttft_hops
from tests.router.lab import Lab, lab_with
from tests.router.model import CONTEXT, EOS, PAGE


def slo(lab: Lab, level: int = 0) -> dict[str, tuple[int, int]]:
    """Requests of a level that met each objective, and that missed it."""
    counts = lab.state.stats().attainment
    return {each: (counts[level, each, True], counts[level, each, False]) for each in ("ttft", "tpot", "all")}


# --- objectives ---


@pytest.mark.parametrize(
    ("first", "rest", "met"),
    [(0.4, 0.03, ("ttft", "tpot", "all")), (0.6, 0.03, ("tpot",)), (0.4, 0.05, ("ttft",)), (0.6, 0.05, ())],
)
def test_a_request_meets_the_objectives_that_its_times_keep(first: float, rest: float, met: tuple[str, ...]) -> None:
    cluster = lab_with(slo_classes={0: ObjectivesConfig(ttft_ms=500, tpot_ms=40)})
    (decode,) = cluster.colocated()
    cluster.submit(prompt=10, max_tokens=3)
    cluster.say(decode, Accepted("r", 1))
    cluster.now += first
    cluster.tokens(decode, "r", 1, 10, 8, computed=10)
    cluster.now += 2 * rest
    cluster.tokens(decode, "r", 1, 11, 8, 8, finish="length")
    assert slo(cluster) == {each: (1, 0) if each in met else (0, 1) for each in ("ttft", "tpot", "all")}


def test_a_request_without_objectives_meets_them_if_it_is_served_and_a_failed_one_meets_none() -> None:
    cluster = lab_with()
    (decode,) = cluster.colocated()
    cluster.submit("served")
    cluster.say(decode, Accepted("served", 1))
    cluster.now += 3.0
    cluster.tokens(decode, "served", 1, 10, EOS, finish="stop", computed=10)
    assert slo(cluster)["all"] == (1, 0)
    cluster.submit("cut off")
    cluster.tell(Shutdown())
    assert slo(cluster) == {"ttft": (1, 1), "tpot": (1, 1), "all": (1, 1)}


def test_the_default_objectives_are_measured_and_refuse_nothing() -> None:
    cluster = lab_with()
    (decode,) = cluster.colocated()
    cluster.submit(prompt=10, max_tokens=3)
    cluster.say(decode, Accepted("r", 1))
    cluster.now += 6.1
    cluster.tokens(decode, "r", 1, 10, 8, computed=10)
    cluster.now += 0.2
    cluster.tokens(decode, "r", 1, 11, 8, 8, finish="length")
    assert slo(cluster) == {"ttft": (0, 1), "tpot": (1, 0), "all": (0, 1)}


def test_what_clients_cause_themselves_says_nothing_of_objectives() -> None:
    cluster = lab_with(tenants={"slow": TenantConfig(requests_per_minute=1, burst_s=60)})
    cluster.colocated()
    cluster.submit("left")
    cluster.tell(ClientGone("left"))
    for name in ("runs", "over its rate"):
        cluster.submit(name, tenant="slow")
    cluster.submit("too long", prompt=CONTEXT + 1)
    counts = cluster.state.stats().counts
    assert (counts.cancelled, dict(counts.failed)) == (1, {"rate_limited": 1, "context_too_long": 1})
    assert slo(cluster)["all"] == (0, 0)


def test_classes_are_told_apart_from_the_start() -> None:
    cluster = lab_with(slo_classes={2: ObjectivesConfig(ttft_ms=500)})
    assert {level for level, _, _ in cluster.state.stats().attainment} == {0, 2}


# --- hops ---


def test_the_hops_of_a_split_request_are_those_that_its_workers_tell() -> None:
    cluster = lab_with()
    decode, prefill, _ = cluster.split()
    cluster.submit(prompt=200)
    for seconds, sender, message in (
        (0.01, decode, Accepted("r", 1)),
        (0.5, prefill, Prefilled("r", 1, computed=199, hit=0, stored=12, queue_ms=100, compute_ms=300)),
        (0.02, decode, Started("r", 1, fetched_pages=12)),
    ):
        cluster.now += seconds
        cluster.say(sender, message)
    cluster.now += 0.03
    cluster.tokens(decode, "r", 1, 200, EOS, finish="stop", computed=1)
    hops = ttft_hops(cluster.end().summary)
    assert hops == pytest.approx(
        {
            "intake": 0.0,
            "queue": 0.0,
            "accept": 0.01,
            "prefill_queue": 0.1,
            "prefill_compute": 0.3,
            "dispatch": 0.1,
            "handoff": 0.02,
            "first_step": 0.03,
        }
    )


def test_the_hops_of_a_local_request_have_no_prefill_worker() -> None:
    cluster = lab_with()
    (decode,) = cluster.colocated()
    cluster.submit()
    cluster.now += 0.2
    cluster.say(decode, Accepted("r", 1))
    cluster.now += 0.1
    cluster.tokens(decode, "r", 1, 10, EOS, finish="stop", computed=10)
    hops = ttft_hops(cluster.end().summary)
    assert hops == pytest.approx({"intake": 0, "queue": 0, "accept": 0.2, "load": 0.1, "first_step": 0})


instants = st.none() | st.floats(0, 10)


@given(
    received=st.floats(0, 1),
    submitted=st.floats(0, 10),
    placed=instants,
    accepted=instants,
    prefill_sent=instants,
    prefilled=instants,
    started=instants,
    first_token=instants,
    prefill_ms=st.tuples(st.none() | st.integers(0, 9_000), st.none() | st.integers(0, 9_000)),
)
def test_hops_are_never_negative_and_add_up_to_the_time_to_first_token(
    received: float, submitted: float, prefill_ms: tuple[int | None, int | None], **instants: float | None
) -> None:
    """Whatever is missing, late or out of order."""
    line = Timeline(received, **instants)
    account = ServingAccount(prefill_queue_ms=prefill_ms[0], prefill_compute_ms=prefill_ms[1])
    hops = ttft_hops(Summary(line, submitted, served=account))
    placed, first = line.placed, line.first_token
    if placed is None or first is None or placed > first:
        assert hops is None
        return
    assert set(hops) <= set(HOPS)
    if received <= placed:
        assert all(seconds >= 0 for seconds in hops.values())
    assert sum(hops.values()) == pytest.approx(first - received)


# --- speculation ---


def test_proposals_are_counted_over_attempts_and_a_total_that_shrinks_is_not() -> None:
    cluster = lab_with()
    cluster.colocated(2)
    cluster.accepted(max_tokens=9)
    first = cluster.to(cluster.decode)
    cluster.tokens(first, "r", 1, 10, 8, 8, 8, verified=3, accepted=2)
    cluster.tokens(first, "r", 1, 13, 8, verified=3, accepted=2)  # a step without proposals
    cluster.tokens(first, "r", 1, 14, 8, verified=5, accepted=2)
    cluster.tokens(first, "r", 1, 15, 8, verified=1, accepted=1)  # it counts downwards
    cluster.leaves(first)
    last = cluster.to(cluster.decode)
    cluster.say(last, Accepted("r", 2))
    cluster.tokens(last, "r", 2, 16, 8, 8, 8, finish="length", verified=4, accepted=9)  # more than it verified
    registry = CollectorRegistry()
    page = VllmMetrics(registry, ServedModel("m", None, ModelLimits(50, CONTEXT), (), SamplingParams()), PAGE)
    page.request_ended(cluster.end(), 9)
    labels = {"model_name": "m", "engine": "0"}
    names = [f"vllm:spec_decode_num_{each}_total" for each in ("drafts", "draft_tokens", "accepted_tokens")]
    assert [registry.get_sample_value(name, labels) for name in names] == [3, 9, 6]


# --- processes ---


def test_processes_that_go_are_counted_with_the_reason() -> None:
    cluster = lab_with()
    _, prefill, _ = cluster.split()
    cluster.leaves(prefill)
    cluster.hello("decode", "decode-0", incarnation="decode-0.2")
    assert cluster.state.stats().lost == {("prefill", "rejected"): 1, ("decode", "replaced"): 1}
    assert metric_samples(cluster.state.stats())["peers_lost"]["decode", "silent"] == 0


def test_the_oldest_heartbeat_is_that_of_the_live_process_which_is_silent_longest() -> None:
    cluster = lab_with()
    _, loud = cluster.colocated(2)
    cluster.now += 0.5
    cluster.beat(loud)
    assert heartbeat_age(cluster.state.processes(cluster.now)) == {("decode",): pytest.approx(0.5)}


def test_every_sample_is_in_the_table_with_as_many_labels() -> None:
    for name, sample in metric_samples(lab_with().state.stats()).items():
        for labels in sample if isinstance(sample, dict) else [()]:
            assert len(labels) == len(TABLE[name].labels), name


# --- the ceiling of prefix reuse ---


def keys(rng: random.Random, count: int) -> list[bytes]:
    return [rng.randbytes(16) for _ in range(count)]


@pytest.mark.parametrize("different", [1, 100, 20_000, 300_000])
def test_the_ceiling_is_what_a_cache_without_bounds_would_have(different: int) -> None:
    """Within 3 %, four standard errors."""
    ceiling, rng = ReuseCeiling(page_size=16), random.Random(1)
    pages = keys(rng, different)
    ceiling.count_prompt(pages, different * 16, 0.0)
    ceiling.count_prompt(pages * 3, different * 3 * 16, 0.0)
    ceiling.tick(0.0)
    assert ceiling.shares == pytest.approx(dict.fromkeys(("15m", "1h", "24h"), 0.75), abs=0.25 * 0.03)


def test_tokens_that_fill_no_page_lower_the_ceiling() -> None:
    ceiling, pages = ReuseCeiling(page_size=16), keys(random.Random(1), 100)
    for _ in range(2):
        ceiling.count_prompt(pages, 100 * 16 * 2, 0.0)
    ceiling.tick(0.0)
    assert ceiling.shares["1h"] == pytest.approx(0.25, abs=0.01)


def test_each_window_forgets_what_is_older() -> None:
    ceiling, pages = ReuseCeiling(page_size=16), keys(random.Random(1), 1_000)
    ceiling.tick(0.0)
    assert ceiling.shares == {}
    ceiling.count_prompt(pages, 16_000, 1.0)
    ceiling.tick(1.0)
    assert ceiling.shares == pytest.approx(dict.fromkeys(("15m", "1h", "24h"), 0.0), abs=0.02)
    ceiling.count_prompt(pages, 16_000, 1_000.0)
    ceiling.tick(1_000.0)
    assert ceiling.shares == pytest.approx({"15m": 0.0, "1h": 0.5, "24h": 0.5}, abs=0.02)
    ceiling.tick(4_000.0)
    assert "15m" not in ceiling.shares
    ceiling.tick(90_000.0)
    assert ceiling.shares == {}


def test_a_request_asks_for_its_pages_once_however_often_it_is_placed() -> None:
    cluster = lab_with()
    cluster.colocated(2)
    cluster.submit(prompt=10 * PAGE)
    order = cluster.decode
    cluster.leaves(cluster.to(order))
    assert cluster.decode.attempt == 2
    cluster.advance(1.0)
    assert cluster.state.stats().reuse_ceiling["15m"] == pytest.approx(0.0, abs=0.01)
    cluster.submit("again", prompt=10 * PAGE)
    cluster.advance(1.0)
    assert cluster.state.stats().reuse_ceiling["15m"] == pytest.approx(0.45, abs=0.02)  # 9 of 10 pages, of 2 prompts
