"""The router's HTTP port: `/metrics` for Prometheus, `/discovery` to tell it where the others are, `/healthz`."""

from __future__ import annotations

import errno

from aiohttp import web

from baton.errors import PortInUse, StartupError
from router.relay import Relay

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ACCESS_LOG = None  # a line per scrape helps nobody


class Http:
    """The server; it reads the relay and changes nothing."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/discovery", self._discovery)
        app.router.add_get("/healthz", self._healthz)
        self._runner = web.AppRunner(app, access_log=_ACCESS_LOG, handle_signals=False, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> str:
        """Listen; returns "host:port". Raises PortInUse or StartupError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_port=False)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"{host}:{port} is in use; stop what listens there or change router.http_port"
                ) from None
            raise StartupError(f"can't listen on {host}:{port}: {error.strerror}") from None
        bound: int = self._runner.addresses[0][1]
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._relay.metrics.text(), headers={"Content-Type": _METRICS_TYPE})

    async def _discovery(self, request: web.Request) -> web.Response:
        """Every live process's metrics address, as Prometheus' `http_sd_configs` takes it."""
        me, others = self._relay.processes()
        targets = [
            {
                "targets": [view.metrics],
                "labels": {"role": view.peer.role, "node": view.peer.node, "name": view.peer.name},
            }
            for view in (me, *others)
            if view.metrics and view.gone is None
        ]
        return web.json_response(targets)

    async def _healthz(self, request: web.Request) -> web.Response:
        """200 while a request that comes now can be served."""
        if self._relay.state.serving:
            return web.Response(text="serving\n")
        return web.Response(status=503, text="no decode worker is live\n")
