"""Measure what the doors cost: HTTP and vLLM's protocol beside gRPC on one cluster, and the streams of one core.

    bench/frontends.py [--rounds N] [--streams N] [--processes N] [--quick]

First, a colocated cluster serves eight streams at a time, by each door in turns, to clients in another process. The
ratios are of medians over the rounds: a door's time to first token and gap between tokens over those of `baton.v1`.

Then each door stands by itself in a process, before an engine that gives every stream a token at a time and computes
nothing. The engine waits for readers that lag behind. The figure is tokens for each second of the process's CPU time,
with 64 streams and a client in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from baton.api_keys import KeyRing
from baton.config import ModelConfig
from baton.monotonic_clock import MonotonicClock
from baton.timeline import Timeline
from baton.v1 import generation_pb2, generation_pb2_grpc
from bench import cluster, models, report
from router.events import Cancelled, Finished, RequestEnded, Summary, Usage
from router.frontend.api.app import HttpApi
from router.frontend.api.server import ApiServer
from router.frontend.detokenizer import TextStream
from router.frontend.generation import GenerationService
from router.frontend.grpc_server import GenerationServicer
from router.frontend.identity import Gatekeeper
from router.frontend.output_stream import OutputStream
from router.frontend.request_parsing import ValidatedRequest
from router.frontend.served_model import ServedModel, load
from router.frontend.tokenizer_threads import TokenizerThreads
from router.frontend.vllm_engine import VllmEngineServicer

TARGET = 1.10
TARGET_TOKENS = 10_000
_DOORS = {"http": "HTTP", "grpc": "gRPC", "vllm": "VllmEngine"}
_PROMPT = list(range(10, 43))
_OUTPUT = 200
_LAG = 1  # tokens that a reader of the fake engine may be behind, so that each is sent by itself


@dataclass(frozen=True)
class Stream:
    """One stream, as its client saw it: seconds."""

    first: float
    gaps: Sequence[float]


Ask = Callable[[], Awaitable[Stream]]


# --- clients ----------------------------------------------------------------------------------------------------------


async def http_stream(session: aiohttp.ClientSession, url: str, count: int) -> Stream:
    """Read one completion's events."""
    body = {"prompt": _PROMPT, "max_tokens": count, "ignore_eos": True, "stream": True, "temperature": 0}
    began, times = time.perf_counter(), list[float]()
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return _stream(began, times)


async def grpc_stream(stub: Any, count: int) -> Stream:
    """Read one call's responses. Those without text have no counterpart among the events of HTTP."""
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=_PROMPT), max_tokens=count, ignore_eos=True, temperature=0.0
    )
    began, times = time.perf_counter(), list[float]()
    async for response in stub.Generate(request):
        if response.delta.text:
            times.append(time.perf_counter())
    return _stream(began, times)


async def vllm_stream(stub: Any, count: int) -> Stream:
    """Read one call of vLLM's engine protocol."""
    params = vllm_engine_pb2.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=_PROMPT)
    request = vllm_engine_pb2.GenerateRequest(tokenized=tokenized, sampling_params=params, stream=True)
    began, times = time.perf_counter(), list[float]()
    async for response in stub.Generate(request):
        if response.HasField("chunk"):
            times.append(time.perf_counter())
    return _stream(began, times)


def _stream(began: float, times: Sequence[float]) -> Stream:
    return Stream(times[0] - began, [later - at for at, later in pairwise(times)])


async def _round(door: str, addresses: tuple[str, str], streams: int, count: int) -> list[Stream]:
    """So many streams at a time, two after each other."""
    api, rpc = addresses

    async def several(ask: Ask) -> list[Stream]:
        async def two() -> list[Stream]:
            return [await ask() for _ in range(2)]

        return [stream for pair in await asyncio.gather(*(two() for _ in range(streams))) for stream in pair]

    if door == "http":
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await several(lambda: http_stream(session, f"http://{api}", count))
    async with grpc.aio.insecure_channel(rpc) as channel:
        if door == "vllm":
            engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            return await several(lambda: vllm_stream(engine, count))
        stub = generation_pb2_grpc.GenerationStub(channel)
        return await several(lambda: grpc_stream(stub, count))


def _client(orders: Connection) -> None:
    """Serve orders for rounds in a process of its own, until one is None."""
    while (order := orders.recv()) is not None:
        orders.send(asyncio.run(_round(*order)))


class Client:
    """The process of clients."""

    def __init__(self) -> None:
        self._orders, theirs = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_client, args=(theirs,), daemon=True)
        self._process.start()

    def round(self, door: str, addresses: tuple[str, str], streams: int, count: int) -> list[Stream]:
        self._orders.send((door, addresses, streams, count))
        return self._orders.recv()

    def close(self) -> None:
        self._orders.send(None)
        self._process.join()


# --- a cluster --------------------------------------------------------------------------------------------------------


