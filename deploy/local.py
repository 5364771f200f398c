"""Run a whole cluster as plain subprocesses, without Ray: for tests, benchmarks and debugging.

    with LocalCluster(config, directory) as cluster:
        Client(cluster.address, cluster.operator).generate(…)
        cluster.kill("decode-0")
        cluster.start("decode-0")

One machine may stand in for several nodes, each with a store of its own:

    LocalCluster(config, nodes=["a", "b"], placed={"prefill-0": "a", "decode-0": "b"})

A `LocalNode` may also have an address of its own, and a command prefix that runs a command there, such as in a network
namespace. All nodes must share the files below `directory` and the process ids.

Several routers may share the workers and the ports for clients: with `cluster.routers` 2 there is "router-1" beside
"router". Each has an operator's address of its own (`operator_of`).

The routers start first, and each prints its addresses in one line of JSON. Then all other processes start at once.
Every process dies with this one, however this one ends. No process is restarted automatically: only the supervisor does
that.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol, Self

import msgspec

from baton.addresses import ServiceAddresses, listening
from baton.client import Client, is_up
from baton.config import Config, dump
from baton.errors import BatonError, StartupError
from baton.hosts import LOOPBACK
from baton.operator_address import FIRST_ROUTER, operator_of_router
from baton.operator_api import Status
from baton.operator_port import MAX_PATH_BYTES
from baton.wire import ClusterKeys
from deploy.placement.desired import ClusterScale, ProcessSpec, plan, pool_of, scale_of, worker_role, workers_on
from deploy.placement.gpu_sharing import GpuShare, share_gpus, uses_assigned_gpu, wanted_gpus, with_share
from deploy.processes import ProcessIdentity, end, share_cores
from engine.device.gpus import visible_gpus

_POLL = 0.05
_MODULES: Mapping[str, Sequence[str]] = {
    "router": ["router"],
    "store": ["kvstore"],
    "prefill": ["worker", "prefill"],
    "decode": ["worker", "decode"],
}


@dataclass(frozen=True)
class LocalNode:
    """One node of a local cluster."""

    name: str
    host: str = LOOPBACK  # its address
    enter: tuple[str, ...] = ()  # command prefix that runs a command there, in the same process (exec)


class Child(Protocol):
    """A child process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def launch(enter: Sequence[str], argv: Sequence[str], out: BinaryIO, err: BinaryIO) -> Child:
    """Start `python -m ARGV` behind the command prefix `enter`. The process dies with this one."""
    command = [*enter, sys.executable, "-m", "deploy.child", str(os.getpid()), *argv]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)  # noqa: S603 - a list, no shell


@dataclass
class _Running:
    process: Child
    identity: ProcessIdentity


