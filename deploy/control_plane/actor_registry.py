"""Start, poll and end the processes of a cluster as Ray actors, with proof of their end. No decisions here."""

import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.addresses import ServiceAddresses
from deploy.control_plane.actors import PROCESS_KEY, STOP_PATIENCE, Host, Order, end_here
from deploy.control_plane.kv import RayKvKeys
from deploy.control_plane.reports import Failure, ProcessRecord, Report
from deploy.placement.gpu_sharing import GpuShare, NodeHardware, actor_options
from deploy.processes import ProcessIdentity

SUPERVISOR = "supervisor"
NODE_KEY = "node/"
_START_DELAY = 0.5  # seconds after which an actor that was killed before its start can't run any more
_REMOTE_PATIENCE = 30.0  # seconds, for a task on another node
LENDING_PATIENCE = 30.0  # seconds until an actor has its GPUs; about 5 where they are free

log = logging.getLogger(__name__)


@dataclass
class ActorRecord:
    """One actor, and the last facts about its process."""

    name: str
    node: str
    handle: Any = None  # None: only its record was found
    record: ProcessRecord | None = None
    gpu_share: float = 0.0  # of its node's GPUs
    started: float = 0.0  # when Ray was told to start the actor
    failure: Failure | None = None
    addresses: ServiceAddresses | None = None
    report: Any = None  # the pending report() call
    lost: str = ""  # Ray's message when the actor died
    ending: bool = False  # by us: its death is then no failure
    gone: bool = False  # proven
    why_gone: str = ""


