"""Placement: the lowest predicted time to first token that keeps every objective, and a split where it can work."""

from collections import Counter

import msgspec
import pytest

from baton import config as configuration
from baton.messages import AttemptName, LoadReport
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.members import PendingPrefill
from router.placement.cached_prefix import CacheablePrefix
from router.placement.step_costs import DecodeCost
from router.placement.types import Placement, Reject, Wait
from tests.router.placing import CONFIG, HANDED, PAGE, PREFIX, RATE, REST, STEP, Cluster, one_node

# --- one node ---


@pytest.mark.technique("KV-aware placement by predicted time to first token")
def test_missing_pages_are_prefilled_elsewhere() -> None:
    plan = one_node(host=3).plan()
    assert plan == Placement("d0", "p0", fetch_pages=HANDED, cached_pages=3, store="s-a")
    assert plan.prefilled_remotely
    assert plan.predicted.compute == pytest.approx(5 * PAGE + REST / RATE)
    assert plan.predicted.step == pytest.approx(STEP), "the decode worker computes the last token alone"
    assert plan.predicted.total == pytest.approx(5 * PAGE + REST / RATE + STEP)
    assert plan.tpot == pytest.approx(STEP)


def test_nothing_missing_nothing_split() -> None:
    assert one_node().plan(prefix=CacheablePrefix(0, 10, 1_000)) == Placement("d0")
    assert one_node(host=8).plan() == Placement("d0", fetch_pages=8, cached_pages=8, store="s-a")
    cluster = one_node(host=2)
    cluster.held["d0"] = PrefixMatch(8)
    assert cluster.plan() == Placement("d0", cached_pages=8)


def test_a_split_needs_a_prefill_worker_and_a_store_on_both_nodes() -> None:
    for has_prefill, stores, decode_node in [(True, "a", "b"), (True, "b", "b"), (True, "", "a"), (False, "a", "a")]:
        cluster = Cluster()
        cluster.decoder(node=decode_node)
        for node in stores:
            cluster.store(node)
        if has_prefill:
            cluster.prefiller()
        assert cluster.plan() == Placement("d0")


def test_without_a_live_worker_requests_wait() -> None:
    cluster = Cluster()
    cluster.prefiller()
    cluster.store()
    assert isinstance(cluster.choose(), Wait)
    cluster.decoder(pool=5)
    assert isinstance(cluster.choose(), Wait)
    cluster.decoder("d1")
    assert cluster.plan().decode == "d1"
    cluster.members.require_live("d1").drain(draining=True)
    assert isinstance(cluster.choose(), Wait)


def test_a_local_plan_needs_no_other_process() -> None:
    cluster = one_node(host=8)
    cluster.store("b", host=8)
    cluster.decoder("d1", device=2)
    assert cluster.plan(decode_only=True) == Placement("d1", cached_pages=2)


# --- waiting ---


def test_a_full_prefill_worker_is_waited_for_where_that_is_quicker() -> None:
    cluster = one_node()
    prefill = cluster.members.require_live("p0")
    cluster.runs(cluster.members.require_live("d0"), 4)  # a prompt here would make four wait for their next tokens
    for slot in range(2):
        prefill.assign_prefill(AttemptName(f"slot {slot}", 1), PendingPrefill(80), cluster.now)
    choice = cluster.choose()
    assert isinstance(choice, Wait)
    assert "p0" in choice.why
    assert choice.predicted == pytest.approx(24 * PAGE + REST / RATE + STEP)
    other = cluster.prefiller("p1", busy=10)
    assert cluster.plan().prefill == "p1"
    other.assign_prefill(AttemptName("more", 1), PendingPrefill(200), cluster.now)
    assert isinstance(cluster.choose(), Wait)
    prefill.prefill_done(AttemptName("slot 0", 1))
    assert cluster.plan().prefill == "p0"


def test_a_decode_worker_that_is_always_busy_still_has_all_its_prompts_before_it() -> None:
    """A prompt takes longer beside decoding sequences than alone, so the rest of the queue counts from its end."""
    cluster = Cluster()
    decode = cluster.decoder()
    names = [AttemptName(f"prompt {number}", 1) for number in range(3)]
    for name in names:
        decode.assign_prefill(name, PendingPrefill(200), cluster.now)
    queues = [cluster.queued()]
    for name in names[:2]:
        cluster.now += 3 * queues[0]
        decode.prefill_done(name, cluster.now)
        queues.append(cluster.queued())
    assert queues == pytest.approx([queues[0], queues[0] * 2 / 3, queues[0] / 3])


