"""What placement may see of the cluster: live workers with what they have been given, live stores, the time. Workers
that drain are not seen.

A policy (`router.placement.policy.PlacementPolicy`) reads a `ClusterView` and changes nothing. The request manager
records here what it carries out of a decision. Pure.
"""

# pyright: strict

from __future__ import annotations

import numpy as np

from baton.config import Config
from router.members import ClusterMembership, MemberRecord
from router.placement.types import Placement, SecondsReservation
from router.placement.worker_table import CostModels, Floats, ReportedRates, WorkerTable

_OUTPUT = 256.0  # tokens that a request is expected to generate, until some have ended
_WEIGHT = 0.02  # of the newest


class ClusterView:
    """The live processes, as the router knows them at `now`."""

    def __init__(self, config: Config, members: ClusterMembership, costs: CostModels | None = None) -> None:
        """`costs`: none: nothing is known but the rates that workers tell."""
        self.config = config
        self.members = members
        self.now = 0.0  # seconds
        self.costs = costs or ReportedRates(members)
        self.table = WorkerTable(config, members, self.costs)
        self._reserved: dict[str, float] = {}  # seconds of workers, by incarnation
        self._output = _OUTPUT

    def begin_scan(self, now: float) -> None:
        """Begin a scan of the waiting requests, in order of service: nothing is reserved yet."""
        self.now = now
        self._reserved.clear()

    def reserve(self, reservation: SecondsReservation) -> None:
        """Count the seconds of a waiting request for the requests behind it."""
        worker = reservation.worker
        self._reserved[worker] = self._reserved.get(worker, 0.0) + reservation.seconds

    def mark_used(self, plan: Placement) -> None:
        """Count the plan's workers as the last ones used, so that equal workers take turns."""
        self.table.mark_used(self.table.index[worker] for worker in (plan.prefill, plan.decode) if worker is not None)

    @property
    def reserved_seconds(self) -> Floats:
        """Seconds that have been claimed of each worker of the table."""
        seconds_of = np.zeros(len(self.table.workers))
        for worker, seconds in self._reserved.items():
            if (row := self.table.index.get(worker)) is not None:
                seconds_of[row] = seconds
        return seconds_of

    def refreshed_table(self) -> WorkerTable:
        """The table as of now."""
        self.table.refresh(self.now, self._output)
        return self.table

    def expected_output(self, most: int) -> float:
        """How many tokens a request that may generate `most` more is expected to."""
        return min(most, self._output)

    def learn_output(self, tokens: int) -> None:
        self._output += _WEIGHT * (tokens - self._output)

    @property
    def decode_workers(self) -> list[MemberRecord]:
        return self.members.schedulable("decode")

    @property
    def prefill_workers(self) -> list[MemberRecord]:
        return self.members.schedulable("prefill")
