"""Outputs on their way to their client: tokens in from the state, text and tokens out as the client reads.

Output that a slow client has not read is merged into pieces, so it costs no more than its tokens. Past a limit the
request is cancelled, because memory and decode pages are for clients that read. Pieces are small, because gRPC keeps
the one that it writes for as long as the client is connected and does not read.

Several outputs of one prompt are read as one stream of news, or known only when all requests behind them have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from baton.errors import BatonError
from baton.futures import looked_at
from baton.messages import PromptTokenLogprob, TokenLogprob
from baton.timeline import Timeline
from router.events import Cancelled, Failed, Finished, RequestEnded, Summary
from router.frontend.detokenizer import TextStream

log = logging.getLogger(__name__)

MAX_UNREAD = 8_192  # tokens
MAX_UNREAD_BYTES = 4 * 2**20  # of memory, about: 1,600 tokens where each has 20 alternatives
_PIECE_BYTES = 32 * 2**10  # of memory, about; a piece takes nothing more then
_TOKEN_BYTES, _LOGPROB_BYTES = 40, 120  # of memory: for each token, and for each token or alternative with a logprob


class Output(Struct):
    """New output, in order."""

    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[PromptTokenLogprob] = []  # before all tokens
    size: int = 0  # bytes of memory, about,
    prompt_size: int = 0  # of which so many are those of `prompt_logprobs`


class StopVerdict(Enum):
    """What taking tokens led to."""

    GOES_ON = "goes on"
    STOPPED = "a stop string has ended the output"
    UNREAD = "the client does not read"


class OutputStream:
    """One request's output. The router's loop puts in, its client's task takes out; both on one event loop."""

    def __init__(
        self, name: str, text: TextStream, max_unread: int = MAX_UNREAD, max_unread_bytes: int = MAX_UNREAD_BYTES
    ) -> None:
        self.name = name  # of the request, within the cluster
        self._text = text
        self._max_unread = max_unread
        self._max_unread_bytes = max_unread_bytes
        self._pieces = deque[Output]()
        self._unread = 0  # tokens
        self._unread_bytes = 0
        self._end: RequestEnded | None = None
        self._stopped = False
        self._waiting: asyncio.Future[None] | None = None  # of the client's task
        self.worker = ""  # incarnation of the decode worker that the last tokens came from
        self.token_count = 0  # tokens that count as output
        self.reads = 0  # pieces that the client's task has asked for: it asks again when one is written

    @property
    def unread(self) -> int:
        """Tokens that its client has not taken yet."""
        return self._unread

    @property
    def stop_string(self) -> str | None:
        return self._text.stop

    @property
    def ended(self) -> bool:
        return self._end is not None

    def emit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> StopVerdict:
        """Take tokens, each once and in order. After a stop string no more are taken."""
        if self._stopped:
            return StopVerdict.GOES_ON
        piece = self._text.feed(tokens)
        self.token_count += piece.count
        self._put(piece.text, tokens[: piece.count], logprobs[: piece.count])
        self._stopped = piece.stopped
        self._tell()
        if self._stopped:
            return StopVerdict.STOPPED
        unread = self._unread > self._max_unread or self._unread_bytes > self._max_unread_bytes
        return StopVerdict.UNREAD if unread else StopVerdict.GOES_ON

    def prompt_scored(self, logprobs: Sequence[PromptTokenLogprob]) -> None:
        """Take log-probabilities of prompt tokens, each once and in order. `generation` bounds their number. They
        don't count as unread, because many come at once, before the client's task gets its turn."""
        for one in logprobs:
            piece, size = self._open_piece(), _LOGPROB_BYTES * (1 + len(one.top))
            piece.prompt_logprobs.append(one)
            piece.size += size
            piece.prompt_size += size
        self._tell()

    def _open_piece(self) -> Output:
        if not self._pieces or self._pieces[-1].size >= _PIECE_BYTES:
            self._pieces.append(Output())
        return self._pieces[-1]

    def _put(self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        if not text and not tokens:
            return
        piece = self._open_piece()
        piece.text += text
        piece.tokens += tokens
        size = len(text) + _TOKEN_BYTES * len(tokens)
        if logprobs:
            piece.logprobs += logprobs
            size += sum(_LOGPROB_BYTES * (1 + len(one.top)) for one in logprobs)
        piece.size += size
        self._unread += len(tokens)
        self._unread_bytes += size

    def end(self, end: RequestEnded) -> None:
        """The request has ended. Where the output ended at a stop string, that is what the client is told, though the
        tokens that followed may have led the state elsewhere in the same moment."""
        outcome, summary = end.outcome, end.summary
        if isinstance(outcome, Finished) and not self._stopped:
            rest = self._text.flush()
            self._put(rest.text, (), ())
            self._stopped = rest.stopped
        if self._stopped and not isinstance(outcome, Cancelled):
            outcome, summary = Finished("stop"), _cut(summary, self.token_count)
        self._end = RequestEnded(end.request, outcome, summary)
        self._tell()

    def wake(self) -> None:
        """Have `read` return, with an output of size 0 if nothing is new."""
        if not self._pieces and self._end is None:
            self._pieces.append(Output())
            self._tell()

    async def read(self) -> Output | RequestEnded:
        """The next piece of what is new, as soon as there is something; the end comes last."""
        self.reads += 1
        while True:
            if self._pieces:
                piece = self._pieces.popleft()
                self._unread -= len(piece.tokens)
                self._unread_bytes -= piece.size - piece.prompt_size
                return piece
            if self._end is not None:
                return self._end
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def _tell(self) -> None:
        """Have `read` look again."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def abandon(self) -> None:
        """Forget what is unread: the client does not come for it."""
        self._pieces.clear()
        self._unread = self._unread_bytes = 0


def _cut(summary: Summary, completion: int) -> Summary:
    return replace(summary, usage=replace(summary.usage, completion=completion))


class ReadableStream(Protocol):
    """One output on its way to its client."""

    reads: int

    @property
    def ended(self) -> bool: ...

    @property
    def stop_string(self) -> str | None: ...

    def wake(self) -> None: ...

    async def read(self) -> Output | RequestEnded: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """A whole output."""

    output: Output
    end: RequestEnded
    stop_string: str | None = None


class ResultStream:
    """One of several outputs, all of which come at the end."""

    def __init__(self) -> None:
        self.reads = 0
        self.stop_string: str | None = None
        self._news = deque[Output | RequestEnded]()
        self._settled = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._settled.is_set()

    def settle(self, result: Result) -> None:
        """The output is known."""
        self.stop_string = result.stop_string
        self._news += [result.output, result.end]
        self._settled.set()

    def wake(self) -> None:
        """Do nothing: it is in no stream."""

    async def read(self) -> Output | RequestEnded:
        """The output, then its end, which is said again whenever it is asked for."""
        self.reads += 1
        await self._settled.wait()
        return self._news.popleft() if len(self._news) > 1 else self._news[0]

    def abandon(self) -> None:
        """Forget the output: the client does not come for it."""
        while len(self._news) > 1:
            self._news.popleft()


class ResultSet:
    """Work that ends in several outputs, and their streams."""

    def __init__(
        self,
        count: int,
        received: float,
        work: Coroutine[Any, Any, Sequence[Result]],
        over: Callable[[], None] | None = None,
    ) -> None:
        """`work` returns `count` results. `received`: when the request came, in seconds of the clock. `over` is called
        when the work has ended, in any way."""
        self.streams = [ResultStream() for _ in range(count)]
        self._received = received
        self._task = asyncio.create_task(self._run(work))
        self._task.add_done_callback(looked_at)
        if over is not None:
            self._task.add_done_callback(lambda _: over())

    def close(self) -> None:
        """End the work, unless it has ended."""
        self._task.cancel()

    async def _run(self, work: Coroutine[Any, Any, Sequence[Result]]) -> None:
        try:
            results = await work
        except BatonError as error:
            self._fail(error)
        except Exception:
            log.exception("failed in the router")
            self._fail(BatonError("internal error; the router's log says more"))
        else:
            for stream, result in zip(self.streams, results, strict=True):
                stream.settle(result)

    def _fail(self, error: BatonError) -> None:
        summary = Summary(Timeline(received=self._received), self._received)
        for stream in self.streams:
            stream.settle(Result(Output(), RequestEnded("", Failed(error), summary)))


async def collect(stream: OutputStream) -> Result:
    """Read one request's whole output. Raises the error that it ends in."""
    whole = Output()
    while True:
        news = await stream.read()
        if isinstance(news, RequestEnded):
            news.finish_reason()  # raises the error that it ends in
            return Result(whole, news, stream.stop_string)
        whole.text += news.text
        whole.tokens += news.tokens
        whole.logprobs += news.logprobs
        whole.prompt_logprobs += news.prompt_logprobs


async def best_of(
    streams: Sequence[OutputStream], n: int, logprobs: int | None, abandon: Callable[[OutputStream], None]
) -> list[Result]:
    """Return the `n` outputs with the highest mean log-probability per token, best first. The streams report
    log-probabilities in any case; without `logprobs` the client gets none. Raises the error that one ends in."""
    try:
        results = await asyncio.gather(*map(collect, streams))
    finally:
        for stream in streams:
            if not stream.ended:
                abandon(stream)
    ranked = sorted(results, key=lambda result: _mean(result.output), reverse=True)
    if logprobs is None:
        for result in ranked:
            result.output.logprobs.clear()
    # What is told of the prompt came with the first sample.
    prompt = next((result.output.prompt_logprobs for result in results if result.output.prompt_logprobs), [])
    for result in ranked[:n]:
        result.output.prompt_logprobs = prompt
    return ranked[:n]


def _mean(output: Output) -> float:
    logprobs = output.logprobs
    return sum(one.logprob for one in logprobs) / len(logprobs) if logprobs else -inf


News = Output | RequestEnded


async def merged(streams: Sequence[ReadableStream]) -> AsyncGenerator[tuple[int, News], None]:
    """Yield what comes of each stream, with the stream's number, as it comes. The end of each stream is its last."""
    if len(streams) == 1:
        while True:
            news = await streams[0].read()
            yield 0, news
            if isinstance(news, RequestEnded):
                return
    queue: asyncio.Queue[tuple[int, News]] = asyncio.Queue(1)
    readers = [asyncio.create_task(_read(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            number, news = await queue.get()
            left -= isinstance(news, RequestEnded)
            yield number, news
    finally:
        for reader in readers:
            reader.cancel()


async def _read(number: int, stream: ReadableStream, queue: asyncio.Queue[tuple[int, News]]) -> None:
    while True:
        news = await stream.read()
        await queue.put((number, news))
        if isinstance(news, RequestEnded):
            return
