"""Clients without a key at a real router's gRPC port: what they may hold is bounded, and takes nothing from others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.frontend.grpc_api import grpc_server
from router.frontend.grpc_api.message_guard import MessageGuard
from tests.router.served import collect, settings_for
from tests.router.test_client_sessions import Client, cluster, request
from tests.support.eventually import eventually_async
from tests.support.http2 import PREFACE, Http2Client

pytestmark = pytest.mark.slow

WATCH = "/grpc.health.v1.Health/Watch"
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


@contextlib.asynccontextmanager
async def connections(client: Client, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    async with contextlib.AsyncExitStack() as stack:
        address = client.router.addresses.grpc
        yield [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, OWN_CONNECTION)) for _ in range(count)
        ]


async def first(call: Any) -> str:
    """Return what a call of the stranger got: "held", or the name of its status."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "held" if not call.done() else (await call.code()).name


async def served_as_ever(client: Client) -> bool:
    _, tokens, _ = await collect(client.generation.Generate(request()))
    return len(tokens) > 0 and await client.serving()


def watch(channel: grpc.aio.Channel, service: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=service))


# --- health ---


def test_a_watcher_that_reads_nothing_holds_up_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(settings_for(tmp_path), "decode-0") as client, connections(client, 1) as (channel,):
            await eventually_async(client.serving)
            deaf = Http2Client(client.router.addresses.grpc)
            deaf.call(WATCH, b"")
            watched = watch(channel)
            assert (await watched.read()).status == SERVING
            client.router.kill(next(iter(client.router.cluster.processes.values())))
            assert (await asyncio.wait_for(watched.read(), 60)).status == NOT_SERVING
            client.router.start("decode", "decode-0")
            assert (await asyncio.wait_for(watched.read(), 60)).status == SERVING
            assert await served_as_ever(client)
            deaf.close()

    run(test)


def test_a_watcher_that_leaves_does_not_make_the_others_deaf(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(settings_for(tmp_path), "decode-0") as client, connections(client, 2) as (one, other):
            await eventually_async(client.serving)
            leaves, stays = watch(one), watch(other)
            assert (await leaves.read()).status == (await stays.read()).status == SERVING
            leaves.cancel()
            await eventually_async(leaves.done)
            assert await served_as_ever(client)
            client.router.kill(next(iter(client.router.cluster.processes.values())))
            assert (await asyncio.wait_for(stays.read(), 60)).status == NOT_SERVING

    run(test)


def test_watches_have_few_places_and_take_none_from_generation(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            cluster(settings_for(tmp_path, max_concurrent_rpcs=8), "decode-0") as client,
            connections(client, 20) as channels,
        ):
            calls = [watch(channel) for channel in channels for _ in range(16)]
            got = await asyncio.gather(*map(first, calls))
            assert Counter(got) == {"held": 256, "RESOURCE_EXHAUSTED": 64}
            assert await served_as_ever(client)
            calls[number := got.index("held")].cancel()

            async def another() -> bool:
                return await first(watch(channels[number // 16])) == "held"

            await eventually_async(another)

    run(test)


def test_one_connection_has_few_watches(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(settings_for(tmp_path), "decode-0") as client, connections(client, 2) as (one, other):
            calls = [watch(one, f"service-{number}") for number in range(40)]
            assert Counter(await asyncio.gather(*map(first, calls))) == {"held": 16, "RESOURCE_EXHAUSTED": 24}
            assert await first(watch(other)) == "held"

    run(test)


def test_a_long_name_of_a_service_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(settings_for(tmp_path)) as client, connections(client, 1) as (channel,):
            assert await first(watch(channel, "x" * 5_000)) == "INVALID_ARGUMENT"

    run(test)


def test_calls_without_a_message_take_no_place_from_generation(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(settings_for(tmp_path, max_concurrent_rpcs=8), "decode-0") as client:
            strangers = [Http2Client(client.router.addresses.grpc) for _ in range(3)]
            for stranger in strangers:
                for number in range(300):
                    stranger.call("/grpc.health.v1.Health/Check", None, 2 * number + 1)
            assert await served_as_ever(client)
            for stranger in strangers:
                stranger.close()

    run(test)


# --- reflection ---


def test_reflection_has_few_places_and_takes_none_from_generation(tmp_path: Path) -> None:
    question = reflection_pb2.ServerReflectionRequest(list_services="")

    async def test() -> None:
        async with (
            cluster(settings_for(tmp_path, max_concurrent_rpcs=8), "decode-0") as client,
            connections(client, 10) as channels,
        ):
            calls: list[Any] = []
            for channel in channels:
                stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, channel))
                calls += [stub.ServerReflectionInfo() for _ in range(5)]
            for call in calls:
                with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    await call.write(question)
            assert Counter(await asyncio.gather(*map(first, calls))) == {"held": 32, "RESOURCE_EXHAUSTED": 18}
            assert await served_as_ever(client)

    run(test)


def test_a_conversation_in_which_nothing_is_said_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageGuard.__init__, "__defaults__", (0.2,))  # message_s

    async def test() -> None:
        async with cluster(settings_for(tmp_path)) as client:
            call: Any = client.reflection.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await call.read()).list_services_response.service
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    run(test)


# --- connections ---


async def ended(connection: socket.socket) -> bool:
    """Whether the router has closed it."""
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("content", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half a preface", "no settings"])
def test_a_connection_that_does_not_begin_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(grpc_server, "_HANDSHAKE_MS", 500)

    async def test() -> None:
        async with cluster(settings_for(tmp_path)) as client:
            host, _, port = client.router.addresses.grpc.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(content)
                connection.setblocking(False)
                await eventually_async(lambda: ended(connection))

    run(test)


def test_an_idle_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "_IDLE_MS", 500)

    async def test() -> None:
        async with cluster(settings_for(tmp_path), "decode-0") as client:
            idle = Http2Client(client.router.addresses.grpc)
            await eventually_async(lambda: not idle.open)
            idle.close()
            assert await served_as_ever(client)  # its channel connects anew

    run(test)


def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "_SPARE_RPCS", 12)

    async def test() -> None:
        async with cluster(settings_for(tmp_path, max_concurrent_rpcs=8), "decode-0") as client:
            assert await served_as_ever(client)
            strangers = [Http2Client(client.router.addresses.grpc) for _ in range(40)]
            await eventually_async(lambda: sum(stranger.open for stranger in strangers) <= 20)
            assert await served_as_ever(client)
            for stranger in strangers:
                stranger.close()

    run(test)
