"""Clients of every front, in a process of their own: many streams at a time, and when each token of them came.

Times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import grpc

from baton.v1 import generation_pb2, generation_pb2_grpc

PROMPT = list(range(10, 43))
_LAST = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_TIMEOUT = 120.0  # seconds that a stream may take


class StreamFailed(Exception):
    """A front refused a request, or did not answer in time."""


@dataclass(frozen=True)
class Stream:
    """One stream: when it was asked for, and when each of its tokens came."""

    began: float
    times: Sequence[float]

    @property
    def first(self) -> float:
        return self.times[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [later - at for at, later in pairwise(self.times)]


@dataclass(frozen=True)
class Order:
    """A round: so many streams at a time, two after each other, each of `count` tokens; or chats, which have one token
    for each turn. `door` is http or grpc."""

    door: str
    address: str
    streams: int = 0
    count: int = 0
    chats: Sequence[Sequence[bytes]] = ()  # bodies of the turns of each stream, in place of these streams


Ask = Callable[[int], Awaitable[Stream]]


class HttpClient(asyncio.Protocol):
    """A connection that reads one completion's events at a time, and takes less time for each than a server does: it
    counts events and parses nothing."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._began = 0.0
        self._times: list[float] = []
        self._head: bytes | None = b""  # of the answer, until its first line is there
        self._tail = b""  # of what came last: an event's end may come in two parts
        self._read: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, address: str) -> HttpClient:
        host, port = address.rsplit(":", 1)
        _, client = await asyncio.get_running_loop().create_connection(lambda: cls(address), host, int(port))
        return client

    async def ask(self, count: int) -> Stream:
        """Read one completion. The first `count` events bring a token each, unless the server has merged some. Raises
        ConnectionError if the server answers otherwise."""
        fields = {"prompt": PROMPT, "max_tokens": count, "ignore_eos": True, "stream": True, "temperature": 0}
        stream = await self.send("/v1/completions", json.dumps(fields).encode())
        return Stream(stream.began, stream.times[:count])

    async def chat(self, body: bytes) -> Stream:
        """Read a chat's answer to its end, which is the one time of the stream. Raises ConnectionError."""
        stream = await self.send("/v1/chat/completions", body)
        return Stream(stream.began, stream.times[-1:])

    async def send(self, path: str, body: bytes) -> Stream:
        """Read the events of one answer. Raises ConnectionError."""
        self._times, self._head, self._tail, self._read = [], b"", b"", asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._address}\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(_TIMEOUT):
            await self._read
        return Stream(self._began, self._times)

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        assert self._read is not None
        if self._head is not None:
            self._head = data = self._head + data
            if b"\r\n" not in data:
                return
            if not data.startswith(b"HTTP/1.1 200"):
                self._read.set_exception(ConnectionError(f"{self._address} answered {data[:200]!r}"))
                return
            self._head = None
        events = (self._tail[-1:] + data).count(b"\n\n")
        self._times += [now] * events
        self._tail = (self._tail + data)[-len(_LAST) :]
        if self._tail == _LAST:
            self._read.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._read is not None and not self._read.done():
            self._read.set_exception(ConnectionError(f"{self._address} has closed the connection"))


async def grpc_stream(stub: Any, count: int) -> Stream:
    """Read one call's responses. Those without text have no counterpart among the events of HTTP."""
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT), max_tokens=count, ignore_eos=True, temperature=0.0
    )
    began, times = time.perf_counter(), list[float]()
    async for response in stub.Generate(request):
        if response.delta.text:
            times.append(time.perf_counter())
    return Stream(began, times)


async def _round(order: Order) -> list[Stream]:
    async with AsyncExitStack() as stack:
        if order.chats:

            async def turns(bodies: Sequence[bytes]) -> list[Stream]:
                client = stack.enter_context(closing(await HttpClient.connect(order.address)))
                return [await client.chat(body) for body in bodies]

            return [stream for all_of_one in await asyncio.gather(*map(turns, order.chats)) for stream in all_of_one]
        clients = await _clients(order, stack)

        async def two(ask: Ask) -> list[Stream]:
            return [await ask(order.count) for _ in range(2)]

        return [stream for pair in await asyncio.gather(*map(two, clients)) for stream in pair]


async def _clients(order: Order, stack: AsyncExitStack) -> list[Ask]:
    """A client for each stream. Over gRPC all share a connection."""
    if order.door == "http":
        connections = [await HttpClient.connect(order.address) for _ in range(order.streams)]
        return [stack.enter_context(closing(connection)).ask for connection in connections]
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(order.address))
    return [partial(grpc_stream, generation_pb2_grpc.GenerationStub(channel))] * order.streams


def _serve(orders: Connection) -> None:
    """Take orders for rounds until one is None."""
    while (order := orders.recv()) is not None:
        orders.send(asyncio.run(_round(order)))


class Client:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that `round` learns of its end

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def round(self, order: Order) -> list[Stream]:
        """Raises StreamFailed; the process has said why."""
        try:
            self._orders.send(order)
            return self._orders.recv()
        except (EOFError, BrokenPipeError) as error:
            raise StreamFailed(f"a stream from {order.address} failed; its reason stands above") from error

    def close(self) -> None:
        """End the process, which may have ended."""
        with suppress(BrokenPipeError):
            self._orders.send(None)
        self._process.join()
