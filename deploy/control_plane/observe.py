"""From raw facts about one process to its condition: pure, so that every misjudgement can be replayed in a test.

Two witnesses are heard: the operating system (by way of Ray on other nodes), whose word that a process is gone is
proof; and the routers, whose word that it is silent or stuck is enough to end it. Where several answer, the best that
one of them says counts: what does not reach one router may be that router's fault. While none answers, nobody is
judged by its silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from baton.v1 import cluster_pb2
from deploy.control_plane.reconcile import Condition, ObservedProcess
from deploy.control_plane.reports import Failure
from deploy.processes import Identity

Listed: TypeAlias = Literal["live", "silent", "stuck", "absent", "unknown"]

_STATES: Mapping[int, Listed] = {
    cluster_pb2.PROCESS_STATE_LIVE: "live",
    cluster_pb2.PROCESS_STATE_DRAINING: "live",
    cluster_pb2.PROCESS_STATE_SILENT: "silent",
    cluster_pb2.PROCESS_STATE_STUCK: "stuck",
    cluster_pb2.PROCESS_STATE_DEAD: "silent",  # proof enough for the router; here the system itself is asked
}
_BEST_FIRST: Sequence[Listed] = ("live", "stuck", "silent", "absent")
_CONDITIONS: Mapping[Listed, Condition] = {
    "live": Condition.LIVE,
    "silent": Condition.SILENT,
    "stuck": Condition.STUCK,
    "absent": Condition.JOINING,
}


@dataclass(frozen=True)
class Facts:
    """What was found out about one process this turn."""

    gone: bool = False  # proven
    ending: bool = False  # we are ending it ourselves
    failure: Failure | None = None  # what its service said when it gave up
    listed: Listed = "unknown"  # by the routers
    answers: bool = False  # of a router: it has answered this turn
    why_gone: str = ""
    identity: Identity | None = None


def listed(statuses: Iterable[cluster_pb2.GetStatusResponse], name: str, identity: Identity | None) -> Listed:
    """What the routers that answer say about this process of that name. An earlier process of the name does not
    count."""
    if identity is None:
        return "unknown"
    said = {_listed(status, name, identity.pid) for status in statuses}
    for word in _BEST_FIRST:
        if word in said:
            return word
    return "unknown"


def _listed(status: cluster_pb2.GetStatusResponse, name: str, pid: int) -> Listed:
    for process in status.processes:
        if process.name == name and process.pid == pid:
            return _STATES.get(process.state, "absent")
    return "absent"


def observe(before: ObservedProcess, facts: Facts, now: float) -> ObservedProcess:
    """The process as seen now."""
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
    """A router, whose witness is whether it answers. Probes are counted as well as timed: had we been paused ourselves,
    a long time without an answer would prove nothing."""
    seen = observe(before, replace(facts, listed="live" if facts.answers else "unknown"), now)
    if facts.answers:
        return replace(seen, misses=0)
    return replace(seen, misses=before.misses + 1, missed_since=before.missed_since if before.misses else now)
