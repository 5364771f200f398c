"""The supervisor's record of every process: its condition, its crashes and their reasons. Pure; time is an argument."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from deploy.control_plane.observe import Facts, observe, observe_router
from deploy.control_plane.reconcile import (
    JOIN_PATIENCE,
    RESTART_PATIENCE,
    Condition,
    Crashes,
    KillProcess,
    ObservedProcess,
    ReapProcess,
    SupervisorAction,
    crashed,
    reconcile,
)
from deploy.control_plane.reports import Failure, SupervisedProcess
from deploy.placement.desired import ProcessSpec, role_of
from deploy.processes import ProcessIdentity

log = logging.getLogger(__name__)


class ProcessLedger:
    """Keeps the observed state of all processes and decides actions through `reconcile`. Executes none."""

    def __init__(self, join_patience: float = JOIN_PATIENCE, restart_patience: float = RESTART_PATIENCE) -> None:
        """Start without processes.

        `join_patience`: seconds until a router must list a new process. `restart_patience`: seconds within which a
        silent process that still exists must come back.
        """
        self._join_patience = join_patience
        self._restart_patience = restart_patience
        self._seen: dict[str, ObservedProcess] = {}
        self._identities: dict[str, ProcessIdentity | None] = {}
        self._live_since: dict[str, float] = {}
        self._crashes: dict[str, Crashes] = {}
        self._failures: dict[str, Failure] = {}  # the last one of each name
        self._old: set[str] = set()  # names whose failure is of an earlier process

    @property
    def names(self) -> Iterable[str]:
        return tuple(self._seen)

    def placed(self) -> dict[str, str]:
        return {name: seen.node for name, seen in self._seen.items() if seen.condition is not Condition.GONE}

    def started(self, name: str, node: str, now: float) -> None:
        """Add a process: just started, or found by a restarted supervisor."""
        self._seen[name] = ObservedProcess(name, node, Condition.JOINING, now)
        self._old.add(name)

    def decide(
        self, desired: Sequence[ProcessSpec], facts: Mapping[str, Facts], now: float, held_up: float = 0.0
    ) -> list[SupervisorAction]:
        """Take the facts of this cycle and return the actions.

        `held_up`: seconds for which the supervisor itself was paused. They do not count against any process's patience.
        """
        for name, before in self._seen.items():
            before = replace(before, since=before.since + held_up, missed_since=before.missed_since + held_up)
            fresh = facts[name]
            seen = (observe_router if role_of(name) == "router" else observe)(before, fresh, now)
            self._note(before, seen, fresh, now)
        actions = reconcile(desired, self._seen, self._crashes, now, self._join_patience, self._restart_patience)
        for action in actions:
            match action:
                case KillProcess(name, why):
                    self._failed(name, Failure("unavailable", why))
                case ReapProcess(name, why):
                    self._bury(name, why, {spec.name for spec in desired}, now)
                case _:
                    pass
        return actions

    def views(self, desired: Sequence[ProcessSpec], now: float) -> tuple[SupervisedProcess, ...]:
        specs = {spec.name: spec for spec in desired}
        extra = [ProcessSpec(name, role_of(name), seen.node) for name, seen in self._seen.items() if name not in specs]
        return tuple(self._view(spec, now) for spec in (*desired, *extra))

    def _view(self, spec: ProcessSpec, now: float) -> SupervisedProcess:
        seen = self._seen.get(spec.name)
        crashes = self._crashes.get(spec.name, Crashes())
        return SupervisedProcess(
            name=spec.name,
            role=spec.role,
            node=spec.node if seen is None else seen.node,
            condition="waiting" if seen is None else seen.condition.value,
            identity=self._identities.get(spec.name),
            restarts=crashes.total,
            retry_in=0.0 if seen is not None else max(0.0, crashes.not_before - now),
            failure=Failure("startup", spec.blocked)
            if spec.blocked and seen is None
            else self._failures.get(spec.name),
        )

    def _note(self, before: ObservedProcess, seen: ObservedProcess, fresh: Facts, now: float) -> None:
        name = seen.name
        self._seen[name] = seen
        self._identities[name] = fresh.identity
        if fresh.failure is not None:
            self._old.add(name)
            self._failed(name, fresh.failure)
        if seen.condition is before.condition:
            return
        log.info("%s: %s → %s %s", name, before.condition.value, seen.condition.value, seen.why)
        if seen.condition is Condition.LIVE:
            self._live_since.setdefault(name, now)

    def _failed(self, name: str, failure: Failure) -> None:
        """Record a failure. The first one of a process counts, since later ones are consequences."""
        if name in self._old or name not in self._failures:
            self._failures[name] = failure
        self._old.discard(name)

    def _bury(self, name: str, why: str, desired: set[str], now: float) -> None:
        del self._seen[name]
        self._identities.pop(name, None)
        since = self._live_since.pop(name, now)
        if name not in desired:
            self._crashes.pop(name, None)
            self._failures.pop(name, None)
            return
        self._failed(name, Failure("unavailable", why))
        record = crashed(self._crashes.get(name, Crashes()), why, now - since, now)
        self._crashes[name] = record
        log.warning(
            "%s is gone (%s): crash %d, starts again in %.1f s", name, why, record.total, record.not_before - now
        )
