"""What the supervisor does next, decided purely from what shall run and what it found.

               StartProcess                    a router lists it
    (nothing) ──────────▶ JOINING ───────────────────────────────▶ LIVE
        ▲                    │ typed failure, or silent for too long │ SILENT, STUCK or FAILED
        │ after its          ▼                                       ▼
        │ back-off        KillProcess: SIGKILL, and wait for the proof that the process is gone
        └──────────────── ReapProcess: forget the actor, count the crash ◀── GONE

A silent process that still exists may be stopped for a moment (swap, a live migration, a frozen cgroup), and comes
back with its weights and its cache. So it is given `cluster.restart_patience_ms`, as is a router that does not answer.
A process that is gone is replaced at once. A stuck one has had its patience: `cluster.step_timeout_ms`.

Nothing is started under a name as long as a process of that name may still run: a stopped writer that wakes up writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from deploy.desired import ProcessSpec

RESTART_PATIENCE = 30.0  # seconds, unless configured (cluster.restart_patience_ms)
JOIN_PATIENCE = 900.0  # seconds from start until the router lists it: large weights load slowly
REJOIN_PATIENCE = 20.0  # seconds that a process may be unknown to the router after it had been live
ROUTER_MISSES = 6  # probes in a row that a router which has been live may leave unanswered, of a second each
ROUTER_PATIENCE = 60.0  # seconds from start until a router answers: a busy machine takes many to start a process
STEADY = 60.0  # seconds of being live after which earlier crashes no longer count
FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds; the first crash is repaired at once


class Condition(Enum):
    """How a process was found."""

    JOINING = "joining"  # runs; the router has not listed it yet, or no longer does
    LIVE = "live"
    SILENT = "silent"  # the router has not heard from it for cluster.heartbeat_timeout_ms
    STUCK = "stuck"  # it speaks, but its step, or the turn of its main loop, does not end
    FAILED = "failed"  # its service gave up and said why
    ENDING = "ending"  # somebody is ending it now
    GONE = "gone"  # proven: it can't run another instruction


@dataclass(frozen=True)
class ObservedProcess:
    """One process as found this turn."""

    name: str
    node: str
    condition: Condition
    since: float  # when it got into this condition
    was_live: bool = False  # at any time before
    misses: int = 0  # unanswered probes in a row, of a router only
    missed_since: float = 0.0  # when the first of them went unanswered
    why: str = ""  # what it said when it failed, or how it ended


@dataclass(frozen=True)
class Crashes:
    """The crashes in a row of one name; `not_before` is when it may start again."""

    count: int = 0
    not_before: float = 0.0
    total: int = 0
    last: str = ""


@dataclass(frozen=True)
class StartProcess:
    """Start this process: nothing runs under its name."""

    spec: ProcessSpec


@dataclass(frozen=True)
class KillProcess:
    """SIGKILL it and wait for the proof. It is to be replaced."""

    name: str
    why: str


@dataclass(frozen=True)
class ReapProcess:
    """It is gone: forget its actor and count the crash."""

    name: str
    why: str


@dataclass(frozen=True)
class StopProcess:
    """It is wanted no longer: let it stop by itself, then KillProcess it."""

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
    """The actions of this turn, at most one for each name. `desired` stands in start order."""
    actions: list[SupervisorAction] = []
    wanted = {spec.name for spec in desired}
    for seen in actual.values():
        if seen.condition is Condition.GONE:
            actions.append(ReapProcess(seen.name, seen.why))
        elif seen.condition is not Condition.ENDING:
            if seen.name not in wanted:
                actions.append(StopProcess(seen.name))
            elif why := verdict(seen, now, join_patience, restart_patience):
                actions.append(KillProcess(seen.name, why))
    # Workers and stores are told the routers' addresses when they start, so those come first. A worker finds its store
    # whenever that appears; started right after it, both load at the same time.
    serving = any(
        spec.role == "router" and spec.name in actual and actual[spec.name].condition is Condition.LIVE
        for spec in desired
    )
    for spec in desired:
        if spec.name in actual or now < crashes.get(spec.name, Crashes()).not_before:
            continue
        if spec.role == "router" or serving:
            actions.append(StartProcess(spec))
    return actions


def verdict(
    seen: ObservedProcess, now: float, join_patience: float = JOIN_PATIENCE, restart_patience: float = RESTART_PATIENCE
) -> str:
    """Why this process must be replaced; empty when it need not."""
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
    """The record after one more crash of a process that had been live for `lived` seconds."""
    count = 1 if lived >= STEADY else before.count + 1
    delay = 0.0 if count == 1 else min(LONGEST_DELAY, FIRST_DELAY * 2 ** (count - 2))
    return replace(before, count=count, total=before.total + 1, not_before=now + delay, last=why)
