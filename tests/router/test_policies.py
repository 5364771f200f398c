"""Each published rule on cases computed by hand."""

from collections import Counter
from typing import Any

import pytest

from router.placement.step_costs import DecodeCost, PrefillCost
from router.policies import dynamo_kv
from router.policies.balance import LeastLoaded, PowerOfTwo, RandomChoice, RoundRobin
from router.policies.cache_aware import CacheAware
from router.policies.dynamo_kv import DynamoKv
from router.policies.llm_d import LlmD
from router.policies.mooncake import Mooncake
from router.policies.rule import Rule, RulePrompt, RuleWorker, Stage

_SEED = 7


def _prompt(*keys: str, page_size: int = 100) -> RulePrompt:
    return RulePrompt(len(keys) * page_size, [key.encode() for key in keys], page_size, page_bytes=1_000)


_TEN = _prompt(*"0123456789")


def _workers(**each: dict[str, Any]) -> list[RuleWorker]:
    return [RuleWorker(name, **fields) for name, fields in each.items()]


def _often(rule: Rule, workers: list[RuleWorker], stage: Stage = "both", times: int = 400) -> Counter[str]:
    return Counter(rule.choose(stage, _TEN, workers).name for _ in range(times))


# --- load alone ----------------------------------------------------------------------------------------------------


def test_random_chooses_all_alike() -> None:
    counts = _often(RandomChoice(_SEED), _workers(a={"requests": 9}, b={}, c={}), times=3_000)
    assert all(900 < counts[name] < 1_100 for name in "abc")


def test_round_robin_takes_turns_in_each_stage() -> None:
    rule, workers = RoundRobin(_SEED), _workers(b={}, a={})
    assert [rule.choose("prefill", _TEN, workers).name for _ in range(3)] == ["a", "b", "a"]
    assert [rule.choose("decode", _TEN, workers).name for _ in range(2)] == ["a", "b"]


def test_least_loaded_has_fewest_requests() -> None:
    counts = _often(LeastLoaded(_SEED), _workers(a={"requests": 3}, b={"requests": 2}, c={"requests": 2}))
    assert set(counts) == {"b", "c"}
    assert min(counts.values()) > 150, "equal ones share"


@pytest.mark.technique("Placement rules of other systems")
def test_power_of_two_never_takes_the_worst() -> None:
    """With loads 1, 2, 3 the pairs 12, 13, 23 are drawn alike: two thirds go to the first, one third to the second."""
    counts = _often(PowerOfTwo(_SEED), _workers(a={"requests": 1}, b={"requests": 2}, c={"requests": 3}), times=3_000)
    assert counts["c"] == 0
    assert counts["a"] == pytest.approx(2_000, rel=0.1)


def test_power_of_two_with_one_worker() -> None:
    assert PowerOfTwo(_SEED).choose("decode", _TEN, _workers(a={})).name == "a"


# --- SGLang --------------------------------------------------------------------------------------------------------


@pytest.mark.technique("Placement rules of other systems")
def test_cache_aware_follows_what_it_sent() -> None:
    rule, workers = CacheAware(_SEED), _workers(a={}, b={})
    assert rule.choose("both", _prompt(*"pqrs"), workers).name == "a"
    assert rule.choose("both", _prompt(*"tu"), workers).name == "b", "no match: who was sent least"
    assert rule.choose("both", _prompt(*"pqxy"), workers).name == "a", "half of it matches"
    assert rule.choose("both", _prompt(*"t123"), workers).name == "b", "a quarter does not; b was sent 2 pages, a 6"


def test_cache_aware_prefers_its_last_choice() -> None:
    rule, workers = CacheAware(_SEED), _workers(a={}, b={})
    rule.choose("prefill", _prompt("p"), workers)  # to a
    rule.choose("prefill", _prompt("p"), workers[1:])  # to b, which was alone
    assert rule.choose("prefill", _prompt("p"), workers).name == "b"
    assert rule.choose("prefill", _prompt("p"), workers[:1]).name == "a", "who is gone is not chosen"


@pytest.mark.parametrize(
    ("busy", "idle", "chosen"),
    [
        (64, 0, "a"),  # 64 apart: in balance
        (65, 0, "b"),
        (195, 130, "a"),  # 65 apart, 1.5 times as many: in balance
        (196, 130, "b"),
    ],
)
def test_cache_aware_out_of_balance_takes_the_least_loaded(busy: int, idle: int, chosen: str) -> None:
    rule = CacheAware(_SEED)
    rule.choose("both", _prompt(*"pq"), _workers(a={}))
    workers = _workers(a={"requests": busy}, b={"requests": idle})
    assert rule.choose("both", _prompt(*"pq"), workers).name == chosen


def test_cache_aware_decodes_by_power_of_two() -> None:
    rule = CacheAware(_SEED)
    rule.choose("both", _TEN, _workers(a={}))
    assert _often(rule, _workers(a={"requests": 1}, b={}), "decode") == {"b": 400}


