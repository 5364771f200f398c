"""Placement policies by name (`router.policy`): Baton's own, and published rules of other systems, one per file, each
with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.placement.policy import LowestTtft, PlacementPolicy
from router.placement.worker_table import CostModels
from router.policies.balance import LeastLoaded, PowerOfTwo, RandomChoice, RoundRobin
from router.policies.cache_aware import CacheAware
from router.policies.dynamo_kv import DynamoKv
from router.policies.llm_d import LlmD
from router.policies.mooncake import Mooncake
from router.policies.placer import LINK, RulePolicy
from router.policies.rule import Rule

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


def policy_named(policy: str, seed: int, costs: CostModels | None = None, link: float = LINK) -> PlacementPolicy:
    """Return the policy of that name, one of POLICIES. Ties are broken at random, with `seed`.

    `costs` are those of all workers, and `link` the bandwidth between their nodes in bytes per second: what a simulator
    knows. Without `costs` a rule takes those that the router has fitted to its workers' steps.
    """
    return LowestTtft() if policy == OWN else RulePolicy(RULES[policy](seed), costs, link)
