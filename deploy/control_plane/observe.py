"""Derive a process's condition from raw facts. Pure, so that a test can replay every misjudgement.

There are two sources. The operating system (through Ray on other nodes) proves that a process is gone. The routers
report a process as silent or stuck, which is enough to end it. If several routers answer, the best report counts, since
a missing heartbeat may be one router's fault. While no router answers, no process is judged silent.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from baton.operator_api import ProcessState, Status
from deploy.control_plane.reconcile import Condition, ObservedProcess
from deploy.control_plane.reports import Failure
from deploy.processes import ProcessIdentity

Listed: TypeAlias = Literal["live", "silent", "stuck", "absent", "unknown"]

_STATES: Mapping[ProcessState, Listed] = {"live": "live", "draining": "live", "stuck": "stuck"}
_BEST_FIRST: Sequence[Listed] = ("live", "stuck", "silent", "absent")
_CONDITIONS: Mapping[Listed, Condition] = {
    "live": Condition.LIVE,
    "silent": Condition.SILENT,
    "stuck": Condition.STUCK,
    "absent": Condition.JOINING,
}


@dataclass(frozen=True)
class Facts:
    """The facts about one process in this cycle."""

    gone: bool = False  # proven
    ending: bool = False  # the supervisor is ending it
    failure: Failure | None = None  # its service's error
    listed: Listed = "unknown"  # its state according to the routers
    answers: bool = False  # routers only: it has answered in this cycle
    why_gone: str = ""
    identity: ProcessIdentity | None = None


def listed(statuses: Iterable[Status], name: str, identity: ProcessIdentity | None) -> Listed:
    """Return the best state that the answering routers list for this process, ignoring its predecessors."""
    if identity is None:
        return "unknown"
    words = {_listed(status, name, identity.pid) for status in statuses}
    for word in _BEST_FIRST:
        if word in words:
            return word
    return "unknown"


def _listed(status: Status, name: str, pid: int) -> Listed:
    for process in status.processes:
        if process.name == name and process.pid == pid:
            return _STATES.get(process.state, "silent")  # of a death the supervisor still asks the operating system
    return "absent"


def observe(before: ObservedProcess, facts: Facts, now: float) -> ObservedProcess:
    """Return the process with its condition as of now."""
    why = facts.failure.message if facts.failure else before.why
    if facts.gone:
        condition, why = Condition.GONE, why or facts.why_gone
    elif facts.ending:
        condition = Condition.ENDING
    elif facts.failure is not None:
        condition = Condition.FAILED
    else:
        condition = _CONDITIONS.get(facts.listed, before.condition)
    return replace(
        before,
        condition=condition,
        since=before.since if condition is before.condition else now,
        was_live=before.was_live or condition is Condition.LIVE,
        why=why,
    )


def observe_router(before: ObservedProcess, facts: Facts, now: float) -> ObservedProcess:
    """Return a router's condition, which depends on whether it answers probes.

    Missed probes are counted as well as timed. If the supervisor itself was paused, a long time without an answer
    proves nothing.
    """
    seen = observe(before, replace(facts, listed="live" if facts.answers else "unknown"), now)
    if facts.answers:
        return replace(seen, misses=0)
    return replace(seen, misses=before.misses + 1, missed_since=before.missed_since if before.misses else now)
