"""Clients that do not read, or go away in the middle of a write, over real gRPC connections."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from baton.messages import SamplingParams, TokenLogprob
from baton.monotonic_clock import MonotonicClock
from baton.timeline import Timeline
from baton.v1 import generation_pb2, generation_pb2_grpc
from router.events import Cancelled, Finished, RequestEnded, RequestOutcome, Summary, Usage
from router.frontend.detokenizer import TextStream
from router.frontend.generation import GenerationService
from router.frontend.grpc_api.grpc_server import GenerationServicer
from router.frontend.off_loop import TokenizerThreads
from router.frontend.output_stream import MAX_UNREAD, MAX_UNREAD_BYTES, Output, OutputStream, StopVerdict
from router.frontend.served_model import ServedModel
from router.generation_request import GenerationRequest
from router.queueing.admission import ModelLimits
from tests.router.test_router_driver import request
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow

SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4_096))  # that a client takes unread
LIKELY = TokenLogprob(5, -1.0, tuple((token, -2.0) for token in range(20)))


def stream(**limits: int) -> OutputStream:
    return OutputStream("r", TextStream(None, (), (), frozenset()), **limits)


def end(of: OutputStream, outcome: RequestOutcome) -> None:
    of.end(RequestEnded("r", outcome, Summary(Timeline(0.0), 0.0, Usage(3, 0, 9))))


def fill(of: OutputStream, logprobs: Sequence[TokenLogprob] = (LIKELY,), most: int = 100_000) -> int:
    """Put tokens in until they are too many."""
    for count in range(1, most):
        if of.emit([5], logprobs) is StopVerdict.UNREAD:
            return count
    raise AssertionError("no end to it")


def test_unread_output_is_bounded_in_bytes_and_in_tokens() -> None:
    full = stream()
    assert fill(full) < 2_000
    assert fill(stream(), logprobs=()) == MAX_UNREAD + 1
    wordy = stream()
    wordy._put("x" * MAX_UNREAD_BYTES, (), ())  # text that held-back stop strings let go
    assert wordy.emit([5], ()) is StopVerdict.UNREAD
    full.abandon()
    assert full.emit([5], (LIKELY,)) is StopVerdict.GOES_ON


async def test_what_is_read_comes_in_small_pieces_and_counts_no_more() -> None:
    out = stream()
    count = fill(out)
    pieces = list[Output]()
    while sum(len(piece.tokens) for piece in pieces) < count:
        piece = await out.read()
        assert isinstance(piece, Output)
        assert len(piece.tokens) == len(piece.logprobs)
        pieces.append(piece)
    assert max(piece.size for piece in pieces) < 40_000
    assert fill(out) == count
    assert out.reads == len(pieces)


class Relay:
    """Takes every request, and leaves its output to the test."""

    def __init__(self) -> None:
        self.model = ServedModel("small", None, ModelLimits(1_000, 1_000), (), SamplingParams())
        self.streams: list[OutputStream] = []
        self.abandoned: list[OutputStream] = []

    def draw_seed(self) -> int:
        return 1

    def fingerprint(self, adapter: str) -> str:
        return "fp_0"

    def submit(self, request: GenerationRequest, **more: object) -> OutputStream:
        self.streams.append(stream())
        return self.streams[-1]

    def abandon(self, of: OutputStream) -> None:
        self.abandoned.append(of)
        end(of, Cancelled("the client has gone"))


class Front(GenerationServicer):
    """Knows how many of its RPCs go on."""

    serving = 0

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802 gRPC's name
        self.serving += 1
        try:
            await super().Generate(request, context)
        finally:
            self.serving -= 1


@contextlib.asynccontextmanager
async def serving(linger: float) -> AsyncIterator[tuple[Relay, Front, str]]:
    relay: Any = Relay()
    front = Front(GenerationService(relay, MonotonicClock(), TokenizerThreads()), linger)
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(front, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield relay, front, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def ask(channel: grpc.aio.Channel) -> Any:
    return generation_pb2_grpc.GenerationStub(channel).Generate(request())


@pytest.mark.parametrize("outcome", [Cancelled("the client does not read its tokens"), Finished("length")])
async def test_the_rpc_of_a_client_that_does_not_read_is_ended(outcome: RequestOutcome) -> None:
    async with (
        serving(linger=0.1) as (relay, front, address),
        grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel,
    ):
        call = ask(channel)
        await eventually_async(lambda: relay.streams)
        (out,) = relay.streams
        fill(out)  # more than a connection takes unread
        assert front.serving
        end(out, outcome)
        await eventually_async(lambda: not front.serving)
        assert not out._pieces  # its memory is free
        assert not relay.abandoned
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # and should it read after all, it is told
            async for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.CANCELLED


async def test_a_slow_client_is_given_all_after_the_end() -> None:
    async with (
        serving(linger=1.0) as (relay, front, address),
        grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel,
    ):
        call = ask(channel)
        await eventually_async(lambda: relay.streams)
        (out,) = relay.streams
        count = fill(out)
        end(out, Finished("length"))
        tokens = 0
        async for response in call:
            tokens += len(response.delta.token_ids)
            await asyncio.sleep(0.025)  # in all, three times as long as it may read nothing
        assert tokens == count
        await eventually_async(lambda: not front.serving)


class Wire:
    """A connection that can be cut."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._writers += writer, back
        self._tasks += [asyncio.create_task(self._copy(reader, back)), asyncio.create_task(self._copy(there, writer))]

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()

    async def listen(self) -> str:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_a_client_that_goes_during_a_write_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(linger=5.0) as (relay, front, address):
            for ends in (False, True) * 3:
                relay.streams.clear()
                wire = Wire(address)
                async with grpc.aio.insecure_channel(
                    await wire.listen(), options=(*SMALL_WINDOW, ("grpc.use_local_subchannel_pool", 1))
                ) as channel:
                    calls = [ask(channel) for _ in range(8)]
                    await eventually_async(lambda: len(relay.streams) == 8)
                    for out in relay.streams:
                        fill(out)
                        if ends:
                            end(out, Cancelled("the client does not read its tokens"))
                    await eventually_async(
                        lambda: all(out.reads > 1 for out in relay.streams)
                    )  # the first write goes on
                    await wire.cut()
                    await eventually_async(lambda: not front.serving)
                    assert {await call.code() for call in calls} == {grpc.StatusCode.UNAVAILABLE}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]
