"""What the router's HTTP port says: `/metrics` for Prometheus, `/discovery` for its targets, `/healthz`.

On loopback it is open. Elsewhere, once clients need API keys, `/metrics` and `/discovery` take an operator's. Threads
of `MetricsServer` answer. They ask the router's loop for what it alone may read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from baton.errors import PermissionDenied, Unauthenticated
from baton.metrics_server import Answer
from router.frontend.identity import Gatekeeper, note_refusal
from router.frontend.router_driver import RouterDriver

_PATIENCE = 3.0  # seconds for the loop to answer: less than a connection has


class MetricsPort:
    """The answers; it reads the router and changes nothing."""

    def __init__(self, drivers: Sequence[RouterDriver], gate: Gatekeeper, *, loopback: bool) -> None:
        """`drivers`: one for each model, the first model's first."""
        self._drivers = drivers
        self._gate = gate
        self._open = loopback
        self._loop = asyncio.get_running_loop()

    def answer(self, request: BaseHTTPRequestHandler) -> Answer:
        """Answer a request, on a thread of the server."""
        path = request.path.partition("?")[0]
        try:
            if not self._open and path != "/healthz":
                self._gate.identify({name.lower(): text for name, text in request.headers.items()}, operator=True)
        except (Unauthenticated, PermissionDenied) as error:
            note_refusal(path, request.client_address[0], error)
            if isinstance(error, PermissionDenied):
                return Answer(f"{error}\n".encode(), 403)
            return Answer(f"{error}\n".encode(), 401, headers={"WWW-Authenticate": "Bearer"})
        match path:
            case "/metrics":
                return self._drivers[0].metrics.answer(request)
            case "/discovery":
                return self._of_loop(self._discovery())
            case "/healthz":
                return self._of_loop(self._healthz())
            case _:
                return Answer(b"there are /metrics, /discovery and /healthz\n", 404)

    def _of_loop(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        """Return what the loop answers. One that stands still is no router that serves: 504, and not /healthz's 503."""
        answering = asyncio.run_coroutine_threadsafe(answer, self._loop)
        try:
            return answering.result(_PATIENCE)
        except TimeoutError:
            answering.cancel()
            return Answer(f"the router's loop did not answer in {_PATIENCE:g} s\n".encode(), 504)

    async def _discovery(self) -> Answer:
        """Every live process's metrics address, as Prometheus' `http_sd_configs` takes it."""
        me, others = self._drivers[0].processes()
        others = [*others, *(view for each in self._drivers[1:] for view in each.processes()[1])]
        targets = [
            {
                "targets": [view.metrics],
                "labels": {"role": view.peer.role, "node": view.peer.node, "name": view.peer.name},
            }
            for view in (me, *others)
            if view.metrics and view.gone is None
        ]
        return Answer(msgspec.json.encode(targets), content_type="application/json")

    async def _healthz(self) -> Answer:
        """200 while a request that comes now can be served."""
        reasons = [each.unready for each in self._drivers]
        if None in reasons:
            return Answer(b"serving\n")
        return Answer(f"{reasons[0]}\n".encode(), 503)
