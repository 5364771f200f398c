"""How many requests met their objectives, by priority. Goodput is the rate of those that met all. Pure.

Each request that ends is judged once, and counts for `ttft`, `tpot` and `all`. A request without an objective meets it
if it is served. A failed request meets none. Three ends say nothing about the cluster and are left out: the client
left, the client's request was invalid, or its tenant's rate limit refused it.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, TypeAlias

from baton.config import ObjectivesConfig
from baton.errors import InvalidRequest, RateLimited
from router.events import Cancelled, Failed, Finished, RequestOutcome, Summary
from router.request import Request

Objective: TypeAlias = Literal["ttft", "tpot", "all"]

_MET = (True, False)
OBJECTIVES: tuple[Objective, ...] = ("ttft", "tpot", "all")


class SloAttainment:
    """Counts of requests by (level of priority, objective, whether it was met)."""

    def __init__(self, classes: Mapping[int, ObjectivesConfig]) -> None:
        """`classes`: objectives of requests that bring none, by priority. Each is told from the start, with zeros."""
        self._classes = classes
        self._counts: Counter[tuple[int, Objective, bool]] = Counter()
        for level in {0, *classes}:
            self._counts.update(dict.fromkeys(((level, objective, met) for objective in OBJECTIVES for met in _MET), 0))

    @property
    def counts(self) -> Mapping[tuple[int, Objective, bool], int]:
        """Requests since the start."""
        return dict(self._counts)

    def request_ended(self, request: Request, outcome: RequestOutcome, summary: Summary) -> None:
        match outcome:
            case Cancelled():
                return
            case Failed(error=InvalidRequest() | RateLimited()):
                return
            case Failed():
                ttft = tpot = False
            case Finished():
                line, promised = summary.timeline, self._classes.get(request.spec.priority, ObjectivesConfig())
                ttft = _within(line.ttft, request.ttft or promised.ttft_ms / 1_000)
                tpot = _within(line.tpot(summary.usage.completion), request.tpot or promised.tpot_ms / 1_000)
        for objective, met in zip(OBJECTIVES, (ttft, tpot, ttft and tpot), strict=True):
            self._counts[request.level, objective, met] += 1


def _within(seconds: float | None, objective: float) -> bool:
    return not objective or seconds is None or seconds <= objective
