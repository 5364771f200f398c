"""A router that runs in another process, as the HTTP APIs see it: requests go there over gRPC and come back as outputs.

A request is checked here as the router itself checks it, so that what is wrong with it costs the router nothing. The
router checks it again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import aiohttp
import grpc.aio
import msgspec

from baton.client.connection import typed
from baton.clock import Clock
from baton.errors import BatonError, Unavailable
from baton.futures import looked_at
from baton.messages import FinishReason, PromptTokenLogprob, TokenLogprob
from baton.timeline import Timeline
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.events import Failed, Finished, RequestEnded, Summary, Usage
from router.frontend.dashboard_feed import DASHBOARD, PERIOD, DashboardAsk
from router.frontend.generation import Generation, RequestChecker
from router.frontend.identity import IDENTITY, THIS_USER, caller
from router.frontend.output_stream import Output
from router.frontend.served_model import ServedModel
from router.frontend.tokenizer_threads import TokenizerThreads
from router.tracing.origin import origin, passed_on

T = TypeVar("T")

_MOST = 256  # pieces that wait for the client before no more are read: the router's own bounds then hold
_PAGE_SECONDS = 5.0
_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class RemoteRouter:
    """Starts requests at the router. What `generation.GenerationService` is within the router's own process."""

    def __init__(
        self,
        model: ServedModel,
        clock: Clock,
        tokenizing: TokenizerThreads,
        link: str,
        pages: str,
        *,
        pages_key: str | None = None,
        trace_headers: Sequence[str] | None = None,
    ) -> None:
        """`link`: the router's gRPC target for fronts. `pages`: host:port of its metrics and health, to which
        `pages_key` is shown if it is set. `trace_headers` name the trace that a call belongs to, and are passed on;
        none: the router makes no spans."""
        self.model = model
        self.clock = clock
        self._tokenizing = tokenizing
        self._checker = RequestChecker(model, self.apart)
        self._link, self._pages, self._trace_headers = link, pages, trace_headers
        self._pages_key = pages_key
        self._channel = grpc.aio.insecure_channel(link, _OPTIONS)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._session: aiohttp.ClientSession | None = None
        self.dashboard = RemoteDashboard(self._channel, link)
        self.requests = 0
        """Handed to the router since the start."""
        self._answers = set[RemoteAnswer]()  # that the router has not ended
        self._fingerprints = dict[str, str]()  # by adapter, as the router has told them last

    @property
    def running(self) -> int:
        """Requests that the router has not ended."""
        return len(self._answers)

    async def close(self) -> None:
        """End every call."""
        await self._checker.close()
        await self._channel.close()
        if self._session is not None:
            await self._session.close()

    async def start(
        self, request: pb.GenerateRequest, request_id: str, received: float, deadline: float | None = None
    ) -> list[Generation]:
        """Check a request of this task's caller that came at `received`, and hand it to the router. Raises BatonError;
        what the router itself refuses is the end of the outputs."""
        validated = await self._checker.check(request, request_id, partial(secrets.randbits, 63))
        request.request_id, request.seed = request_id, validated.sampling.seed
        timeout = None if deadline is None else max(0.0, deadline - self.clock.now())
        metadata = [(IDENTITY, msgspec.json.encode(caller.get()).decode())]
        if self._trace_headers is not None:
            metadata += passed_on(origin.get(), received, self._trace_headers)
        call = self._stub.Generate(request, metadata=tuple(metadata), timeout=timeout)
        told = partial(self._fingerprints.__setitem__, self.model.adapter_of(request.model))
        answer = RemoteAnswer(call, validated.n, received, self._link, told)
        self.requests += 1
        self._answers.add(answer)
        answer.when_ended(partial(self._answers.discard, answer))
        return [
            Generation(validated.sample(number), stream, answer.close) for number, stream in enumerate(answer.streams)
        ]

    async def apart(self, size: int, work: Callable[[], T]) -> T:
        """Do work on so many bytes: here if that is quick, else on a thread. Raises Overloaded."""
        return await self._tokenizing.run(size, work, caller.get().tenant)

    async def unready(self) -> str | None:
        """Why no request can be served now; none: one can."""
        try:
            status, text = await self._page("/healthz")
        except BatonError as error:
            return str(error)
        return None if status == 200 else text.decode(errors="replace").strip()

    def fingerprint(self, model: str) -> str:
        return self._fingerprints.get(self.model.adapter_of(model), "")

    async def metrics(self) -> bytes:
        """The router's page of metrics. Raises Unavailable."""
        return (await self._page("/metrics"))[1]

    async def _page(self, path: str) -> tuple[int, bytes]:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._pages_key}"} if self._pages_key else {}
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PAGE_SECONDS), headers=headers)
        try:
            async with self._session.get(f"http://{self._pages}{path}") as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            raise Unavailable(f"the router does not answer at {self._pages}") from None


