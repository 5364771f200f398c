"""The supervisor: an actor that holds the desired state and restores it, cycle by cycle.

The process ledger makes the decisions (purely), the actor registry carries them out. Ray restarts only the supervisor,
and a restart only runs `__init__` again. The desired state is therefore in Ray's key-value store. The rest is
rediscovered: the named actors of the namespace, and the record that each left of its process. Crash counts restart at
zero.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from baton import logs
from baton.addresses import ServiceAddresses, listening
from baton.client import Client
from baton.clock import PauseDetector
from baton.config import Config, decode_size, encode_size
from baton.errors import BatonError
from baton.operator_address import FIRST_ROUTER
from baton.operator_api import Status
from baton.wire import ClusterKeys as ClusterKeys
from deploy.control_plane.actor_registry import SUPERVISOR, ActorRegistry
from deploy.control_plane.actors import Order
from deploy.control_plane.kv import RayKvKeys
from deploy.control_plane.observe import Facts, listed
from deploy.control_plane.process_ledger import ProcessLedger
from deploy.control_plane.reconcile import (
    JOIN_PATIENCE,
    KillProcess,
    ReapProcess,
    StartProcess,
    StopProcess,
    SupervisorAction,
)
from deploy.control_plane.reports import OVERVIEW_FILE, ClusterOverview, SupervisedProcess, gpu_text
from deploy.control_plane.state_file import replace
from deploy.placement.desired import ClusterScale, ProcessSpec, plan, workers_on
from deploy.placement.gpu_sharing import GpuShare, NodeHardware, with_share

DESIRED_KEY = "desired"
TURN = 0.25  # seconds
_PAUSED = 5.0  # seconds; a longer cycle means that the supervisor itself was paused

log = logging.getLogger(__name__)


class DesiredCluster(msgspec.Struct, frozen=True):
    """The desired state. Ray's key-value store keeps it when the supervisor is restarted."""

    config: Config
    scale: ClusterScale
    state_dir: str  # on the router's node
    routers: Mapping[str, ServiceAddresses] = {}  # by name; a restarted router uses these addresses again
    join_patience: float = JOIN_PATIENCE  # seconds that a process may take to join

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=encode_size)

    @classmethod
    def decode(cls, text: bytes) -> DesiredCluster:
        return msgspec.json.decode(text, type=cls, dec_hook=decode_size)