def against_grpc(client: Client, model: Path, rounds: int, streams: int, count: int, processes: int) -> None:
    """The doors in turns on one cluster, whose HTTP APIs have so many processes of their own."""
    firsts: dict[str, list[float]] = {door: [] for door in _DOORS}
    gaps: dict[str, list[float]] = {door: [] for door in _DOORS}
    with cluster.local(model, 0, 1, {"decode.kv_cache_bytes": "64MiB", "api.processes": processes}) as running:
        assert running.addresses is not None
        addresses = (running.addresses.api, running.addresses.grpc)
        for number in range(rounds + 1):
            for door in _DOORS:
                found = client.round(door, addresses, streams, count)
                if number:  # the first round warms up
                    firsts[door].append(statistics.median(stream.first for stream in found))
                    gaps[door].append(statistics.median(gap for stream in found for gap in stream.gaps))
    for door, (case, values) in product(("http", "vllm"), (("TTFT", firsts), ("ITL", gaps))):
        ratios = [taken / plain for taken, plain in zip(values[door], values["grpc"], strict=True)]
        result = report.Result(
            "frontends", f"{_DOORS[door]} {case}, {streams} streams", statistics.median(values[door]) * 1e3, "ms",
            limit=statistics.median(values["grpc"]) * 1e3, ratio=statistics.median(ratios), runs=tuple(ratios),
        )  # fmt: skip
        report.emit(report.judged(result, TARGET, "low"))


# --- a front by itself ------------------------------------------------------------------------------------------------


class FakeDriver:
    """Takes every request, and gives each stream a token in every turn of the loop that its readers follow."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.unready = None
        self.tokens = 0
        self._open: dict[OutputStream, int] = {}
        assert model.tokenizer is not None
        text_of = model.tokenizer.text_of
        self._words = [token for token in range(model.limits.vocab_size) if text_of(token).strip().isalpha()]

    def draw_seed(self) -> int:
        return 1

    def submit(
        self,
        validated: ValidatedRequest,
        received: float,
        deadline: float | None,
        tenant: str = "",
        leader: OutputStream | None = None,
    ) -> OutputStream:
        text = TextStream(self.model.tokenizer, validated.prompt, (), frozenset())
        stream = OutputStream("r", text)
        self._open[stream] = validated.max_tokens or 1
        return stream

    def abandon(self, stream: OutputStream) -> None:
        self._open.pop(stream, None)
        stream.end(RequestEnded("r", Cancelled("the client has gone"), _summary(0)))

    async def run(self) -> None:
        """The engine."""
        while True:
            for stream, left in list(self._open.items()):
                if stream.unread >= _LAG:
                    continue
                stream.emit((self._words[left % len(self._words)],), ())
                self.tokens += 1
                self._open[stream] = left - 1
                if left == 1:
                    del self._open[stream]
                    stream.end(RequestEnded("r", Finished("length"), _summary(stream.taken)))
            await asyncio.sleep(0 if self._open else 0.001)


def _summary(completion: int) -> Summary:
    now = time.monotonic()
    line = Timeline(received=now, first_token=now, ended=now)
    return Summary(line, now, Usage(prompt=len(_PROMPT), completion=completion))


def _front(door: str, model: Any, orders: Connection) -> None:
    asyncio.run(_serve_front(door, model, orders))


async def _serve_front(door: str, model_config: Any, orders: Connection) -> None:
    driver: Any = FakeDriver(load(model_config))
    service = GenerationService(driver, MonotonicClock(), TokenizerThreads())
    engine = asyncio.create_task(driver.run())

    async def page() -> bytes:
        return b""

    if door == "http":
        address = await ApiServer(HttpApi(service, page, Gatekeeper(KeyRing(None))), 4_096).start("127.0.0.1", 0)
    else:
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(service), server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(service), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
    orders.send(address)
    while await asyncio.to_thread(orders.recv) is not None:
        orders.send((driver.tokens, time.process_time()))
    engine.cancel()


def alone(client: Client, door: str, model: Path, rounds: int, streams: int, count: int) -> None:
    """Tokens for each CPU second of a front before the fake engine."""
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=_front, args=(door, ModelConfig(path=str(model)), theirs), daemon=True)
    process.start()
    address = orders.recv()
    rates: list[float] = []
    for number in range(rounds + 1):
        orders.send("now")
        tokens, used = orders.recv()
        found = client.round(door, (address, address), streams, count)
        assert all(len(stream.gaps) >= count - 1 for stream in found), "tokens came together"
        orders.send("now")
        now, later = orders.recv()
        if number:
            rates.append((now - tokens) / (later - used))
    orders.send(None)
    process.terminate()
    process.join()
    rate = statistics.median(rates)
    result = report.Result(
        "frontends", f"{door} alone, {streams} streams", rate, "tokens/CPU-s", limit=TARGET_TOKENS,
        ratio=rate / TARGET_TOKENS, runs=tuple(rates),
    )  # fmt: skip
    report.emit(report.judged(result, 1.0, "high"))


def main() -> int:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--model", default="100m", help="tiny, 100m or a directory")
    parser.add_argument("--processes", type=int, default=0, help="api.processes of the cluster")
    parser.add_argument("--quick", action="store_true", help="three rounds of short streams")
    given = parser.parse_args()
    rounds, count = (3, 50) if given.quick else (given.rounds, _OUTPUT)
    client = Client()
    try:
        against_grpc(client, models.directory(given.model), rounds, given.streams, count, given.processes)
        for door in _DOORS:
            alone(client, door, models.directory("tiny"), rounds, 64, count)
    finally:
        client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