class RemoteDashboard:
    """The data of the page at /dashboard, which the router makes. Viewers of one front share a snapshot."""

    def __init__(self, channel: grpc.aio.Channel, link: str) -> None:
        self._read = channel.unary_unary(DASHBOARD)
        self._link = link
        self._snapshot: asyncio.Task[bytes] | None = None  # that is being read, or was read last
        self._fresh_until = float("-inf")

    async def read(self, ask: DashboardAsk) -> bytes:
        """Raises BatonError."""
        if ask.part != "snapshot":
            return await self._ask(ask)
        now = asyncio.get_running_loop().time()
        if self._snapshot is None or (self._snapshot.done() and now >= self._fresh_until):
            self._snapshot, self._fresh_until = asyncio.create_task(self._ask(ask)), now + PERIOD / 2
            self._snapshot.add_done_callback(looked_at)
        return await asyncio.shield(self._snapshot)

    async def _ask(self, ask: DashboardAsk) -> bytes:
        identity = msgspec.json.encode(THIS_USER).decode()  # the front has checked that it is an operator
        try:
            return await self._read(msgspec.json.encode(ask), metadata=((IDENTITY, identity),), timeout=_PAGE_SECONDS)
        except grpc.aio.AioRpcError as failure:
            raise typed(failure, self._link) from None


class RemoteStream:
    """One output that comes over gRPC."""

    def __init__(self, read: Callable[[], None]) -> None:
        """`read` is called when a piece has been taken."""
        self.reads = 0
        self.stop_string: str | None = None
        self.pieces = deque[Output | RequestEnded]()
        self.ended = False
        self._taken = read
        self._news = asyncio.Event()

    def put(self, piece: Output | RequestEnded) -> None:
        self.pieces.append(piece)
        self.ended = isinstance(piece, RequestEnded)
        self._news.set()

    async def read(self) -> Output | RequestEnded:
        """The next piece; the end comes last, and again whenever it is asked for."""
        self.reads += 1
        while not self.pieces:
            self._news.clear()
            await self._news.wait()
        first = self.pieces[0]
        if not isinstance(first, RequestEnded):
            self.pieces.popleft()
            self._taken()
        return first

    def abandon(self) -> None:
        """Forget what is unread: the client does not come for it."""
        while len(self.pieces) > 1:
            self.pieces.popleft()


class RemoteAnswer:
    """One call, whose messages belong to several outputs."""

    def __init__(self, call: Any, count: int, received: float, router: str, fingerprint: Callable[[str], None]) -> None:
        """`fingerprint` is called with that of each message."""
        self._call, self._received, self._router, self._fingerprint = call, received, router, fingerprint
        self._room = asyncio.Event()
        self.streams = [RemoteStream(self._room.set) for _ in range(count)]
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(looked_at)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call `call` once the request has ended, however."""
        self._reader.add_done_callback(lambda _: call())

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        if not self._reader.done():
            self._call.cancel()
            self._reader.cancel()

    async def _read(self) -> None:
        error: BatonError = Unavailable("the router ended the stream before its end")
        try:
            async for response in self._call:
                self._take(response)
                while sum(len(stream.pieces) for stream in self.streams) > _MOST:
                    self._room.clear()
                    await self._room.wait()
        except grpc.aio.AioRpcError as failure:
            error = typed(failure, self._router)
        for stream in self.streams:
            if not stream.ended:
                summary = Summary(Timeline(self._received), self._received)
                stream.put(RequestEnded("", Failed(error), summary))

    def _take(self, response: pb.GenerateResponse) -> None:
        self._fingerprint(response.system_fingerprint)
        if response.HasField("finished"):
            finished = response.finished
            stream = self.streams[finished.index]
            stream.stop_string = finished.stop_string if finished.HasField("stop_string") else None
            stream.put(_end_of(finished, self._received))
            return
        delta = response.delta
        piece = Output(delta.text, list(delta.token_ids), [*map(_logprob, delta.logprobs)])
        piece.prompt_logprobs += map(_prompt_logprob, delta.prompt_logprobs)
        self.streams[delta.index].put(piece)


def _logprob(one: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(one.token_id, one.logprob, tuple((other.token_id, other.logprob) for other in one.top))


def _prompt_logprob(one: pb.TokenLogprob) -> PromptTokenLogprob:
    top = tuple((other.token_id, other.logprob) for other in one.top)
    return PromptTokenLogprob(one.token_id, one.logprob, top, one.rank)


def _end_of(finished: pb.Finished, received: float) -> RequestEnded:
    """The end of an output. The router's times count from when this process received the request."""
    timing = finished.timing

    def at(name: str) -> float | None:
        return received + getattr(timing, name) / 1_000 if timing.HasField(name) else None

    line = Timeline(
        received, at("placed"), at("accepted"), at("prefill_sent"), at("prefilled"), at("started"), at("first_token"),
        at("finished"),
    )  # fmt: skip
    usage = Usage(finished.usage.prompt_tokens, finished.usage.cached_tokens, finished.usage.completion_tokens)
    outcome = Finished(_REASONS[finished.finish_reason])
    return RequestEnded("", outcome, Summary(line, at("submitted") or received, usage))
