"""What every RPC passes before its handler, at a real router's gRPC port. What clients without a key may hold is
bounded, and takes nothing from others.
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.errors import BatonError
from baton.v1 import generation_pb2
from router.frontend.grpc_api import grpc_calls, grpc_server
from router.frontend.grpc_api.message_guard import MessageGuard
from tests.router.model import CONTEXT
from tests.router.served import collect, served, settings_for
from tests.router.test_router_driver import Client, cluster, request
from tests.support.eventually import becomes, eventually_async
from tests.support.http2 import PREFACE, Http2Client

pytestmark = pytest.mark.slow

GENERATE = "/baton.v1.Generation/Generate"
GARBAGE = b"\xff" * 50
METHODS = (
    GENERATE,
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
WATCH = "/grpc.health.v1.Health/Watch"
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def raw(channel: grpc.aio.Channel, method: str, message: bytes) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """Send bytes; how that ended."""
    call: Any = channel.stream_stream(method)(timeout=30)
    # The router may answer before it has read everything.
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(message)
        await call.done_writing()
    return await call.code(), await call.details(), dict(await call.trailing_metadata() or ())


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message(tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str) -> None:
    async with served(settings_for(tmp_path)) as router, grpc.aio.insecure_channel(router.addresses.grpc) as channel:
        with caplog.at_level(logging.INFO):
            caplog.clear()
            for _ in range(3):
                code, details, metadata = await raw(channel, method, GARBAGE)
                assert code == grpc.StatusCode.INVALID_ARGUMENT
                assert details == f"50 bytes that are no message of {method}"
                assert metadata[grpc_calls.REASON] == "invalid_request"
        assert not [record for record in caplog.records if "stood still" not in record.getMessage()]  # a busy machine's


async def test_bytes_that_are_no_message_are_counted() -> None:
    async with _small() as (guard, _, channel):
        for _ in range(3):
            await raw(channel, GENERATE, GARBAGE)
        assert guard.undecodable == 3


LONG = "x" * 20_000
ECHOED: list[tuple[Any, grpc.StatusCode, str]] = [
    (request(model=LONG), grpc.StatusCode.NOT_FOUND, "model_mismatch"),
    (request(request_id=LONG), grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
    (request(affinity="é" * 20_000), grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
]


async def test_long_strings_are_cut_where_an_error_repeats_them(tmp_path: Path) -> None:
    async with served(settings_for(tmp_path)) as router, grpc.aio.insecure_channel(router.addresses.grpc) as channel:
        for message, code, reason in ECHOED:
            seen, details, metadata = await raw(channel, GENERATE, message.SerializeToString())
            assert (seen, metadata[grpc_calls.REASON]) == (code, reason)
            assert len(details) < 1_100
            assert "..." in details


# --- sizes ---


@pytest.mark.parametrize("compression", list(grpc.Compression))
async def test_messages_are_bounded_by_the_context(tmp_path: Path, compression: grpc.Compression) -> None:
    async with (
        served(settings_for(tmp_path)) as router,
        grpc.aio.insecure_channel(router.addresses.grpc, compression=compression) as channel,
    ):
        client = Client(router, channel)
        huge = {"text": "x" * 2**20}, {"tokens": [5] * 2**20}, {"stop": ["x" * 2**20]}
        for fields in huge:
            code, details, _ = await client.refused(request(**fields))
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in details
        # As many tokens as the context has are taken, each with as many bytes as an id may have.
        code, details, _ = await client.refused(request(tokens=[2**32 - 1] * CONTEXT))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "larger" not in details


class Generation:
    """Answers with nothing, and knows what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def generate(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        await self.go_on.wait()


class _Health(health_pb2_grpc.HealthServicer):
    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 gRPC's name
        return health_pb2.HealthCheckResponse()  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.asynccontextmanager
async def _small(
    max_rpcs: int = 100, max_bytes: int = 1_000, message_s: float = 30.0
) -> AsyncIterator[tuple[MessageGuard, Generation, grpc.aio.Channel]]:
    """A server with a guard and nothing behind it that could refuse."""

    async def refuse(context: Any, error: BatonError) -> Any:
        await context.abort(*grpc_calls.status_of(error)[:1], str(error))

    generation = Generation()
    guard = MessageGuard(refuse, max_rpcs, max_bytes, {GENERATE: (2,)}, message_s, admit=lambda *_: lambda: None)
    server = grpc.aio.server(interceptors=(guard,))
    handler = grpc.unary_stream_rpc_method_handler(
        generation.generate,
        generation_pb2.GenerateRequest.FromString,
        generation_pb2.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.v1.Generation", {"Generate": handler}),)
    )
    health_pb2_grpc.add_HealthServicer_to_server(_Health(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield guard, generation, channel
    finally:
        generation.go_on.set()
        await server.stop(None)


async def test_only_its_text_may_make_a_message_larger() -> None:
    async with _small() as (_, generation, channel):
        small = generation_pb2.GenerateRequest(stop=["x"], seed=2**60, temperature=0.5).SerializeToString()
        text = generation_pb2.GenerateRequest(text="é" * 50_000).SerializeToString()
        for message in (small + text, text + small):
            assert (await raw(channel, GENERATE, message))[0] == grpc.StatusCode.OK
        assert [len(request.text) for request in generation.requests] == [50_000, 50_000]
        ids = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1] * 2_000))
        for message, says in (
            (ids.SerializeToString(), "2006 bytes beside its text"),
            (ids.SerializeToString() + text, "bytes beside its text"),
            (text + text, "bytes beside its text"),  # the first one counts for nothing
            (text[:-1], "no message"),
            (b"\x08\x01" * 50_000, "no message"),  # as many fields as no client sends
            (b"\x83\x01" * 50_000, "no message"),  # a group
            (b"\xff" * 50_000, "no message"),
        ):
            code, details, _ = await raw(channel, GENERATE, message)
            assert (code, says in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
        assert len(generation.requests) == 2


async def test_more_rpcs_than_allowed_are_refused_but_health_checks_are_not() -> None:
    async with _small(max_rpcs=3) as (guard, generation, channel):
        generation.go_on.clear()
        message = generation_pb2.GenerateRequest(text="x").SerializeToString()
        # An RPC counts from its beginning, also without a message.
        silent: Any = channel.stream_stream(GENERATE)(timeout=30)
        serving = [asyncio.create_task(raw(channel, GENERATE, message)) for _ in range(2)]
        await eventually_async(lambda: guard.rpcs == 3)
        code, details, _ = await raw(channel, GENERATE, message)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "router.max_concurrent_rpcs" in details
        unread: Any = channel.stream_stream(GENERATE)(timeout=30)  # refused though it sends no message
        assert await unread.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        silent.cancel()
        generation.go_on.set()
        assert {code for code, _, _ in await asyncio.gather(*serving)} == {grpc.StatusCode.OK}
        await eventually_async(lambda: guard.rpcs == 0)
        assert (await raw(channel, GENERATE, message))[0] == grpc.StatusCode.OK


class _Gone:
    """The context of an RPC whose client has gone since it sent its message."""

    async def read(self) -> bytes:
        return b""

    async def write(self, message: Any) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")  # pyright: ignore[reportAttributeAccessIssue]


async def test_one_answer_to_a_client_that_has_gone_is_no_failure() -> None:
    """gRPC's own writing of it logs a traceback."""

    async def check(request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse()  # pyright: ignore[reportAttributeAccessIssue]

    async def refuse(context: Any, error: BatonError) -> Any:
        raise AssertionError(error)

    async def handler(details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(check, health_pb2.HealthCheckRequest.FromString)

    guard = MessageGuard(refuse, 1, 1_000, {}, admit=lambda *_: lambda: None)
    details: Any = SimpleNamespace(method="/some.Service/Check", invocation_metadata=())
    guarded = await guard.intercept_service(handler, details)
    with pytest.raises(asyncio.CancelledError):
        await guarded.stream_stream(None, _Gone())


async def test_an_rpc_without_a_message_is_ended() -> None:
    async with _small(max_rpcs=1, message_s=0.05) as (_, generation, channel):
        call: Any = channel.stream_stream(GENERATE)(timeout=30)
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no message came" in await call.details()
        call = channel.stream_stream(GENERATE)(timeout=30)
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        message = generation_pb2.GenerateRequest(text="x").SerializeToString()
        await eventually_async(lambda: _served(channel, message))  # and it no longer counts
        assert generation.requests


async def _served(channel: grpc.aio.Channel, message: bytes) -> bool:
    return (await raw(channel, GENERATE, message))[0] == grpc.StatusCode.OK


async def test_the_setting_bounds_the_routers_rpcs(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path, max_concurrent_rpcs=2), "decode-0") as client:
        running = [client.generation.Generate(request(max_tokens=900, ignore_eos=True)) for _ in range(2)]
        for call in running:
            await call.read()
        code, details, metadata = await client.refused(request())
        assert (code, metadata[grpc_calls.REASON]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")
        assert "router.max_concurrent_rpcs" in details
        assert int(metadata[grpc_calls.RETRY_AFTER]) > 0
        assert await client.serving()
        for call in running:
            call.cancel()


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


async def test_a_watcher_that_reads_nothing_holds_up_nothing(tmp_path: Path) -> None:
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


async def test_a_watcher_that_leaves_does_not_make_the_others_deaf(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path), "decode-0") as client, connections(client, 2) as (one, other):
        await eventually_async(client.serving)
        leaves, stays = watch(one), watch(other)
        assert (await leaves.read()).status == (await stays.read()).status == SERVING
        leaves.cancel()
        await eventually_async(leaves.done)
        assert await served_as_ever(client)
        client.router.kill(next(iter(client.router.cluster.processes.values())))
        assert (await asyncio.wait_for(stays.read(), 60)).status == NOT_SERVING


async def test_watches_have_few_places_and_take_none_from_generation(tmp_path: Path) -> None:
    async with (
        cluster(settings_for(tmp_path, max_concurrent_rpcs=8), "decode-0") as client,
        connections(client, 20) as channels,
    ):
        calls = [watch(channel) for channel in channels for _ in range(16)]
        got = await asyncio.gather(*map(first, calls))
        assert Counter(got) == {"held": 256, "RESOURCE_EXHAUSTED": 64}
        assert await served_as_ever(client)
        calls[number := got.index("held")].cancel()
        await becomes(lambda: first(watch(channels[number // 16])), "held")


async def test_one_connection_has_few_watches(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path), "decode-0") as client, connections(client, 2) as (one, other):
        calls = [watch(one, f"service-{number}") for number in range(40)]
        assert Counter(await asyncio.gather(*map(first, calls))) == {"held": 16, "RESOURCE_EXHAUSTED": 24}
        assert await first(watch(other)) == "held"


async def test_a_long_name_of_a_service_is_refused(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path)) as client, connections(client, 1) as (channel,):
        assert await first(watch(channel, "x" * 5_000)) == "INVALID_ARGUMENT"


async def test_calls_without_a_message_take_no_place_from_generation(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path, max_concurrent_rpcs=8), "decode-0") as client:
        strangers = [Http2Client(client.router.addresses.grpc) for _ in range(3)]
        for stranger in strangers:
            for number in range(300):
                stranger.call("/grpc.health.v1.Health/Check", None, 2 * number + 1)
        assert await served_as_ever(client)
        for stranger in strangers:
            stranger.close()


# --- reflection ---


async def test_reflection_has_few_places_and_takes_none_from_generation(tmp_path: Path) -> None:
    question = reflection_pb2.ServerReflectionRequest(list_services="")
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


async def test_a_conversation_in_which_nothing_is_said_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageGuard.__init__, "__defaults__", (0.2,))  # message_s
    async with cluster(settings_for(tmp_path)) as client:
        call: Any = client.reflection.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await call.read()).list_services_response.service
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED


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
async def test_a_connection_that_does_not_begin_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(grpc_server, "_HANDSHAKE_MS", 500)
    async with cluster(settings_for(tmp_path)) as client:
        host, _, port = client.router.addresses.grpc.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(content)
            connection.setblocking(False)
            await eventually_async(lambda: ended(connection))


async def test_an_idle_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "_IDLE_MS", 500)
    async with cluster(settings_for(tmp_path), "decode-0") as client:
        idle = Http2Client(client.router.addresses.grpc)
        await eventually_async(lambda: not idle.open)
        idle.close()
        assert await served_as_ever(client)  # its channel connects anew


async def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "_SPARE_RPCS", 12)
    async with cluster(settings_for(tmp_path, max_concurrent_rpcs=8), "decode-0") as client:
        assert await served_as_ever(client)
        strangers = [Http2Client(client.router.addresses.grpc) for _ in range(40)]
        await eventually_async(lambda: sum(stranger.open for stranger in strangers) <= 20)
        assert await served_as_ever(client)
        for stranger in strangers:
            stranger.close()
