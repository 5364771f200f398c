"""The router's loop: it owns the sockets and the clock, and does what `RouterState` says.

`serve` runs in its caller's event loop (a Ray actor's, `python -m router`'s) and installs no signal handlers. If one of
its tasks fails, which is a bug, the whole router ends: its streams get UNAVAILABLE, its workers free what it owned, and
its supervisor starts another. That is better than half a router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from msgspec import structs

import baton
from baton import hosts
from baton.addresses import ServiceAddresses
from baton.api_keys import KeyRing
from baton.clock import Clock, PauseDetector, Tick
from baton.config import Config
from baton.doors import ServerTls, check_keys, server_tls
from baton.errors import BatonError, MalformedMessage, StartupError
from baton.logs import RateLimitedLog
from baton.messages import Message, Peer
from baton.metrics import Metrics
from baton.metrics_server import MetricsServer
from baton.monotonic_clock import MonotonicClock
from baton.operator_address import operator_of_router
from baton.ports import FixedPort, RouterPorts
from baton.process import settle
from baton.wire import Listener, ReplayClient, Subscriber, operator_key, refused
from kvstore.events.wire_format import decode, publisher_of
from router.events import KvEvents, KvSnapshot, MessageReceived
from router.frontend.api.app import HttpApi
from router.frontend.api.batch_store import BatchStore
from router.frontend.api.dashboard import DashboardFeed
from router.frontend.api.operator_server import OperatorCalls, OperatorServer, OtherRouters
from router.frontend.api.server import ApiServer
from router.frontend.cascade import Cascade
from router.frontend.generation import GenerationService
from router.frontend.grpc_api.grpc_server import ClientServer
from router.frontend.identity import Gatekeeper
from router.frontend.metrics_port import MetricsPort
from router.frontend.off_loop import TokenizerThreads
from router.frontend.router_driver import RouterDriver
from router.frontend.served_model import load
from router.tracing.request_spans import SpanSink

log = logging.getLogger(__name__)
of_peers = RateLimitedLog(log)  # lines that a peer can trigger

_TURN = 64  # batches of KV events handled before others get a turn of the loop
_GRACE = 1.0  # seconds that clients get to read how their streams ended
_DRAIN_LOOK = 0.05  # seconds between two looks at the streams that are to end
_LOOK = 1.0  # seconds between two looks at the operator's socket, and at the file with the API keys
_BATCHES = 1_000  # batches of KV events waiting to be read; more wait in their sockets


async def serve(
    config: Config,
    name: str,
    node: str,
    stop: asyncio.Event,
    ready: Callable[[ServiceAddresses], object],
    host: str = hosts.LOOPBACK,
) -> None:
    """Serve until `stop` is set; `ready` is called once every port listens, and again if the operator's has moved.
    Where router.host is every interface, the link to workers and stores, which is told to them by its address, takes
    `host`, this node's own. Raises PortInUse, StartupError or ModelError when it
    can't start."""
    pools = config.pools()
    models = [
        replace(await asyncio.to_thread(load, pool.model), json_whitespace=config.api.json_whitespace) for pool in pools
    ]
    for note in chain.from_iterable(model.notes for model in models):
        log.warning("%s", note)
    router, clock = config.router, MonotonicClock()
    async with contextlib.AsyncExitStack() as cleanup:
        inner = host if hosts.is_wildcard(router.host) else router.host
        others = OtherRouters(config, name, operator_key())
        ports = RouterPorts.of(config, inner, partners=others.targets)
        links = [
            await _link(cleanup, port, Peer("router", name, node, f"{name}.{secrets.token_hex(8)}", os.getpid()))
            for port in (ports.internal, *ports.further)
        ]
        tracer = await _tracer(cleanup, config, links[0].me, clock)
        drivers = [
            RouterDriver(link.me, pool, model, link.sockets, clock, Metrics(), tracer=tracer)
            for pool, model, link in zip(pools, models, links, strict=True)
        ]
        driver, *further = drivers
        if further:
            driver.metrics.beside({each.model.name: each.metrics for each in further}, driver.model.name)
        keys = KeyRing(config.api_keys_path, required=config.api.require_keys, operator_key=operator_key())
        check_keys(config, keys)
        gate, tls = Gatekeeper(keys), server_tls(config.tls)
        answers = MetricsPort(drivers, gate, loopback=hosts.is_loopback(router.host))
        http = MetricsServer(await ports.http.listener(), answers.answer)
        cleanup.push_async_callback(asyncio.to_thread, http.close)
        http_address = f"{hosts.bracketed(router.host)}:{http.port}"
        tokenizing = TokenizerThreads()
        cleanup.callback(tokenizing.close)
        beside = [GenerationService(each, clock, tokenizing, tracer=tracer) for each in further]
        service = GenerationService(driver, clock, tokenizing, tracer=tracer, beside=beside)
        cascades = config.cascades.items()
        service.all += tuple(
            Cascade(name, each, service.of(each.small), service.of(each.large)) for name, each in cascades
        )
        cleanup.push_async_callback(service.close)
        feeds = [DashboardFeed(each, clock, [model.name for model in models]) for each in drivers]
        calls = OperatorCalls(drivers, clock, others, [each.snapshot for each in feeds])
        client_server, operator = ClientServer(service, gate), OperatorServer(service, gate, calls)
        cleanup.push_async_callback(_stop, client_server, operator)
        operator_setting = operator_of_router(router.operator, name) if others.names else router.operator
        operator_address = await operator.start(operator_setting, config.cluster.name, name)
        # Only now: by the operator's address, the other routers know a process that may share these ports.
        grpc_address = await ports.grpc.claim(partial(client_server.start, config.api.host, router.grpc_port, tls))
        door = await ports.api.listener()
        cleanup.callback(door.close)
        api_address = f"{hosts.bracketed(config.api.host)}:{door.getsockname()[1]}"
        batches = BatchStore(folder, config.api.batch_bytes) if (folder := config.batch_folder) else None
        page = partial(asyncio.to_thread, driver.metrics.page)
        routes = HttpApi(service, page, gate, calls, config.api, batches=batches)
        cleanup.push_async_callback(routes.close)
        api = ApiServer(routes.app, router.max_concurrent_rpcs, tls)
        cleanup.push_async_callback(api.stop)
        await api.serve(door)
        for each in drivers:
            cleanup.callback(each.stop)  # before the servers stop: their streams still say why they end
        driver.address = _reachable(http_address, router.host)
        settle()
        names = ", ".join(model.name for model in models)
        log.info("router %s serves %s: gRPC %s, HTTP API %s", driver.me.incarnation, names, grpc_address, api_address)
        log.info("the operator is served at %s", operator_address)
        needed = f"an API key of {config.api_keys_path}" if keys.required else "no API key"
        log.info("clients need %s; they connect %s TLS", needed, "with" if tls else "without")
        internal, *inside = [link.listener.endpoint for link in links]
        addresses = ServiceAddresses(grpc_address, internal, http_address, operator_address, api_address, tuple(inside))
        ready(addresses)
        again = _listen_again(
            driver, operator, operator_setting, lambda target: ready(structs.replace(addresses, operator=target))
        )
        loops = (
            again,
            *(_listen(each, link.listener) for each, link in zip(drivers, links, strict=True)),
            *(_follow(each, link.sockets) for each, link in zip(drivers, links, strict=True)),
            _follow_files(keys, tls),
            *(each.run() for each in feeds),
            routes.run(),
            _watch(drivers, client_server, [link.listener for link in links], clock),
        )
        await _until_stopped(_drained(drivers, stop, api, client_server), *loops)


