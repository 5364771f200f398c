"""Reports of actors and of the supervisor. Plain data; importing it needs no Ray."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from baton.addresses import ServiceAddresses
from baton.errors import BatonError, from_reason
from baton.messages import Role
from deploy.placement.desired import ClusterScale
from deploy.processes import ProcessIdentity


class ProcessRecord(msgspec.Struct, frozen=True):
    """The process that an actor runs in. The record is kept where it outlives the actor."""

    identity: ProcessIdentity
    node: str
    node_id: str  # Ray's
    gpu_share: float = 0.0  # of each of its GPUs; 0: it has none
    gpu_ids: tuple[str, ...] = ()  # as Ray calls them


def gpu_text(share: float, ids: Sequence[str]) -> str:
    """Return a worker's GPU in words: "3", or "0.5 of 3"."""
    if not share:
        return ""
    where = ",".join(ids) or "?"
    return where if share >= 1 else f"{share:.2g} of {where}"


class Failure(msgspec.Struct, frozen=True):
    """The error that ended a service: its reason, its message, and the path of its log."""

    reason: str
    message: str
    log: str = ""

    def error(self, name: str) -> BatonError:
        where = f" (log: {self.log})" if self.log else ""
        return from_reason(self.reason, f"{name}: {self.message}{where}")


class Report(msgspec.Struct, frozen=True):
    """An actor's answer to a poll."""

    record: ProcessRecord
    failure: Failure | None = None
    addresses: ServiceAddresses | None = None  # a router's, once it serves


class SupervisedProcess(msgspec.Struct, frozen=True):
    """One process as the supervisor sees it."""

    name: str
    role: Role
    node: str
    condition: str  # a reconcile.Condition, or "waiting" while no process runs under the name
    identity: ProcessIdentity | None = None
    restarts: int = 0
    retry_in: float = 0.0  # seconds of back-off left
    failure: Failure | None = None  # the last one
    gpu: str = ""  # the GPU that Ray has given it, as `gpu_text` has it; "": none


class ClusterOverview(msgspec.Struct, frozen=True):
    """The whole cluster as the supervisor sees it."""

    cluster: str
    supervisor: ProcessIdentity
    scale: ClusterScale
    processes: tuple[SupervisedProcess, ...]
    routers: Mapping[str, ServiceAddresses] = {}  # those that have served, by name, first router first
    problem: str = ""  # the exception of the supervisor's last cycle

    @property
    def settled(self) -> bool:
        """Whether every desired process is live, and no other process exists."""
        return bool(self.processes) and all(view.condition == "live" for view in self.processes)


OVERVIEW_FILE = "supervisor.json"


def read_overview(folder: Path) -> ClusterOverview | None:
    """Return the last overview of the supervisor; None if it runs on another machine or has not written one."""
    try:
        return msgspec.json.decode((folder / OVERVIEW_FILE).read_bytes(), type=ClusterOverview)
    except (OSError, msgspec.MsgspecError):
        return None
