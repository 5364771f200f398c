"""Decide the supervisor's next actions from the desired and the observed processes. Pure.

               StartProcess                    a router lists it
    (nothing) ──────────▶ JOINING ───────────────────────────────▶ LIVE
        ▲                    │ typed failure, or silent for too long │ SILENT, STUCK or FAILED
        │ after its          ▼                                       ▼
        │ back-off        KillProcess: SIGKILL, and wait for the proof that the process is gone
        └──────────────── ReapProcess: forget the actor, count the crash ◀── GONE

A silent process that still exists may be paused (swap, a live migration, a frozen cgroup). It then comes back with its
weights and its cache. So it has `cluster.restart_patience_ms`, as has a router that does not answer. A process that is
gone is replaced at once. So is a stuck one: its step has already exceeded `cluster.step_timeout_ms`.

No process is started under a name while an earlier process of that name may still run: if it was stopped and resumes,
it goes on writing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from deploy.placement.desired import ProcessSpec

RESTART_PATIENCE = 30.0  # seconds, unless configured (cluster.restart_patience_ms)
JOIN_PATIENCE = 900.0  # seconds from start until the router lists it: large weights load slowly
REJOIN_PATIENCE = 20.0  # seconds for which a process that was live may be missing from the router's list
ROUTER_MISSES = 6  # probes in a row, of a second each, that a live router may leave unanswered
ROUTER_PATIENCE = 90.0  # seconds from start until a router answers: it may wait a minute for a port (baton/ports.py)
STEADY = 60.0  # seconds of being live after which earlier crashes no longer count
FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds; the first crash is repaired at once


class Condition(Enum):
    """The condition of a process."""

    JOINING = "joining"  # runs; the router has not listed it yet, or no longer does
    LIVE = "live"
    SILENT = "silent"  # the router has not heard from it for cluster.heartbeat_timeout_ms
    STUCK = "stuck"  # it sends heartbeats, but its step, or an iteration of its main loop, does not end
    FAILED = "failed"  # its service ended with an error
    ENDING = "ending"  # the supervisor is ending it now
    GONE = "gone"  # proven: it can't run another instruction


@dataclass(frozen=True)
class ObservedProcess:
    """One process as observed in this cycle."""

    name: str
    node: str
    condition: Condition
    since: float  # time of the last change of condition
    was_live: bool = False  # at any time before
    misses: int = 0  # unanswered probes in a row, of a router only
    missed_since: float = 0.0  # when the first of them went unanswered
    why: str = ""  # its error, or the reason of its end


@dataclass(frozen=True)
class Crashes:
    """The consecutive crashes of one name. `not_before` is the time from which it may start again."""

    count: int = 0
    not_before: float = 0.0
    total: int = 0
    last: str = ""


@dataclass(frozen=True)
class StartProcess:
    """Start this process. No process runs under its name."""

    spec: ProcessSpec


@dataclass(frozen=True)
class KillProcess:
    """SIGKILL a process that must be replaced, and wait for the proof of its end."""

    name: str
    why: str


@dataclass(frozen=True)
class ReapProcess:
    """Remove the actor of a process that is gone, and count the crash."""

    name: str
    why: str


@dataclass(frozen=True)
class StopProcess:
    """Stop the service of a process that is no longer desired, then SIGKILL it."""

    name: str


SupervisorAction: TypeAlias = StartProcess | KillProcess | ReapProcess | StopProcess


def reconcile(
    desired: Sequence[ProcessSpec],
    actual: Mapping[str, ObservedProcess],
    crashes: Mapping[str, Crashes],
    now: float,
    join_patience: float = JOIN_PATIENCE,
    restart_patience: float = RESTART_PATIENCE,
) -> list[SupervisorAction]:
    """Return the actions of this cycle, at most one per name. `desired` is in start order."""
    actions: list[SupervisorAction] = []
    names = {spec.name for spec in desired}
    for seen in actual.values():
        if seen.condition is Condition.GONE:
            actions.append(ReapProcess(seen.name, seen.why))
        elif seen.condition is not Condition.ENDING:
            if seen.name not in names:
                actions.append(StopProcess(seen.name))
            elif why := verdict(seen, now, join_patience, restart_patience):
                actions.append(KillProcess(seen.name, why))
    # Routers start first, since workers and stores get the routers' addresses at their start. A worker finds its store
    # whenever that appears, so both start together and load at the same time.
    serving = any(
        spec.role == "router" and spec.name in actual and actual[spec.name].condition is Condition.LIVE
        for spec in desired
    )
    for spec in desired:
        if spec.name in actual or spec.blocked or now < crashes.get(spec.name, Crashes()).not_before:
            continue
        if spec.role == "router" or serving:
            actions.append(StartProcess(spec))
    return actions


def verdict(
    seen: ObservedProcess, now: float, join_patience: float = JOIN_PATIENCE, restart_patience: float = RESTART_PATIENCE
) -> str:
    """Return the reason to replace this process, or an empty string."""
    elapsed = now - seen.since
    match seen.condition:
        case Condition.FAILED:
            return seen.why
        case Condition.SILENT if elapsed >= restart_patience:
            return f"no router has heard from it for cluster.heartbeat_timeout_ms, and {elapsed:.0f} s more"
        case Condition.STUCK:
            return "its step, or a turn of its main loop, has taken longer than cluster.step_timeout_ms"
        case Condition.JOINING if seen.was_live and elapsed > REJOIN_PATIENCE:
            return f"no router lists it any more, for {elapsed:.0f} s"
        case Condition.JOINING if elapsed > join_patience:
            return f"it had joined no router after {elapsed:.0f} s"
        case Condition.JOINING if seen.misses >= ROUTER_MISSES and elapsed > ROUTER_PATIENCE:
            return f"it had answered nobody after {elapsed:.0f} s"
        case Condition.LIVE if seen.misses >= ROUTER_MISSES and now - seen.missed_since >= restart_patience:
            return f"it has not answered {seen.misses} times in a row"
        case _:
            return ""


def crashed(before: Crashes, why: str, lived: float, now: float) -> Crashes:
    """Return the record after one more crash of a process that had been live for `lived` seconds."""
    count = 1 if lived >= STEADY else before.count + 1
    delay = 0.0 if count == 1 else min(LONGEST_DELAY, FIRST_DELAY * 2 ** (count - 2))
    return replace(before, count=count, total=before.total + 1, not_before=now + delay, last=why)