@dataclass(frozen=True)
class _Link:
    """Where the workers and stores of one model connect."""

    me: Peer
    listener: Listener
    sockets: RouterSockets


async def _link(cleanup: contextlib.AsyncExitStack, port: FixedPort, me: Peer) -> _Link:
    """Listen for the workers and stores of one model."""

    async def listen() -> Listener:
        return Listener(hosts.endpoint(port.host, port.port), me)

    listener = await port.claim(listen)
    cleanup.callback(listener.close)
    sockets = RouterSockets(listener)
    cleanup.push_async_callback(sockets.close)
    return _Link(me, listener, sockets)


async def _tracer(cleanup: contextlib.AsyncExitStack, config: Config, me: Peer, clock: Clock) -> SpanSink | None:
    """What exports the spans of requests; None where tracing is off. Raises StartupError."""
    if not config.tracing.enabled:
        return None
    try:
        from router.tracing.export import start  # takes a third of a second, and few need it
    except ImportError as error:
        raise StartupError(
            f"tracing needs packages that are not installed ({error}): pip install 'baton[otel]'"
        ) from None
    who = {
        "service.name": "baton",
        "service.version": baton.__version__,
        "service.instance.id": me.incarnation,
        "baton.cluster": config.cluster.name,
        "baton.router": me.name,
    }
    tracer = await asyncio.to_thread(start, config.tracing, clock, who)
    cleanup.push_async_callback(tracer.close)
    return tracer


