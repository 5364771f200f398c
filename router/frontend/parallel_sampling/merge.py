"""Several outputs as one stream of news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from router.events import RequestEnded
from router.frontend.output_stream import Output
from router.frontend.parallel_sampling.result_stream import ReadableStream

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