class ActorRegistry:
    """Every actor of one namespace, by name."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._keys = RayKvKeys(namespace)
        self._members: dict[str, ActorRecord] = {}
        self._here = ray.get_runtime_context().get_node_id()
        self._names = {node_id: name.decode() for node_id, name in self._keys.under(NODE_KEY)}

    def member(self, name: str) -> ActorRecord:
        return self._members[name]

    def nodes(self) -> list[str]:
        """Return the names of the nodes that are up, ours first."""
        return list(self._node_ids())

    def hardware(self) -> dict[str, NodeHardware]:
        """Return the GPUs and labels of the nodes that are up."""
        nodes = {name: hardware_of(node) for name, node in self._alive().items()}
        if not any(has.gpus for has in nodes.values()):
            return nodes
        free = self._free_gpus()
        return {name: replace(has, lent=self._lent(name, has.gpus, free.get(name))) for name, has in nodes.items()}

    def gpu_shares(self) -> dict[str, GpuShare]:
        """Return the GPU shares of all processes that are not gone."""
        return {name: GpuShare(each.gpu_share) for name, each in self._members.items() if each.gpu_share}

    def rediscover(self) -> dict[str, str]:
        """Find running actors by name, and processes without an actor by their records; return the node of each."""
        listed: Any = ray.util.list_named_actors(all_namespaces=True)
        names = {actor["name"] for actor in listed if actor["namespace"] == self._namespace}
        records = {n: msgspec.json.decode(value, type=ProcessRecord) for n, value in self._keys.under(PROCESS_KEY)}
        for name in sorted((names | set(records)) - {SUPERVISOR}):
            record = records.get(name)
            handle = None
            with contextlib.suppress(ValueError):
                handle = ray.get_actor(name, namespace=self._namespace)
            node = record.node if record else self.nodes()[0]
            self._members[name] = ActorRecord(name, node, handle, record, record.gpu_share if record else 0.0)
        return {name: member.node for name, member in self._members.items()}

    def sign(self, name: str) -> ProcessIdentity:
        """Record the calling process under `name`."""
        record = ProcessRecord(ProcessIdentity.mine(), "", self._here)
        self._keys.put(PROCESS_KEY + name, msgspec.json.encode(record))
        return record.identity

    def start(self, order: Order) -> bool:
        """Start an actor. Return False if Ray still keeps its predecessor's name, or if the node has gone."""
        node_id = self._node_ids().get(order.node)
        if node_id is None:
            return False
        options: dict[str, Any] = {
            "name": order.name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 2,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        if order.role == "prefill" or order.role == "decode":
            options |= actor_options(order.config.device_of(order.role), order.gpu_share, order.node_gpus)
        try:
            handle = ray.remote(Host).options(**options).remote(order)
        except ValueError as error:
            log.info("%s can't start yet: %s", order.name, error)
            return False
        self._members[order.name] = ActorRecord(
            order.name, order.node, handle, gpu_share=order.gpu_share, started=time.monotonic()
        )
        return True

    def poll(self, patience: float = 0.2) -> None:
        """Request a report from every actor, and take those that are ready. A late report is taken by a later call."""
        for member in self._members.values():
            if member.report is None and member.handle is not None and not member.gone:
                member.report = member.handle.report.remote()
        waiting = {member.report: member for member in self._members.values() if member.report is not None}
        if waiting:
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=patience)
            for answer in done:
                waiting[answer].report = None
                self._take(waiting[answer], answer)
        for member in self._members.values():
            if member.record is None and member.gpu_share and member.failure is None and not member.ending:
                self._check_lending(member)
            if member.gone or member.record is None:
                continue
            if self._proven_gone(member.record):
                member.gone, member.why_gone = True, member.why_gone or "its process has gone"
            elif member.handle is None and not member.ending and member.failure is None:
                # The process is on another node, without an actor: it can't report, and nothing proves that it has
                # gone.
                member.failure = Failure("unavailable", member.lost or "its actor has gone")

    def end(self, name: str) -> bool:
        """SIGKILL a process and return whether it is gone. Blocks.

        Also ends a stopped process at once, for which Ray's own kill takes seconds.
        """
        member = self._members[name]
        member.ending = True
        record = member.record or self._kept_record(name)
        if record is None:
            # The actor has not run its first line, which writes the record. After Ray has cancelled it, it never will.
            self._kill_actor(member)
            time.sleep(_START_DELAY)
            record = self._kept_record(name)
        if record is None:
            member.gone, member.why_gone = True, "its actor never started"
            return True
        member.record = record
        if self._end_process(record):
            member.gone, member.why_gone = True, member.why_gone or "it was ended"
        return member.gone

    def retire(self, name: str, patience: float = STOP_PATIENCE) -> bool:
        """Stop a process's service, then end the process; return whether it is gone. Blocks.

        `patience`: seconds that the service gets if it has answered lately."""
        member = self._members[name]
        if member.report is not None:
            patience = STOP_PATIENCE
        if member.handle is not None:
            with contextlib.suppress(RayError, GetTimeoutError):
                ray.get(member.handle.stop.remote(patience), timeout=patience + 1)
        return self.end(name)

    def bury(self, name: str) -> None:
        """Remove the actor and the record of a process that is gone, which frees its name."""
        member = self._members.pop(name)
        self._kill_actor(member)
        self._keys.delete(PROCESS_KEY + name)

    def dismiss_supervisor(self) -> None:
        """End the supervisor for good, stopped or not, so that it can't restart processes during the teardown."""
        supervisor = ActorRecord(SUPERVISOR, "", record=self._kept_record(SUPERVISOR))
        self._kill_actor(supervisor)  # also tells Ray not to restart it
        record = supervisor.record
        if record is not None and not (record.node_id == self._here and record.identity.wait(1.0)):
            self._end_process(record)
        self._keys.delete(PROCESS_KEY + SUPERVISOR)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _node_ids(self) -> dict[str, str]:
        return {name: node["NodeID"] for name, node in self._alive().items()}

    def _alive(self) -> dict[str, Mapping[str, Any]]:
        """Return Ray's entry of every live node by our name for it, ours first. Names are unique."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        alive.sort(key=lambda node: (node["NodeID"] != self._here, node["NodeID"]))
        hostnames = {node["NodeID"]: node["NodeManagerHostname"] or socket.gethostname() for node in alive}
        new = name_nodes(hostnames, self._names)
        for node_id, name in new.items():
            self._keys.put(NODE_KEY + node_id, name.encode())
        self._names |= new
        return {self._names[node["NodeID"]]: node for node in alive}

    def _free_gpus(self) -> dict[str, float]:
        """Return the GPUs that Ray can lend now, by node. It is late by a moment."""
        from ray._private.state import available_resources_per_node

        available = available_resources_per_node()
        return {name: float(available.get(node_id, {}).get("GPU", 0.0)) for name, node_id in self._node_ids().items()}

    def _lent(self, node: str, gpus: int, free: float | None) -> float:
        """Return how many GPUs of a node Ray has lent to others, at least: ours may still wait for theirs."""
        ours = sum(each.gpu_share for each in self._members.values() if each.node == node and not each.gone)
        return 0.0 if free is None else max(0.0, gpus - free - ours)

    def _check_lending(self, member: ActorRecord) -> None:
        """Give an actor up that has not run its first line because its node's GPUs are others'.

        Ray would let it wait for ever. The next plan may have another node for it.
        """
        if time.monotonic() - member.started < LENDING_PATIENCE:
            return
        free = self._free_gpus().get(member.node, 0.0)
        if free < member.gpu_share:
            member.failure = Failure(
                "startup",
                f"Ray has not lent it {member.gpu_share:g} GPUs of {member.node} within {LENDING_PATIENCE:.0f} s: "
                f"{free:g} are free, and others hold the rest (`ray status` counts them); end those, or add a node",
            )

    def _kept_record(self, name: str) -> ProcessRecord | None:
        record = self._keys.get(PROCESS_KEY + name)
        return None if record is None else msgspec.json.decode(record, type=ProcessRecord)

    def _take(self, member: ActorRecord, answer: Any) -> None:
        try:
            report = msgspec.json.decode(ray.get(answer), type=Report)
        except ActorUnavailableError as error:
            log.info("%s can't be reached now: %s", member.name, first_line(error))
        except RayActorError as error:
            # Ray reports a dead actor. That is a hint: only the end of its process is proof.
            member.handle, member.lost = None, f"its actor has died: {first_line(error)}"
            member.record = member.record or self._kept_record(member.name)
            if member.record is None and not member.ending:
                member.gone = True
                member.failure = Failure("startup", f"its actor could not start: {first_line(error)}")
        except RayError as error:
            log.warning("%s can't be asked: %s", member.name, first_line(error))
        else:
            member.record, member.failure, member.addresses = report.record, report.failure, report.addresses

    def _proven_gone(self, record: ProcessRecord) -> bool:
        if record.node_id == self._here:
            return record.identity.gone()
        # The end of a node ends its processes. On a live node only `end` can prove it.
        return record.node_id not in self._node_ids().values()

    def _end_process(self, record: ProcessRecord) -> bool:
        if record.node_id == self._here:
            return end_here(record.identity)
        if self._proven_gone(record):
            return True
        strategy = NodeAffinitySchedulingStrategy(record.node_id, soft=False)
        task: Any = ray.remote(end_here).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        try:
            return ray.get(task.remote(record.identity), timeout=_REMOTE_PATIENCE)
        except RayError as error:
            log.warning("can't end %s on %s: %s", record.identity, record.node, first_line(error))
            return False

    def _kill_actor(self, member: ActorRecord) -> None:
        handle = member.handle
        if handle is None:
            with contextlib.suppress(ValueError):
                handle = ray.get_actor(member.name, namespace=self._namespace)
        if handle is not None:
            with contextlib.suppress(RayError):
                ray.kill(handle, no_restart=True)


def hardware_of(node: Mapping[str, Any]) -> NodeHardware:
    """Return what an entry of `ray.nodes()` says of the node's GPUs and labels."""
    return NodeHardware(int(node.get("Resources", {}).get("GPU", 0)), dict(node.get("Labels") or {}))


def name_nodes(hostnames: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return names for the nodes (id → hostname) that have none in `names` (id → name).

    A name is the hostname, with a number if another live node has it already. A node thus keeps its name when Ray is
    restarted, and its store finds the disk tier of its predecessor.
    """
    used = {names[node_id] for node_id in hostnames if node_id in names}
    new: dict[str, str] = {}
    for node_id, hostname in hostnames.items():
        if node_id not in names:
            spellings = itertools.chain([hostname], (f"{hostname}-{number}" for number in itertools.count(2)))
            new[node_id] = next(name for name in spellings if name not in used)
            used.add(new[node_id])
    return new


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
