"""What every RPC passes before its handler, over real gRPC connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import BatonError
from baton.v1 import generation_pb2
from router.frontend.grpc_api import grpc_calls
from router.frontend.grpc_api.message_guard import MessageGuard
from tests.router.model import CONTEXT
from tests.router.served import served, settings_for
from tests.router.test_client_sessions import Client, cluster, request
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow

GENERATE = "/baton.v1.Generation/Generate"
GARBAGE = b"\xff" * 50
METHODS = (
    GENERATE,
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def raw(channel: grpc.aio.Channel, method: str, message: bytes) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """Send bytes; how that ended."""
    call: Any = channel.stream_stream(method)(timeout=30)
    # The router may answer before it has read everything.
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(message)
        await call.done_writing()
    return await call.code(), await call.details(), dict(await call.trailing_metadata() or ())


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message(tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str) -> None:
    async def test() -> None:
        async with (
            served(settings_for(tmp_path)) as router,
            grpc.aio.insecure_channel(router.addresses.grpc) as channel,
        ):
            with caplog.at_level(logging.INFO):
                caplog.clear()
                for _ in range(3):
                    code, details, metadata = await raw(channel, method, GARBAGE)
                    assert code == grpc.StatusCode.INVALID_ARGUMENT
                    assert details == f"50 bytes that are no message of {method}"
                    assert metadata[grpc_calls.REASON] == "invalid_request"
            assert not [
                record for record in caplog.records if "stood still" not in record.getMessage()
            ]  # a busy machine's

    run(test)


def test_bytes_that_are_no_message_are_counted() -> None:
    async def test() -> None:
        async with _small() as (guard, _, channel):
            for _ in range(3):
                await raw(channel, GENERATE, GARBAGE)
            assert guard.undecodable == 3

    run(test)


LONG = "x" * 20_000
ECHOED: list[tuple[Any, grpc.StatusCode, str]] = [
    (request(model=LONG), grpc.StatusCode.NOT_FOUND, "model_mismatch"),
    (request(request_id=LONG), grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
    (request(affinity="é" * 20_000), grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
]


def test_long_strings_are_cut_where_an_error_repeats_them(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            served(settings_for(tmp_path)) as router,
            grpc.aio.insecure_channel(router.addresses.grpc) as channel,
        ):
            for message, code, reason in ECHOED:
                seen, details, metadata = await raw(channel, GENERATE, message.SerializeToString())
                assert (seen, metadata[grpc_calls.REASON]) == (code, reason)
                assert len(details) < 1_100
                assert "..." in details

    run(test)


# --- sizes ---


@pytest.mark.parametrize("compression", list(grpc.Compression))
def test_messages_are_bounded_by_the_context(tmp_path: Path, compression: grpc.Compression) -> None:
    async def test() -> None:
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

    run(test)


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


def test_only_its_text_may_make_a_message_larger() -> None:
    async def test() -> None:
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

    run(test)


def test_more_rpcs_than_allowed_are_refused_but_health_checks_are_not() -> None:
    async def test() -> None:
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

    run(test)


class _Gone:
    """The context of an RPC whose client has gone since it sent its message."""

    async def read(self) -> bytes:
        return b""

    async def write(self, message: Any) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")  # pyright: ignore[reportAttributeAccessIssue]


def test_one_answer_to_a_client_that_has_gone_is_no_failure() -> None:
    """gRPC's own writing of it logs a traceback."""

    async def check(request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse()  # pyright: ignore[reportAttributeAccessIssue]

    async def refuse(context: Any, error: BatonError) -> Any:
        raise AssertionError(error)

    async def handler(details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(check, health_pb2.HealthCheckRequest.FromString)

    async def test() -> None:
        guard = MessageGuard(refuse, 1, 1_000, {}, admit=lambda *_: lambda: None)
        details: Any = SimpleNamespace(method="/some.Service/Check", invocation_metadata=())
        guarded = await guard.intercept_service(handler, details)
        with pytest.raises(asyncio.CancelledError):
            await guarded.stream_stream(None, _Gone())

    run(test)


def test_an_rpc_without_a_message_is_ended() -> None:
    async def test() -> None:
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

    run(test)


async def _served(channel: grpc.aio.Channel, message: bytes) -> bool:
    return (await raw(channel, GENERATE, message))[0] == grpc.StatusCode.OK


def test_the_setting_bounds_the_routers_rpcs(tmp_path: Path) -> None:
    async def test() -> None:
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

    run(test)
