"""`python -m router.frontend.front`: one front. Its router starts it, tells it on stdin what to do, and ends it.

It ends with its router: the kernel sees to that.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from ctypes import CDLL

import msgspec

from baton import config, logs
from baton.api_keys import KeyRing
from baton.doors import server_tls
from baton.errors import BatonError
from baton.metrics import Metrics
from baton.monotonic_clock import MonotonicClock
from baton.process import raise_descriptor_limit, settle
from router.frontend.api.app import HttpApi
from router.frontend.api.server import ApiServer
from router.frontend.front.fleet import FrontOrder, FrontReady
from router.frontend.front.remote import RemoteRouter
from router.frontend.identity import Gatekeeper
from router.frontend.served_model import load
from router.frontend.tokenizer_threads import TokenizerThreads

_PR_SET_PDEATHSIG = 1
_LOOK = 1.0  # seconds between two looks at the file with the API keys, and at the certificate


def main() -> int:
    """Serve until SIGTERM; 0, or 1 with the reason on stderr."""
    CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=FrontOrder)
        settings = config.parse(order.config)
        raise_descriptor_limit()
        logs.configure(order.name, settings.cluster)
        asyncio.run(_serve(order, settings))
    except (BatonError, msgspec.MsgspecError) as error:
        print(f"front: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def _serve(order: FrontOrder, settings: config.Config) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tokenizing = TokenizerThreads()
    model, names = await asyncio.to_thread(load, settings.model), None
    if settings.tracing.enabled:
        from router.tracing.headers import trace_headers  # OpenTelemetry, which takes a while to import

        names = trace_headers()
    router = RemoteRouter(
        model, MonotonicClock(), tokenizing, order.router, order.pages, pages_key=order.pages_key, trace_headers=names
    )
    keys = KeyRing(settings.api_keys_path, required=settings.api.require_keys)
    tls = server_tls(settings.tls)
    api = HttpApi(router, router.metrics, Gatekeeper(keys), router.dashboard, settings.api)
    server = ApiServer(api, settings.router.max_concurrent_rpcs, tls)
    listener = socket.socket(fileno=order.listener)
    listener.setblocking(False)
    await server.serve(listener)
    metrics = Metrics()
    metrics.loop_turned()
    metrics.read_at_scrape(lambda: {"front_requests": router.requests, "front_requests_running": router.running})
    address = metrics.serve(order.metrics)
    settle()
    print(msgspec.json.encode(FrontReady(address)).decode(), flush=True)  # noqa: T201
    try:
        while not stop.is_set():
            metrics.loop_turned()
            keys.refresh()
            if tls is not None:
                tls.refresh()
            try:
                await asyncio.wait_for(stop.wait(), _LOOK)
            except TimeoutError:
                continue
    finally:
        metrics.close()
        await server.stop()
        await router.close()
        tokenizing.close()


if __name__ == "__main__":
    sys.exit(main())
