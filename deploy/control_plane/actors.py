"""The Ray actors: each hosts one process of the cluster, and does nothing else. Ray is never on the path of a token.

An actor first records its operating-system process, so that the supervisor can prove its end before replacing it. Then
it runs the entry point of `python -m router`, `kvstore` or `worker` on a thread. Ray never restarts an actor, since a
restart needs that proof.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from functools import partial

import msgspec
import ray

from baton import logs
from baton.addresses import ServiceAddresses
from baton.config import Config
from baton.errors import BatonError
from baton.grpc_loop import GrpcEventLoop
from baton.hosts import LOOPBACK, is_loopback
from baton.messages import Role
from baton.process import raise_descriptor_limit, share_heaps
from baton.wire import ClusterKeys, use_keys
from deploy.control_plane.kv import RayKvKeys as RayKeys
from deploy.control_plane.reports import Failure, ProcessRecord, Report
from deploy.processes import ProcessIdentity, end, share_cores

PROCESS_KEY = "process/"
STOP_PATIENCE = 3.0  # seconds that a service gets to end by itself

log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """The process that an actor hosts, and its settings."""

    namespace: str
    name: str
    role: Role
    node: str
    config: Config
    keys: ClusterKeys  # passed in memory: a node needs no copy of the file
    routers: tuple[str, ...] = ()  # endpoints for workers and stores; empty for a router
    workers: int = 1  # number of workers that share the node's cores
    gpu_share: float = 0.0  # of a GPU of the node, which Ray chooses; 0: none
    node_gpus: int = 0  # that Ray knows on the node


class Service:
    """Runs one entry point on a thread, and keeps its failure."""

    def __init__(self, order: Order, host: str) -> None:
        """Start the thread. `host` is this node's address."""
        self.failure: Failure | None = None
        self.addresses: ServiceAddresses | None = None
        self._order = order
        self._host = host
        use_keys(order.keys)
        self._log = logs.configure(order.name, order.config.cluster)
        raise_descriptor_limit()
        share_heaps()
        self._stop = threading.Event()
        self._stop_router: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name=order.name, daemon=True)
        self._thread.start()

    def stop(self, patience: float) -> bool:
        """Ask the service to stop; return whether it has ended within so many seconds."""
        self._stop.set()
        if self._stop_router is not None:
            self._stop_router()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
            reason, message = "internal", "it has ended by itself"
        except BatonError as error:
            reason, message = error.reason, str(error)
        except BaseException as error:
            log.exception("the service has failed")
            reason, message = "internal", f"{type(error).__name__}: {error}"
        if not self._stop.is_set():
            log.error("given up (%s): %s", reason, message)
            self.failure = Failure(reason, message, str(self._log or ""))

    def _serve(self) -> None:
        order = self._order
        match order.role:
            case "router":
                with asyncio.Runner(loop_factory=GrpcEventLoop) as runner:
                    runner.run(self._serve_router())
                return
            case "store":
                from kvstore.service import run
            case "prefill" | "decode":
                from worker.process import run as run_worker

                run = partial(run_worker, order.role)
        run(share_cores(order.config, order.workers), order.name, order.node, order.routers, self._stop, self._host)

    async def _serve_router(self) -> None:
        from router.service import serve

        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self._stop_router = lambda: loop.call_soon_threadsafe(stop.set)

        def ready(addresses: ServiceAddresses) -> None:
            self.addresses = addresses

        await serve(self._order.config, self._order.name, self._order.node, stop, ready, self._host)


class Host:
    """The actor: one service in this process."""

    def __init__(self, order: Order) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        self._record = ProcessRecord(ProcessIdentity.mine(), order.node, node_id, order.gpu_share, tuple(gpus))
        RayKeys(order.namespace).put(PROCESS_KEY + order.name, msgspec.json.encode(self._record))
        _ordinary_priority()
        alone = is_loopback(order.config.router.host)  # no other node can reach its router
        self._service = Service(order, LOOPBACK if alone else ray.util.get_node_ip_address())

    def report(self) -> bytes:
        addresses = self._service.addresses
        if addresses is not None:
            addresses = addresses.reached_at(ray.util.get_node_ip_address())
        return msgspec.json.encode(Report(self._record, self._service.failure, addresses))

    def stop(self, patience: float) -> bool:
        """Stop the service; return whether it has ended within so many seconds."""
        return self._service.stop(patience)


def _ordinary_priority() -> None:
    """Reset the niceness to 0: Ray runs its workers at 15, behind everything else on the machine.

    Threads inherit the value. Without the permission it stays as it is.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def end_here(identity: ProcessIdentity) -> bool:
    """End a process of this node; return whether it is gone. For another node, run it there as a Ray task."""
    return not end([identity], patience=0.0)
