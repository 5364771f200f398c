"""Measure how a request too long for the model's context disturbs another client's stream.

    .venv/bin/python -m bench.long_input [--quick]

A router and one decode worker serve a model with a context of 131,072 tokens. One token of its vocabulary is 128 spaces
long, so the router accepts texts of up to 4 MiB. One client streams tokens. Another client, in its own process, sends
four requests in sequence. An attack consists of 4 MiB of English, the same compressed, 4 MiB of Japanese, 15 million
token ids, or a valid prompt of 512 KiB, which fits. The figure is the longest gap between two tokens of the stream
during the attack. Its limit is the longest gap in an equally long time before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import grpc
import grpc.aio
from tokenizers import AddedToken, Tokenizer

from baton.errors import BatonError
from baton.v1 import generation_pb2, generation_pb2_grpc
from bench import cluster, models, report
from bench.report import Result

_CONTEXT = 131_072  # tokens
_SIZE = 4 * 2**20  # bytes: the most that is looked at
_IDS = 15 * 2**20
_ENGLISH = "The quick brown fox jumps over the lazy dog. "
_REQUESTS = 4  # of an attack
_QUIET = 4.0  # seconds
_NO_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]

Request = generation_pb2.GenerateRequest
_ATTACKS: dict[str, tuple[Callable[[], Request], grpc.Compression]] = {
    "4 MiB of English": (lambda: Request(text=_text(_ENGLISH, _SIZE)), grpc.Compression.NoCompression),
    "the same, compressed": (lambda: Request(text=_text(_ENGLISH, _SIZE)), grpc.Compression.Gzip),
    "4 MiB of Japanese": (lambda: Request(text=_text("東京タワー", _SIZE)), grpc.Compression.NoCompression),
    "15 million token ids": (
        lambda: Request(token_ids=generation_pb2.TokenIds(ids=[5] * _IDS)),
        grpc.Compression.NoCompression,
    ),
    "512 KiB that fit": (lambda: Request(text=_text(_ENGLISH, 2**19)), grpc.Compression.NoCompression),
}


def _text(words: str, size: int) -> str:
    """So many bytes of it."""
    return words * (size // len(words.encode()))


def attack(address: str, name: str, ready: Event, go: Event) -> None:
    """Send the requests of that attack, and take what comes of them. At a low priority: it has a machine of its own."""
    os.nice(19)
    make, compression = _ATTACKS[name]
    request = make()
    request.max_tokens = 1
    ready.set()
    go.wait(60)
    with grpc.insecure_channel(address, options=_NO_LIMIT) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        for _ in range(_REQUESTS):
            with suppress(grpc.RpcError):
                for _ in stub.Generate(request, timeout=120, compression=compression):
                    pass


async def longest_gaps(address: str, name: str) -> tuple[float, float]:
    """The longest gap of a stream before an attack and during it, seconds."""
    loudest = [0.0, 0.0]
    during, stop = False, False

    async def stream(stub: generation_pb2_grpc.GenerationStub) -> None:
        tokens = generation_pb2.TokenIds(ids=range(5, 60))
        while not stop:
            last = None
            async for _ in stub.Generate(Request(token_ids=tokens, max_tokens=1_000, temperature=0, ignore_eos=True)):
                now = time.perf_counter()
                if last is not None:
                    loudest[during] = max(loudest[during], now - last)
                last = now

    context = multiprocessing.get_context("spawn")
    ready, go = context.Event(), context.Event()
    process = context.Process(target=attack, args=(address, name, ready, go))
    process.start()
    await asyncio.to_thread(ready.wait, 60)
    async with grpc.aio.insecure_channel(address, options=_NO_LIMIT) as channel:
        streaming = asyncio.create_task(stream(generation_pb2_grpc.GenerationStub(channel)))
        await asyncio.sleep(_QUIET)
        go.set()
        during = True
        await asyncio.to_thread(process.join)
        stop = True
        await streaming
    return loudest[0], loudest[1]


def model(folder: Path) -> Path:
    """The tiny model with a long context and a long token."""
    made = shutil.copytree(models.directory("tiny"), folder / "long")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _CONTEXT}))
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(" " * 128, normalized=False)])
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one run")
    asked = parser.parse_args(argv)
    runs = 1 if asked.quick else asked.runs
    report.say(report.machine())
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            made = stack.enter_context(cluster.local(model(folder), 0, 1))
            for name in _ATTACKS:
                pairs = [asyncio.run(longest_gaps(made.address, name)) for _ in range(runs)]
                quiet, during = ([1_000 * one for one in side] for side in zip(*pairs, strict=True))
                limit, value = statistics.median(quiet), statistics.median(during)
                report.emit(Result("long_input", name, value, "ms", limit, value / limit, runs=tuple(during)))
    except BatonError as error:
        report.say(f"long_input: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