def test_queued_requests_count_for_those_behind() -> None:
    cluster = one_node()
    cluster.runs(cluster.members.require_live("d0"), 40)
    for name, pages in (("p0", 4), ("p1", 19)):
        worker = cluster.members.require_live("p0") if name == "p0" else cluster.prefiller("p1")
        for slot in range(2):
            worker.assign_prefill(AttemptName(f"{name} {slot}", 1), PendingPrefill(pages * 10), cluster.now)
    cluster.view.begin_scan(cluster.now)
    waits = [cluster.decide().choice for _ in range(6)]
    assert all(isinstance(wait, Wait) for wait in waits)
    predicted = [wait.predicted for wait in waits if isinstance(wait, Wait) and wait.predicted]
    assert predicted == sorted(predicted)
    named = Counter(wait.why.split()[0] for wait in waits if isinstance(wait, Wait))
    assert named == {"p0": 5, "p1": 1}


def test_an_operator_may_want_every_prompt_split() -> None:
    cluster = one_node()
    cluster.prefiller("p1", busy=20)
    cluster.members.require_live("p0").assign_prefill(AttemptName("busy", 1), PendingPrefill(200), cluster.now)
    assert cluster.plan().prefill is None
    cluster.view.config = msgspec.structs.replace(CONFIG, router=configuration.RouterConfig(disaggregation="always"))
    assert cluster.plan().prefill is not None
    assert cluster.plan(decode_only=True).prefill is None, "a last attempt"
    assert cluster.plan(excluded=["p0", "p1"]).prefill is None, "there is nobody else"
    cluster.held["d0"] = PrefixMatch(PREFIX.pages, {"GPU": PREFIX.pages})
    assert cluster.plan().prefill is None, "nothing is missing"


# --- objectives ---


def test_a_decode_worker_takes_no_more_than_its_objectives_allow() -> None:
    cluster = Cluster()
    one, other = cluster.decoder("d0"), cluster.decoder("d1", busy=2)
    cluster.steps = dict.fromkeys(("d0", "d1"), DecodeCost(0.01, 0.001, 0.0))
    cluster.runs(one, 9)
    assert cluster.plan(tpot=0.03, max_tokens=1_000).decode == "d0", "it has no prompts to compute"
    assert cluster.plan(tpot=0.0195, max_tokens=1_000).decode == "d1", "with ten sequences a step takes 20 ms"
    cluster.runs(one, 1, tpot=0.0205)
    assert cluster.plan(tpot=0.03, max_tokens=1_000).decode == "d1", "one of the others was promised less"
    cluster.runs(other, 9, tpot=0.0195)
    choice = cluster.choose()
    assert isinstance(choice, Wait)
    assert choice.predicted is not None
    assert isinstance(cluster.choose(tpot=0.005), Reject)


def test_prompts_to_be_computed_slow_everybodys_tokens() -> None:
    cluster = Cluster()
    one = cluster.decoder("d0")
    cluster.runs(one, 1, tpot=0.05)
    assert isinstance(cluster.choose(max_tokens=10), Wait), "0.8 s of prompt in the course of ten tokens"
    assert cluster.plan(max_tokens=100).decode == "d0"


def test_a_pool_that_is_full_is_waited_for() -> None:
    cluster = Cluster()
    one = cluster.decoder("d0", pool=40)
    cluster.runs(one, 3, pages=11)
    assert isinstance(cluster.choose(), Wait)
    one.unassign(AttemptName("running 1", 1))
    assert cluster.plan().decode == "d0"
    one.update_load(LoadReport(pages_free=3, pages_total=40), cluster.attempts, LoadReport(), cluster.now)
    assert isinstance(cluster.choose(), Wait), "whatever we thought, it has no more"