class LocalCluster:
    """Owns the processes it starts and the files below `directory`, and ends exactly those processes."""

    launch: ClassVar[Callable[[Sequence[str], Sequence[str], BinaryIO, BinaryIO], Child]] = staticmethod(launch)
    """Starts a process. The tests have a faster one."""

    def __init__(
        self,
        config: Config,
        directory: Path | None = None,
        *,
        nodes: Sequence[str | LocalNode] = (),
        placed: Mapping[str, str] | None = None,
        reach: Callable[[str], str] = str,
        patience: float = 90.0,
    ) -> None:
        """Plan the cluster; nothing starts yet.

        `directory` holds configuration, logs and output (None: a temporary one, removed at the end). `nodes` are the
        nodes that this machine plays, by default one. `placed` maps processes to nodes; `plan` places the others.
        `reach` maps the host:port of a node to one that this process can connect to. `patience` is the time limit of
        each start, in seconds. Each object adds a random suffix to the cluster's name, so clusters on one machine never
        share a store.
        """
        self._cleanup = contextlib.ExitStack()
        if directory is None:
            directory = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
        self.directory = directory
        self._nodes = {
            node.name: node for node in (LocalNode(n) if isinstance(n, str) else n for n in nodes or ["local"])
        }
        self.nodes = list(self._nodes)
        self.reach = reach
        if strange := set((placed or {}).values()) - set(self.nodes):
            raise StartupError(f"there is no node {', '.join(sorted(strange))}; this cluster has {self.nodes}")
        name = f"{config.cluster.name[:24]}-{secrets.token_hex(3)}"
        own = msgspec.structs.replace(
            config.cluster,
            name=name,
            log_dir=config.cluster.log_dir or str(directory / "logs"),
            key_file=config.cluster.key_file or str(directory / "cluster.key"),
        )
        router = msgspec.structs.replace(config.router, operator=self._operator(config.router.operator))
        api = msgspec.structs.replace(config.api, keys_file=config.api.keys_file or str(directory / "api-keys.json"))
        self.config = msgspec.structs.replace(config, cluster=own, router=router, api=api)
        self.patience = patience
        self._addresses: dict[str, ServiceAddresses] = {}  # by router, of those that have served
        planned = plan(self.config, scale_of(config), self.nodes, placed, one_machine=True)
        self._specs = {spec.name: spec for spec in planned}
        self._running: dict[str, _Running] = {}
        self._gpus: dict[str, GpuShare] = {}  # by worker
        # The parent-death signal is sent when the *thread* that started a child ends, so one thread starts all of them.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")

    # --- the whole cluster -------------------------------------------------------------------------------------------

    def up(self) -> Self:
        """Start all processes and wait until every router lists all of them as live.

        Raises StartupError with the output of the process that failed. Then nothing is left running.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.config.cluster.key_path == self.directory / "cluster.key":
                ClusterKeys.read_or_make(self.config.cluster.key_path)
            for name in self._routers:
                self.start(name)
            for spec in self._specs.values():
                if spec.role != "router":
                    self._spawn(spec)
            self.wait_live(self._specs)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End every process that this object started, even stopped (SIGSTOP) ones."""
        self._spawner.submit(end, [running.identity for running in self._running.values()], 5.0).result()
        for running in self._running.values():
            running.process.wait()
        self._running.clear()
        self._spawner.shutdown()
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one process -------------------------------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """The first node, where the router runs."""
        return self.nodes[0]

    @property
    def address(self) -> str:
        """host:port of the public gRPC port, which all routers share."""
        return self.reach(self._addresses_of(FIRST_ROUTER).grpc)

    def api_of(self, router: str) -> str:
        """Return host:port of a router's HTTP API, which is the same for all."""
        return self.reach(self._addresses_of(router).api)

    @property
    def operator(self) -> str:
        """The address of the first router's operator port, valid on this machine."""
        return self.operator_of(FIRST_ROUTER)

    def operator_of(self, router: str) -> str:
        """Return the address of a router's operator port, valid on this machine."""
        return self._addresses_of(router).operator

    def _addresses_of(self, router: str) -> ServiceAddresses:
        if router not in self._addresses:
            raise StartupError(f"{router} is not up; call up() first")
        return self._addresses[router]

    @property
    def operator_key(self) -> str:
        """The API key of the cluster's own processes, for an operator port on loopback."""
        return ClusterKeys.read_file(self.config.cluster.key_path).operator_key

    @property
    def addresses(self) -> ServiceAddresses | None:
        """The addresses of the first router; None until it serves."""
        return self._addresses.get(FIRST_ROUTER)

    @property
    def _routers(self) -> list[str]:
        return [spec.name for spec in self._specs.values() if spec.role == "router"]

    @property
    def pids(self) -> dict[str, int]:
        """The pid of every running process, by name."""
        return {name: running.identity.pid for name, running in self._running.items() if not running.identity.gone()}

    def log(self, name: str) -> Path:
        """Return the file with that process's stderr. Its log file is in `directory`/logs."""
        return self.directory / f"{name}.err"

    def kill(self, name: str, number: int = signal.SIGKILL) -> ProcessIdentity:
        """Send a signal to the process of that name. With SIGKILL, wait until it is gone."""
        running = self._running[name]
        running.identity.signal(number)
        if number == signal.SIGKILL:
            running.process.wait(timeout=10)
        return running.identity

    def start(self, name: str, node: str = "") -> int:
        """Start or restart one process, and return its pid. New workers such as "decode-2" need no configuration.

        A worker starts on `node`, by default on its previous node. A node without a store gets one. For a router, wait
        until it serves, at its previous addresses. Raises StartupError.
        """
        if name in self.pids:
            raise StartupError(f"{name} runs already, as pid {self.pids[name]}; kill it first")
        spec = self._specs.get(name)
        if spec is None or node not in ("", spec.node):
            for store in self._place(name, node):
                self._spawn(store)
            spec = self._specs[name]
        pid = self._spawn(spec)
        if spec.role == "router":
            self._addresses[name] = self._read_addresses(name)
            if name == FIRST_ROUTER:
                self.config = self._addresses[name].pin(self.config)
        return pid

    def wait_live(self, names: Iterable[str], seconds: float | None = None) -> Status:
        """Wait until every running router lists the current processes of these names as live; return one status.

        Of the routers, each lists only itself. The status is the first router's. Raises StartupError if one of the
        processes ends first, or on a timeout.
        """
        names = list(names)
        deadline = time.monotonic() + (self.patience if seconds is None else seconds)
        routers = [router for router in self._routers if router in self.pids]
        if not routers:
            raise StartupError("no router runs; call up() first")
        workers = [name for name in names if self._specs[name].role != "router"]
        answers = [
            self._wait_listed(router, [name for name in names if name in (router, *workers)], deadline)
            for router in routers
        ]
        return answers[0]

    def _wait_listed(self, router: str, names: Sequence[str], deadline: float) -> Status:
        problem = "it has not answered"
        with Client(operator=self.operator_of(router), api_key=self.operator_key, one_router=True) as client:
            while time.monotonic() < deadline:
                for name in names:
                    self._check_running(name)
                try:
                    status = client.status(timeout=2.0)
                except BatonError as error:
                    problem = str(error)
                else:
                    live = {p.name: p.pid for p in status.processes if is_up(p)}
                    missing = [name for name in names if live.get(name) != self._running[name].identity.pid]
                    if not missing:
                        return status
                    problem = f"it does not list {', '.join(missing)} as live; see {self.directory}"
                time.sleep(_POLL)
        raise StartupError(f"the cluster of {router} is not ready in time: {problem}")

    # --- internals ---------------------------------------------------------------------------------------------------

    def _place(self, name: str, node: str) -> list[ProcessSpec]:
        """Place a worker, on `node` if given. Return the stores that must start for it."""
        role, _, index = name.rpartition("-")
        role, pool = role.partition("-")[0], pool_of(name)
        if role not in ("prefill", "decode") or not index.isdigit() or pool > len(self.config.models):
            raise StartupError(f"{name!r} names no process; write prefill-N, decode-N, or one that was started before")
        if node and node not in self.nodes:
            raise StartupError(f"there is no node {node!r}; this cluster has {self.nodes}")
        placed = {spec.name: spec.node for spec in self._specs.values() if spec.name != name}
        placed |= {name: node} if node else {}
        numbered = [known for known in (name, *placed) if known not in self._routers]
        count = max(int(known.rpartition("-")[2]) for known in numbered) + 1
        scale = ClusterScale(count, count, tuple((count, count) for _ in self.config.models))
        planned = plan(self.config, scale, self.nodes, placed, one_machine=True)
        worker = next(spec for spec in planned if spec.name == name)
        served = {(spec.pool, spec.node) for spec in self._specs.values() if spec.role == "store"}
        needed = {(pool, worker.node)} - served
        stores = [spec for spec in planned if spec.role == "store" and (spec.pool, spec.node) in needed]
        self._specs |= {spec.name: spec for spec in (*stores, worker)}
        return stores

    def _spawn(self, spec: ProcessSpec) -> int:
        config = self.directory / f"{spec.name}.yaml"
        # All nodes share the cores of this machine.
        workers = sum(workers_on(node, self._specs.values()) for node in self.nodes)
        own = self._config_of(spec)
        if spec.role in ("prefill", "decode"):
            own = with_share(own, self._gpu_of(spec))
        config.write_text(dump(share_cores(own, workers)))
        node = self._nodes[spec.node]
        argv = [*_MODULES[spec.role], "--config", str(config), "--name", spec.name, "--node", spec.node]
        argv += ["--host", node.host]
        if spec.role != "router":
            if not self._addresses:
                raise StartupError(f"{spec.name} needs a router; start that first")
            argv += [
                word for router in self._addresses.values() for word in ("--router", router.endpoint_of(spec.pool))
            ]
        with (self.directory / f"{spec.name}.out").open("wb") as out, self.log(spec.name).open("wb") as err:
            process = self._spawner.submit(type(self).launch, node.enter, argv, out, err).result()
        self._running[spec.name] = _Running(process, ProcessIdentity.of(process.pid))
        return process.pid

    def _gpu_of(self, spec: ProcessSpec) -> GpuShare | None:
        """Return the worker's part of this machine's GPUs, which all nodes share; None: it computes on the CPU.

        It keeps that when it is started again. Raises StartupError if other workers hold all of them.
        """
        workers = [each for each in self._specs.values() if each.role in ("prefill", "decode")]
        shares: dict[str, float | None] = {}
        pools = self.config.pools()
        for each in workers:
            role = worker_role(each.role)
            if uses_assigned_gpu(pools[each.pool].device_of(role)):
                shares[each.name] = wanted_gpus(pools[each.pool], role)
        if spec.name not in shares or not (gpus := len(visible_gpus().gpus)):
            return None
        self._gpus = share_gpus(shares, gpus, self._gpus)
        if spec.name not in self._gpus:
            if (ranks := pools[spec.pool].ranks_of(worker_role(spec.role))) > 1:
                raise StartupError(
                    f"{spec.name} has no room: its {ranks} ranks need {ranks} GPUs that no other worker holds, and "
                    f"this machine has {gpus}; lower {spec.role}.tensor_parallel_size"
                )
            raise StartupError(f"{spec.name} has no room: other workers hold the {gpus} GPUs of this machine")
        return self._gpus[spec.name]

    def _config_of(self, spec: ProcessSpec) -> Config:
        """Return the configuration of a process. A router that has served keeps its addresses."""
        if spec.role == "router":
            return listening(self.config, spec.name, self._addresses)
        return self.config.pools()[spec.pool]

    def _operator(self, setting: str) -> str:
        """Return the path of the routers' operator sockets, unless the configuration sets one.

        It is below our directory, or below a temporary one if that path is too long for a socket.
        """
        if setting:
            return setting
        path = self.directory.resolve() / "run" / "router.sock"
        longest = operator_of_router(str(path), "router-99")
        if len(os.fsencode(longest)) > MAX_PATH_BYTES or "," in str(path):
            folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp"))
            path = Path(folder) / "router.sock"
        return str(path)

    def _check_running(self, name: str) -> None:
        running = self._running[name]
        if (code := running.process.poll()) is not None:
            output = self.log(name).read_text(errors="replace").strip().splitlines()[-5:]
            ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise StartupError("\n".join([f"{name} {ending}; its output is {self.log(name)}", *output]))

    def _read_addresses(self, router: str) -> ServiceAddresses:
        output = self.directory / f"{router}.out"
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            line, newline, _ = output.read_text().partition("\n")
            if newline:
                return msgspec.json.decode(line, type=ServiceAddresses)
            self._check_running(router)
            time.sleep(_POLL)
        raise StartupError(f"{router} did not say its addresses within {self.patience} s; see {self.log(router)}")
