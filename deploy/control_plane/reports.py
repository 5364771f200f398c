"""What actors and the supervisor say about themselves. Plain data; importing it needs no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.errors import BatonError, from_reason
from baton.messages import Role
from deploy.addresses import ServiceAddresses
from deploy.desired import ClusterScale
from deploy.processes import Identity


class ProcessRecord(msgspec.Struct, frozen=True):
    """Which process an actor runs in: kept where it outlives the actor."""

    identity: Identity
    node: str
    node_id: str  # Ray's


class Failure(msgspec.Struct, frozen=True):
    """Why a service gave up: the label of its error, what it said, and where its log is."""

    reason: str
    message: str
    log: str = ""

    def error(self, name: str) -> BatonError:
        where = f" (log: {self.log})" if self.log else ""
        return from_reason(self.reason, f"{name}: {self.message}{where}")


class Report(msgspec.Struct, frozen=True):
    """An actor's answer when asked how it is."""

    record: ProcessRecord
    failure: Failure | None = None
    addresses: ServiceAddresses | None = None  # a router's, once it serves


class SupervisedProcess(msgspec.Struct, frozen=True):
    """One process as its supervisor sees it."""

    name: str
    role: Role
    node: str
    condition: str  # of reconcile.Condition, or "waiting" while nothing runs under the name
    identity: Identity | None = None
    restarts: int = 0
    retry_in: float = 0.0  # seconds of back-off left
    failure: Failure | None = None  # the last one


class ClusterOverview(msgspec.Struct, frozen=True):
    """The whole cluster as its supervisor sees it."""

    cluster: str
    supervisor: Identity
    scale: ClusterScale
    processes: tuple[SupervisedProcess, ...]
    routers: Mapping[str, ServiceAddresses] = {}  # those that have served, by name; the first comes first
    problem: str = ""  # what the supervisor itself stumbled over in its last turn

    @property
    def settled(self) -> bool:
        """Whether everything that shall run is live, and nothing else is there."""
        return bool(self.processes) and all(view.condition == "live" for view in self.processes)


OVERVIEW_FILE = "supervisor.json"


def read_overview(folder: Path) -> ClusterOverview | None:
    """What the supervisor wrote last, or none: it runs on another machine, or has not come to it."""
    try:
        return msgspec.json.decode((folder / OVERVIEW_FILE).read_bytes(), type=ClusterOverview)
    except (OSError, msgspec.MsgspecError):
        return None
