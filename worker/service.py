"""A worker's life: the model is loaded once, and what is served around it may change.

    load ──▶ incarnation, prefill ──Become──▶ incarnation, decode ──Become──▶ …

Each role is a new incarnation: whatever is still on its way to the one before is dropped, as after a restart, and
routers hear of it as of any process that joins. Only what is dear stays: the weights, the page pool with the size that
it was given at the start, the engine's threads. What the pool held is forgotten.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from baton.config import Config
from baton.hosts import LOOPBACK
from baton.messages import WorkerRole
from baton.process import settle
from decode_worker import service as decode
from engine.worker import Worker, load
from prefill_worker import service as prefill

log = logging.getLogger(__name__)

_SERVE: Mapping[WorkerRole, Callable[[Worker, Config, threading.Event], None]] = {
    "prefill": prefill.serve,
    "decode": decode.serve,
}


def run(
    role: WorkerRole,
    config: Config,
    name: str,
    node: str,
    routers: Sequence[str],
    stop: threading.Event,
    host: str = LOOPBACK,
) -> None:
    """Serve until `stop` is set, at first as `role`. `routers` are ZMQ endpoints, `node` names the store to use, `host`
    is this node's address. Raises ModelError, NotEnoughMemory or StartupError when it can't start."""
    engine = load(config, role)
    serves: WorkerRole | None = role
    while serves is not None:
        with Worker(config, serves, name, node, routers, host, engine) as worker:
            settle()
            log.info("%s worker %s serves with %d pages", serves, worker.peer.incarnation, worker.num_pages)
            _SERVE[serves](worker, config, stop)
            serves = None if stop.is_set() else worker.becomes