async def _drained(
    drivers: Sequence[RouterDriver], stop: asyncio.Event, api: ApiServer, client_server: ClientServer
) -> None:
    """Wait for `stop`. Then take no more requests, and wait until those that run have ended or time is up.

    Where other routers share the ports, new connections go to them, and those that are open end with an answer."""
    await stop.wait()
    for each in drivers:
        each.stopping = True
    driver = drivers[0]
    patience = driver.config.router.shutdown_timeout_ms / 1_000
    shared = driver.config.cluster.routers > 1
    if shared:
        api.refuse_connections()
        client_server.refuse_connections(patience + _GRACE)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            # Streams end in many places, and this is once in a router's life.
            while any(each.busy for each in drivers) or (  # noqa: ASYNC110
                shared and api.has_connections and any(each.state.unready is None for each in drivers)
            ):
                await asyncio.sleep(_DRAIN_LOOK)


async def _until_stopped(*loops: Coroutine[Any, Any, None]) -> None:
    """Run the loops until one of them ends, or fails: then with its error."""
    tasks = [*map(asyncio.create_task, loops)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(driver: RouterDriver, listener: Listener) -> None:
    """Hand every message from workers and stores to the state. The listener itself yields to other tasks."""
    while True:
        driver.handle(MessageReceived(await listener.receive()))


async def _stop(client_server: ClientServer, operator: OperatorServer) -> None:
    """End both servers in the same time."""
    await asyncio.gather(client_server.stop(_GRACE), operator.stop())


async def _watch(
    drivers: Sequence[RouterDriver], server: ClientServer, listeners: Sequence[Listener], clock: Clock
) -> None:
    """Tell the states the time, and whether this loop was itself paused: then no other process is to blame."""
    beat = drivers[0].config.cluster.heartbeat_ms / 1_000
    pauses = PauseDetector(tolerance=beat)
    while True:
        tick, strangers = Tick(pauses.tick(clock.now())), (server.undecodable, refused())
        for driver, listener in zip(drivers, listeners, strict=True):
            driver.handle(tick)
            driver.metrics.loop_turned()
            driver.publish(listener.malformed + strangers[0], strangers[1])
            strangers = (0, 0)  # are counted with the first model
        server.set_serving(any(driver.unready is None for driver in drivers))
        await asyncio.sleep(beat / 5)


async def _listen_again(
    driver: RouterDriver, operator: OperatorServer, setting: str, moved: Callable[[str], object]
) -> None:
    """Look after the operator's socket: where its file has been removed, listen anew."""
    while True:
        await asyncio.sleep(_LOOK)
        if not operator.lost:
            continue
        try:
            target = await operator.start(setting, driver.config.cluster.name, driver.me.name)
        except BatonError as error:
            log.warning("the operator's socket has been removed, and there can be no other one: %s", error)
            await asyncio.sleep(_LOOK * 30)
        else:
            log.warning("the operator's socket has been removed; the operator is served at %s now", target)
            moved(target)


async def _follow(driver: RouterDriver, sockets: RouterSockets) -> None:
    """Hand every batch of KV events, and every part of a snapshot, to the state."""
    while True:
        for _ in range(_TURN):
            driver.handle(await sockets.pages.get())
        await asyncio.sleep(0)


async def _follow_files(keys: KeyRing, tls: ServerTls | None) -> None:
    """Take keys that are added or removed, and a certificate that is renewed, while the router serves."""
    while True:
        await asyncio.sleep(_LOOK)
        await asyncio.to_thread(keys.refresh)  # the files may lie on a slow disk
        if tls is not None:
            await asyncio.to_thread(tls.refresh)


class RouterSockets:
    """The router's wire: one listener for all messages, one subscription for each holder of pages."""

    def __init__(self, listener: Listener) -> None:
        self.pages: asyncio.Queue[KvEvents | KvSnapshot] = asyncio.Queue(_BATCHES)
        self._listener = listener
        self._askers: dict[str, ReplayClient] = {}
        self._ears: dict[str, list[asyncio.Task[None]]] = {}

    def send(self, incarnation: str, message: Message) -> None:
        self._listener.send(incarnation, message)

    def forget(self, incarnation: str) -> None:
        self._listener.forget(incarnation)

    def subscribe(self, incarnation: str, endpoint: str, replay: str) -> None:
        """Follow one holder. Without its events the map knows less, and nothing else suffers."""
        try:
            subscriber = Subscriber(endpoint)
            self._ears[incarnation] = [asyncio.create_task(self._hear(incarnation, subscriber))]
            asker = self._askers[incarnation] = ReplayClient(replay)
            self._ears[incarnation].append(asyncio.create_task(self._catch_up(incarnation, asker)))
        except Exception as error:  # noqa: BLE001 only baton.wire knows the errors of its sockets
            of_peers.warning("can't follow the KV events of %s at %r and %r: %s", incarnation, endpoint, replay, error)

    def ask(self, incarnation: str) -> None:
        if (asker := self._askers.get(incarnation)) is not None:
            asker.ask()

    def unsubscribe(self, incarnation: str) -> None:
        self._askers.pop(incarnation, None)
        for task in self._ears.pop(incarnation, ()):
            task.cancel()

    async def close(self) -> None:
        tasks = [task for ears in self._ears.values() for task in ears]
        self._ears.clear()
        self._askers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self, incarnation: str, subscriber: Subscriber) -> None:
        """Queue one holder's batches."""
        with contextlib.closing(subscriber):
            while True:
                frames = await subscriber.receive()
                try:
                    batch = decode(*frames)
                except MalformedMessage as error:
                    of_peers.warning("dropped KV events of %s: %s", incarnation, error)
                    continue
                if batch.holder == incarnation:  # an endpoint may have passed to another process
                    await self.pages.put(KvEvents(batch))

    async def _catch_up(self, incarnation: str, asker: ReplayClient) -> None:
        """Queue the snapshots that one holder was asked for."""
        with contextlib.closing(asker):
            while True:
                topic, part = await asker.receive()
                if publisher_of(topic) == incarnation:
                    await self.pages.put(KvSnapshot(incarnation, part))


def _reachable(address: str, host: str) -> str:
    """Where others reach what listens at `address`, if it listens everywhere."""
    return f"{socket.gethostname()}:{address.rpartition(':')[2]}" if hosts.is_wildcard(host) else address