# --- Dynamo --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "expected"), [("prefill", 6.25), ("decode", 30), ("both", 36.25)])
def test_dynamo_cost(stage: Stage, expected: float) -> None:
    """6 blocks being computed + 10 − (4·1 + 2·0.75 + 1·0.25 = 5.75) = 10.25; 20 active + 10 = 30."""
    worker = RuleWorker("a", prompt_tokens=200, pages=20, device=4, host=2, disk=1)
    assert dynamo_kv.cost(stage, _TEN, worker) == pytest.approx(expected)


def test_dynamo_credits_half_of_what_other_nodes_have() -> None:
    """10 blocks, 2 of them on the device, 8 on some node: 10 − (2·1 + 6·0.5) = 5."""
    assert dynamo_kv.cost("prefill", _TEN, RuleWorker("a", device=2), longest=8) == pytest.approx(5)


def test_dynamo_credits_never_make_work_negative() -> None:
    assert dynamo_kv.cost("prefill", _TEN, RuleWorker("a", device=40)) == 0


def test_dynamo_takes_the_lowest_and_equal_ones_alike() -> None:
    workers = _workers(a={"device": 9, "pages": 4}, b={"pages": 4, "device": 9}, c={"device": 9, "pages": 5})
    counts = _often(DynamoKv(_SEED), workers)
    assert counts["c"] == 0
    assert min(counts["a"], counts["b"]) > 150


def test_dynamo_decode_gives_no_credit() -> None:
    assert _often(DynamoKv(_SEED), _workers(a={"device": 10, "pages": 1}, b={}), "decode") == {"b": 400}


# --- llm-d ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "chosen"),
    # a: prefix 3·(5 + 0.8·5)/10 = 2.7, KV 2·(1 − 0.5) = 1, queue 2·(2 − 2)/2 = 0: 3.7; without the prefix 1.
    # b: prefix 0, KV 2·(1 − 0.25) = 1.5, queue 2·(2 − 0)/2 = 2: 3.5.
    [("both", "a"), ("prefill", "a"), ("decode", "b")],
)
def test_llm_d_scores(stage: Stage, chosen: str) -> None:
    workers = _workers(
        a={"device": 5, "host": 5, "pages": 50, "pool_pages": 100, "prompts": 3},
        b={"pages": 25, "pool_pages": 100, "prompts": 1},
    )
    assert LlmD(_SEED).choose(stage, _TEN, workers).name == chosen


def test_llm_d_counts_equal_queues_as_empty() -> None:
    """Each scores 2 for its queue, so that what they cache decides."""
    workers = _workers(a={"prompts": 9}, b={"prompts": 9, "device": 1})
    assert LlmD(_SEED).choose("both", _TEN, workers).name == "b"


# --- Mooncake ------------------------------------------------------------------------------------------------------

_COST = {"prefill": PrefillCost(0.1, 0.001, 0.0), "link": 10_000.0}  # a page of 1,000 bytes is sent in 0.1 s


def test_mooncake_ttft() -> None:
    """Own prefix 4 of 10 pages, longest 8: at a threshold of 2 not worth copying, 0.1 + 600 · 0.001 = 0.7 behind a
    queue of 1 s. Longest 9: five pages are copied in 0.5 s, and 100 tokens computed in 0.2 s."""
    rule, worker = Mooncake(_SEED), RuleWorker("a", device=3, host=1, queue=1.0, **_COST)
    assert rule.ttft(_TEN, worker, longest=8) == pytest.approx(1.7)
    assert rule.ttft(_TEN, worker, longest=9) == pytest.approx(1.0 + 0.5 + 0.2)


def test_mooncake_copies_to_an_empty_worker() -> None:
    rule = Mooncake(_SEED)
    assert rule.copies(RuleWorker("a"), 1)
    assert not rule.copies(RuleWorker("a"), 0)


def test_mooncake_spreads_a_hot_prefix() -> None:
    """The holder would take 0.1 s for the last page behind its queue; the other copies 9 pages in 0.9 s first."""
    rule = Mooncake(_SEED)

    def chosen(queue: float) -> str:
        workers = _workers(a={"device": 9, "queue": queue, **_COST}, b=_COST)
        return rule.choose("prefill", _TEN, workers).name

    assert chosen(0.8) == "a"
    assert chosen(1.0) == "b"


def test_mooncake_decodes_where_a_step_stays_shortest() -> None:
    """a: 2 rows of 5,000 tokens; b: 5 rows of 2,000; each with one more of 1,000."""
    step = DecodeCost(0.01, 0.001, 1e-6)
    workers = _workers(
        a={"requests": 2, "context": 5_000, "step": step},  # 0.01 + 0.003 + 0.006
        b={"requests": 5, "context": 2_000, "step": step},  # 0.01 + 0.006 + 0.003
        c={"requests": 3, "context": 3_500, "step": step},  # 0.01 + 0.004 + 0.0045
    )
    assert Mooncake(_SEED).choose("decode", _TEN, workers).name == "c"