def test_what_other_routers_gave_a_worker_counts_when_it_is_told() -> None:
    cluster = one_node()
    cluster.prefiller("p1", busy=5)
    cluster.runs(cluster.members.require_live("d0"), 4)
    cluster.runs(cluster.decoder("d1"), 6)
    assert (cluster.plan().prefill, cluster.plan().decode) == ("p0", "d0")
    others = LoadReport(2, 1, tokens_queued=100)
    cluster.members.require_live("p0").update_load(others, 0, others, cluster.now)
    assert cluster.plan().prefill == "p1"
    cluster.members.require_live("d0").update_load(
        LoadReport(9, 0, context=500, prefill_rate=RATE), 0, LoadReport(5, 0, context=300), cluster.now
    )
    assert cluster.plan().decode == "d1"


def test_an_unreachable_objective_is_refused() -> None:
    cluster = one_node()
    choice = cluster.choose(ttft=0.5)
    assert isinstance(choice, Reject)
    assert choice.retry_after == pytest.approx(0.8 + REST / RATE + STEP - 0.5)
    assert cluster.plan(ttft=1.0).prefill == "p0"


# --- equal workers ---


def test_equals_are_used_in_turn() -> None:
    cluster = Cluster()
    for index in range(5):
        cluster.decoder(f"d{index}")
        cluster.prefiller(f"p{index}")
    cluster.store()
    plans = [cluster.plan() for _ in range(50)]
    assert set(Counter(plan.prefill for plan in plans).values()) == {10}
    assert set(Counter(plan.decode for plan in plans).values()) == {10}


def test_a_fresh_worker_is_no_magnet() -> None:
    """It is given work until its queue is as long as the others', counted from the moment of dispatch."""
    cluster = Cluster()
    for index in range(4):
        cluster.decoder(f"d{index}", busy=40)
    cluster.decoder("fresh")
    chosen: list[str] = []
    for _ in range(24):
        plan = cluster.plan()
        cluster.begin(plan)
        chosen.append(plan.decode)
    assert chosen[:4] == ["fresh"] * 4
    assert Counter(chosen)["fresh"] in (8, 9), "the 4 others have 4 s of work each, and take 4 more each"


def test_a_hot_prefix_spreads_as_its_rate_rises() -> None:
    """One worker has it; elsewhere it must be computed, once. No threshold says when that pays."""
    spread = [users_of_a_hot_prefix(per_second) for per_second in (2, 20, 40, 90)]
    assert spread == sorted(spread)
    assert (spread[0], spread[-1]) == (1, 4)


def users_of_a_hot_prefix(per_second: float) -> int:
    """How many of four workers have a share of its requests in the end."""
    cluster = Cluster()
    for index in range(4):
        cluster.decoder(f"d{index}")
    cluster.held["d0"] = PrefixMatch(8)
    done: list[tuple[float, str, AttemptName]] = []
    used: Counter[str] = Counter()
    for turn in range(200):
        cluster.now = 100 + turn / per_second
        for when, name, attempt in [each for each in done if each[0] <= cluster.now]:
            cluster.members.require_live(name).unassign(attempt)
            done.remove((when, name, attempt))
        plan = cluster.plan()
        cluster.held[plan.decode] = PrefixMatch(8)
        done.append((cluster.now + plan.predicted.total, plan.decode, cluster.begin(plan)))
        used[plan.decode] += turn >= 100
    return sum(count > 5 for count in used.values())


# --- affinity ---


def test_a_key_stays_with_its_worker_while_that_lives() -> None:
    cluster = Cluster()
    for index in range(8):
        cluster.decoder(f"d{index}")
    homes = {key: cluster.plan(affinity=key).decode for key in map(str, range(64))}
    assert len(set(homes.values())) == 8
    assert all(cluster.plan(affinity=key).decode == home for key, home in homes.items())
    cluster.members.leave(cluster.members.require_live("d3"), "dead")
    moved = {key for key, home in homes.items() if cluster.plan(affinity=key).decode != home}
    assert moved == {key for key, home in homes.items() if home == "d3"}
    busy = cluster.members.require_live(homes["0"] if homes["0"] != "d3" else homes["1"])
    key = next(key for key, home in homes.items() if home == busy.incarnation)
    cluster.runs(busy, 1)
    busy.mark_busy(AttemptName("running 1", 1))
    assert isinstance(cluster.choose(affinity=key), Wait), "a key is hard: it waits for its worker"
