"""Several outputs of one prompt: read as one stream of news, or known only when all requests behind them have ended."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from baton.errors import BatonError, RequestCancelled
from baton.futures import looked_at
from baton.timeline import Timeline
from router.events import Cancelled, Failed, RequestEnded, Summary
from router.frontend.output_stream import Output, OutputStream

log = logging.getLogger(__name__)


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
            match news.outcome:
                case Failed(error=error):
                    raise error
                case Cancelled(why=why):
                    raise RequestCancelled(why)
                case _:
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
