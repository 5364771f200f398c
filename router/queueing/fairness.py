"""Fairness between tenants: each has a virtual counter of its service, and the lowest counter is served next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Service is
counted in tokens: those of prompts when a request is placed, those of the output, which cost more, as they come. A
prompt token that was found in a cache costs little (Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025,
count only what was computed). A tenant of weight 2 may have twice as much as one of weight 1.

A tenant that begins to wait is lifted to the lowest counter of the waiting tenants, or to where the last waiting tenant
left it, less its savings: its share of a few seconds. (The paper has no savings. A tenant that asks for a little less
than its share, now and then for several things at once, would then lose some of it to tenants that always ask.) So two
tenants with waiting requests differ in service by no more than the savings and the work under way, however long they
wait.

Pure.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

OTHER = "other"


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What a token costs its tenant; one of a prompt that had to be computed costs 1."""

    cached: float = 0.1
    output: float = 2.0  # as in the paper

    def prompt(self, tokens: int, cached: int) -> float:
        return tokens - cached + self.cached * cached


class TenantFairness:
    """The counters. They grow for ever, in tokens by weight: a double counts exactly up to 9 · 10^15 of them."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        """`weight` of a tenant, above 0; asked anew each time."""
        self.weight = weight
        self._counters: dict[str, float] = {}  # of those above the floor, or waiting
        self._waiting: Counter[str] = Counter()  # requests
        self._floor = 0.0  # the lowest counter of waiting tenants, at its highest
        self._saved = 0.0  # the savings that a tenant may begin to wait with, below the floor

    def counter(self, tenant: str) -> float:
        """What it has been served, by weight, as far as that counts."""
        own = self._counters.get(tenant, 0.0)
        return own if tenant in self._waiting else max(own, self._floor - self._saved)

    def over_served(self, tokens: float) -> frozenset[str]:
        """Return the waiting tenants that have had more than their share by so much: the other waiting tenants would
        have to be served so many tokens, by weight, to catch up."""
        if len(self._waiting) < 2:
            return frozenset()
        least = min(self._counters[tenant] for tenant in self._waiting)
        most = least + tokens / sum(self.weight(tenant) for tenant in self._waiting)
        return frozenset(tenant for tenant in self._waiting if self._counters[tenant] > most)

    def start_waiting(self, tenant: str, saving: float = 0.0) -> None:
        """One more request of it waits. Had it not waited before, it may have saved up its share of `saving` tokens."""
        if tenant not in self._waiting:
            self._saved = saving / (self.weight(tenant) + sum(self.weight(other) for other in self._waiting))
            if self._waiting:
                self._floor = max(self._floor, min(self._counters[other] for other in self._waiting))
            self._counters[tenant] = self.counter(tenant)
        self._waiting[tenant] += 1

    def stop_waiting(self, tenant: str) -> None:
        """One request of it waits no longer, whatever became of it."""
        self._waiting[tenant] -= 1
        if self._waiting[tenant] > 0:
            return
        del self._waiting[tenant]
        if not self._waiting:
            self._floor = max(self._floor, self._counters[tenant])
        self._forget()

    def charge(self, tenant: str, cost: float) -> None:
        """It was served for so much; less than nothing: it had been charged for more than it took."""
        self._counters[tenant] = self.counter(tenant) + cost / self.weight(tenant)

    def _forget(self) -> None:
        """Forget tenants that do not wait and could save up no more, so that nothing grows with every tenant there
        ever was."""
        least = self._floor - self._saved
        idle = [t for t, counter in self._counters.items() if counter <= least and t not in self._waiting]
        for tenant in idle:
            del self._counters[tenant]

    def validate(self) -> None:
        assert all(count > 0 for count in self._waiting.values())
        assert set(self._waiting) <= set(self._counters)


class TokensServed:
    """Tokens by tenant, for metrics: the first `most` tenants by name, all later ones as `OTHER`."""

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self.tokens: Counter[tuple[str, str]] = Counter()  # by tenant and kind
        self._named: set[str] = {OTHER}

    def add_tokens(self, tenant: str, kind: str, tokens: int) -> None:
        if tenant not in self._named and len(self._named) <= self._most:
            self._named.add(tenant)
        self.tokens[(tenant if tenant in self._named else OTHER, kind)] += tokens