class Supervisor:
    """Owns the desired state. Its loop runs on a thread; its methods are called through Ray."""

    def __init__(self, namespace: str, desired: DesiredCluster, cluster_keys: ClusterKeys) -> None:
        """Start, or continue after a restart by Ray, which repeats the call with the same arguments.

        `desired` counts only at the first start, when none is stored. `cluster_keys` come with every start, so they
        need not be in Ray's key-value store or on this node.
        """
        logs.configure(SUPERVISOR, desired.config.cluster)
        self._namespace = namespace
        self._cluster_keys = cluster_keys
        self._keys = RayKvKeys(namespace)
        saved = self._keys.get(DESIRED_KEY)
        self._desired = DesiredCluster.decode(saved) if saved is not None else desired
        self._keep(self._desired)
        self._registry = ActorRegistry(namespace)
        self._identity = self._registry.sign(SUPERVISOR)
        restart_patience = self._desired.config.cluster.restart_patience_ms / 1_000
        self._ledger = ProcessLedger(self._desired.join_patience, restart_patience)
        for name, node in self._registry.rediscover().items():
            log.info("found %s on %s", name, node)
            self._ledger.started(name, node, time.monotonic())
        self._endings: dict[str, Future[bool]] = {}
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="ending")
        self._askers = ThreadPoolExecutor(8, thread_name_prefix="asking")
        self._pauses = PauseDetector(_PAUSED)
        self._clients: dict[str, Client] = {}  # to routers
        self._problem = ""
        self._lock = threading.Lock()  # over desired state and ledger; never held across a blocking call
        threading.Thread(target=self._run, name=SUPERVISOR, daemon=True).start()

    # --- called through Ray ------------------------------------------------------------------------------------------

    def overview(self) -> bytes:
        with self._lock:
            return msgspec.json.encode(self._overview())

    def scale(self, target: ClusterScale) -> None:
        """Set the desired number of workers and return at once. The overview shows when they are live."""
        with self._lock:
            log.info("scale: %s (prefill, decode) of each model", target.by_pool)
            self._keep(msgspec.structs.replace(self._desired, scale=target))

    def reload(self, path: str, name: str) -> None:
        """Start workers of a model with the weights in the directory `path` from now on. A router tells those that
        run."""
        with self._lock:
            config = self._desired.config
            models = [
                msgspec.structs.replace(model, path=path, served_model_name=model.served_names)
                if name in model.served_names
                else model
                for model in config.all_models
            ]
            self._keep(msgspec.structs.replace(self._desired, config=config.with_models(models)))

    # --- one cycle ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._reconcile()
                self._problem = ""
            except Exception as error:
                log.exception("a turn failed; the next one tries again")
                self._problem = f"{type(error).__name__}: {error}"
            time.sleep(TURN)

    def _reconcile(self) -> None:
        statuses, answering = self._ask_routers()
        self._registry.poll()
        with self._lock:
            now = time.monotonic()
            facts = {name: self._facts(name, statuses, answering) for name in self._ledger.names}
            actions = self._ledger.decide(self._specs(), facts, now, self._pauses.tick(now))
            for action in actions:
                self._do(action, now)
            overview = self._overview()
        replace(Path(self._desired.state_dir) / OVERVIEW_FILE, msgspec.json.encode(overview))

    def _do(self, action: SupervisorAction, now: float) -> None:
        match action:
            case StartProcess(spec):
                self._start(spec, now)
            case KillProcess(name, why):
                log.warning("ending %s: %s", name, why)
                self._endings[name] = self._pool.submit(self._registry.end, name)
            case StopProcess(name):
                log.info("retiring %s", name)
                self._endings[name] = self._pool.submit(self._registry.retire, name)
            case ReapProcess(name):
                self._endings.pop(name, None)
                self._registry.bury(name)

    def _start(self, spec: ProcessSpec, now: float) -> None:
        config, known = self._desired.config, self._desired.routers
        if spec.role != "router" and len(known) < config.cluster.routers:
            return  # it must get the addresses of all routers at its start
        routers: tuple[str, ...] = ()
        if spec.role == "router":
            if spec.name != FIRST_ROUTER and FIRST_ROUTER not in known:
                return  # it listens where the first one does
            config = listening(config, spec.name, known)
        else:
            config = config.pools()[spec.pool]
            routers = tuple(router.endpoint_of(spec.pool) for router in known.values())
        workers = workers_on(spec.node, self._specs())
        order = Order(
            self._namespace,
            spec.name,
            spec.role,
            spec.node,
            with_share(config, GpuShare(spec.gpu.share) if spec.gpu is not None else None),  # Ray chooses the GPU
            self._cluster_keys,
            routers,
            workers,
            spec.gpu.share if spec.gpu is not None else 0.0,
            self._registry.hardware().get(spec.node, NodeHardware()).gpus,
        )
        if self._registry.start(order):
            log.info("started %s on %s%s", spec.name, spec.node, f", {order.gpu_share} GPU" if order.gpu_share else "")
            self._ledger.started(spec.name, spec.node, now)

    # --- observing ---------------------------------------------------------------------------------------------------

    def _ask_routers(self) -> tuple[dict[str, Status], set[str]]:
        """Return the statuses of the routers that give one, and the names of all routers that answer."""
        names = [name for name in self._desired.routers if name in self._ledger.names]
        answers = dict(zip(names, self._askers.map(self._ask_router, names), strict=True))
        statuses = {name: answer for name, answer in answers.items() if isinstance(answer, Status)}
        return statuses, {name for name, answer in answers.items() if answer is not None}

    def _ask_router(self, name: str) -> Status | Literal["alive"] | None:
        """Return a router's status, "alive", or None if it does not answer.

        If its operator socket was removed, a router still serves clients. It counts as alive while its metrics port
        answers: at the port for clients any router may.
        """
        if name not in self._clients:
            router = self._desired.routers[name]
            # `baton up` places the supervisor and all routers on one node, so it reaches their Unix sockets.
            key = self._cluster_keys.operator_key
            self._clients[name] = Client(operator=router.operator, api_key=key, one_router=True)
        try:
            return self._clients[name].status(timeout=1.0)
        except BatonError as error:
            log.info("no answer from %s: %s", name, error)
            return "alive" if self._answers(name) else None

    def _answers(self, name: str) -> bool:
        """Whether a router's metrics port answers."""
        connection = http.client.HTTPConnection(self._desired.routers[name].http, timeout=1.0)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status in (200, 503)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _facts(self, name: str, statuses: Mapping[str, Status], answering: set[str]) -> Facts:
        member = self._registry.member(name)
        if (ending := self._endings.get(name)) is not None and ending.done() and not member.gone:
            del self._endings[name]  # the attempt to end it failed; the ledger will repeat the action
        if member.addresses is not None and member.addresses != self._desired.routers.get(name):
            self._learn(name, member.addresses)
        identity = member.record.identity if member.record else None
        return Facts(
            gone=member.gone,
            ending=name in self._endings,
            failure=member.failure,
            listed=listed(statuses.values(), name, identity),
            answers=name in answering,
            why_gone=member.why_gone,
            identity=identity,
        )

    def _specs(self) -> Sequence[ProcessSpec]:
        hardware = self._registry.hardware()
        return plan(
            self._desired.config,
            self._desired.scale,
            list(hardware),
            self._ledger.placed(),
            hardware=hardware,
            held=self._registry.gpu_shares(),
        )

    # --- telling -----------------------------------------------------------------------------------------------------

    def _keep(self, desired: DesiredCluster) -> None:
        self._keys.put(DESIRED_KEY, desired.encode())
        self._desired = desired

    def _learn(self, router: str, addresses: ServiceAddresses) -> None:
        """Store a router's addresses. It restarts there, since running processes have been given them."""
        if (client := self._clients.pop(router, None)) is not None:
            client.close()
        known = sorted({**self._desired.routers, router: addresses}.items())
        self._keep(msgspec.structs.replace(self._desired, routers=dict(known)))

    def _with_gpu(self, view: SupervisedProcess) -> SupervisedProcess:
        record = self._registry.member(view.name).record if view.name in self._ledger.names else None
        gpu = gpu_text(record.gpu_share, record.gpu_ids) if record is not None else ""
        return msgspec.structs.replace(view, gpu=gpu)

    def _overview(self) -> ClusterOverview:
        return ClusterOverview(
            cluster=self._desired.config.cluster.name,
            supervisor=self._identity,
            scale=self._desired.scale,
            processes=tuple(map(self._with_gpu, self._ledger.views(self._specs(), time.monotonic()))),
            routers=self._desired.routers,
            problem=self._problem,
        )
