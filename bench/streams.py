"""Streams that run while a server is disturbed, and the gaps between their tokens.

A server is whatever makes tokens from token ids: a router over gRPC, or anything that speaks OpenAI's completions with
token ids, over HTTP. One event loop; times are the client's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import aiohttp
import grpc.aio
import numpy as np
from msgspec import Struct

from baton.errors import Unavailable
from baton.process import settle
from baton.v1 import generation_pb2, generation_pb2_grpc

_TIMEOUT = 120.0  # seconds that a request may take


class Server(Protocol):
    """Generates tokens from token ids."""

    def generate(self, prompt: Sequence[int], count: int) -> AsyncGenerator[int, None]:
        """Greedy, past any end of sequence: how many tokens each message brought, as it arrives. Raises Unavailable."""
        ...


class Router:
    """A cluster's gRPC front door."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = generation_pb2_grpc.GenerationStub(channel)

    async def generate(self, prompt: Sequence[int], count: int) -> AsyncGenerator[int, None]:
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt), max_tokens=count, temperature=0, ignore_eos=True
        )
        call = self._stub.Generate(request, timeout=_TIMEOUT)
        try:
            async for response in call:
                if tokens := len(response.delta.token_ids):
                    yield tokens
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the router ended a stream: {error.details()}") from None
        finally:
            call.cancel()


class Completions:
    """A server of OpenAI's API at `url`, such as http://127.0.0.1:8000, whose model has the name `model`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model

    async def generate(self, prompt: Sequence[int], count: int) -> AsyncGenerator[int, None]:
        fields: dict[str, Any] = {
            "model": self._model, "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        async with self._session.post(self._url, json=fields) as response:
            if response.status != 200:
                raise Unavailable(f"{self._url} answers {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                if line.startswith(b"data: {") and (tokens := tokens_in(json.loads(line[6:]))):
                    yield tokens


def tokens_in(message: dict[str, Any]) -> int:
    """How many tokens a message of a completion brings. Raises Unavailable for one that is an error."""
    if "error" in message:
        raise Unavailable(f"the server ended a stream: {message['error']}")
    return sum(len(choice.get("token_ids") or ()) for choice in message.get("choices", ()))


class Prompts:
    """Random tokens: no two prompts share a page."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab = vocab

    def draw(self, length: int) -> list[int]:
        return self._rng.integers(3, self._vocab, length).tolist()


class Gap(Struct, frozen=True, gc=False):
    """Between two tokens of one stream, in seconds; `at` is when the later one came, on `time.perf_counter`."""

    at: float
    seconds: float


@dataclass
class Streams:
    """Closed loops: each sends its next request when the last has ended. Run as a context, from start to cancel."""

    server: Server
    prompts: Prompts
    number: int
    prompt: int  # tokens
    output: int  # tokens
    gaps: list[Gap] = field(default_factory=list[Gap])  # in the order in which the tokens came
    arrived: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # when, and how many tokens

    async def __aenter__(self) -> Streams:
        settle()  # so that no pause of this process's collector is taken for one of the server
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self.number)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _run(self) -> None:
        while True:
            last: float | None = None
            async with aclosing(self.server.generate(self.prompts.draw(self.prompt), self.output)) as messages:
                async for tokens in messages:
                    now = time.perf_counter()
                    self.arrived.append((now, tokens))
                    if last is not None:
                        self.gaps.append(Gap(now, now - last))
                    # Tokens that come in one message have a gap of zero between them.
                    self.gaps.extend(Gap(now, 0.0) for _ in range(tokens - 1))
                    last = now

    def gaps_between(self, start: float, end: float) -> list[float]:
        return [gap.seconds for gap in self.gaps if start <= gap.at < end]

    def tokens_between(self, start: float, end: float) -> int:
        return sum(tokens for at, tokens in self.arrived if start <= at < end)


async def first_token(server: Server, prompt: Sequence[int], output: int = 1) -> float:
    """Send a prompt; the time until its first token, in seconds. Reads it to its end. Raises Unavailable."""
    sent, first = time.perf_counter(), None
    async with aclosing(server.generate(prompt, output)) as messages:
        async for _ in messages:
            first = first or time.perf_counter()
    if first is None:
        raise Unavailable("a request ended without a token")
    return first - sent


async def every(seconds: float, times: int, server: Server, prompts: Prompts, length: int) -> list[float]:
    """Send so many prompts of that length, one each `seconds`, whether or not the one before has its token; the times
    to their first tokens. Returns when the last period is over and all have theirs."""
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[float]] = []
        for number in count():
            await asyncio.sleep(start + number * seconds - time.perf_counter())
            if number == times:
                break
            tasks.append(group.create_task(first_token(server, prompts.draw(length))))
    return [task.result() for task in tasks]
