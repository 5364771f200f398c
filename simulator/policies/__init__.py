"""Published routing rules of other systems, for comparison: one per file, each with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.placement.policy import LowestTtft, PlacementPolicy
from router.placement.step_costs import DecodeCost, PrefillCost
from simulator.policies.balance import LeastLoaded, PowerOfTwo, RandomChoice, RoundRobin
from simulator.policies.cache_aware import CacheAware
from simulator.policies.dynamo_kv import DynamoKv
from simulator.policies.llm_d import LlmD
from simulator.policies.mooncake import Mooncake
from simulator.policies.placer import RulePolicy
from simulator.policies.rule import Rule

OWN = "baton"

RULES: Mapping[str, Callable[[int], Rule]] = {
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "cache_aware": CacheAware,
    "dynamo_kv": DynamoKv,
    "mooncake": Mooncake,
    "llm_d": LlmD,
}
"""The rules by name; each takes a seed."""

POLICIES = (OWN, *RULES)


def placer(policy: str, seed: int, prefill: PrefillCost, step: DecodeCost, link: float) -> PlacementPolicy:
    """Return the policy of that name, one of POLICIES.

    The costs are those of the simulated workers. `link` is the bandwidth between their nodes, in bytes per second.
    """
    return LowestTtft() if policy == OWN else RulePolicy(RULES[policy](seed), prefill, step, link)
