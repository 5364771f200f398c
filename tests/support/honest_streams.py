"""Honest clients beside whatever attacks a cluster, and the size of its processes before and after.

`Streams` run all the time, each request checked token by token against a cluster that nothing disturbs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from baton.v1 import generation_pb2, generation_pb2_grpc
from bench.processes import Memory
from deploy.local import LocalCluster
from tests.support import workload
from tests.support.standstill import NOTED, Gap
from tests.support.undisturbed import Stream, undisturbed

STREAMS = 24
COUNT = 96  # tokens of a request
MEMORY = 96 * 2**20  # bytes that a process may have more than before, for its allocator
DESCRIPTORS = 24  # that it may have more: connections that are just being closed
THREADS = 12  # that it may have more: asyncio's pool has 6 on two cores, tokenizers 3, gRPC's grows under load


@dataclass
class Streams:
    """Honest clients. Each sends its next request when the last has ended, until `stop` is set."""

    address: str
    expected: Mapping[tuple[int, ...], list[int]]
    rng: random.Random
    clients: int = STREAMS
    gaps: list[Gap] = field(default_factory=list[Gap])  # longer than `NOTED`
    first_tokens: list[float] = field(default_factory=list[float])  # seconds
    requests: int = 0
    attempts: int = 0
    stop: bool = False

    async def run(self) -> None:
        """Raises AssertionError at the first wrong token, and AioRpcError when a request fails."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.clients):
                group.create_task(self._client())

    async def _client(self) -> None:
        async with grpc.aio.insecure_channel(
            self.address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        ) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            while not self.stop:
                await self._request(stub, self.rng.choice(list(self.expected)))

    async def _request(self, stub: generation_pb2_grpc.GenerationStub, prompt: tuple[int, ...]) -> None:
        tokens: list[int] = []
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt), max_tokens=COUNT, temperature=0, ignore_eos=True
        )
        last = sent = time.monotonic()
        async for response in stub.Generate(request, timeout=120):
            now = time.monotonic()
            if not tokens and response.delta.token_ids:
                self.first_tokens.append(now - sent)
            elif now - last > NOTED:
                self.gaps.append(Gap(last, now))
            last = now
            tokens += response.delta.token_ids
            if response.HasField("finished"):
                self.attempts += response.finished.work.attempts
        assert tokens == self.expected[prompt], f"wrong tokens for a prompt of {len(prompt)}"
        self.requests += 1


def log_lines(cluster: LocalCluster, *words: str) -> list[str]:
    """Lines of logs and outputs of all processes that have one of the words, with their files."""
    files = [*cluster.config.cluster.logs.iterdir(), *cluster.directory.glob("*.err")]
    return [
        f"{file.name}: {line}"
        for file in files
        if file.is_file()
        for line in file.read_text(errors="replace").splitlines()
        if any(word in line for word in words)
    ]


@dataclass(frozen=True)
class Size:
    """What one process takes."""

    descriptors: int
    threads: int
    anonymous: int  # bytes of memory of its own

    @classmethod
    def of(cls, pid: int) -> Size:
        here = Path(f"/proc/{pid}")
        return cls(len(list((here / "fd").iterdir())), len(list((here / "task").iterdir())), Memory.of(pid).anonymous)


def sizes(cluster: LocalCluster) -> dict[str, Size]:
    return {name: Size.of(pid) for name, pid in sorted(cluster.pids.items())}


def grown(before: Mapping[str, Size], after: Mapping[str, Size]) -> list[str]:
    """Processes that take more than before. Pools of threads are bounded, and a thread of theirs begins with its first
    work."""
    return [
        f"{name}: {size} before, {after[name]} after"
        for name, size in before.items()
        if after[name].descriptors > size.descriptors + DESCRIPTORS
        or after[name].threads > size.threads + THREADS
        or after[name].anonymous > size.anonymous + MEMORY
    ]


def references(path: Path, seed: int, folder: Path) -> dict[tuple[int, ...], list[int]]:
    """Eight prompts, and the tokens of each."""
    prompts = dict.fromkeys(tuple(each) for each in workload.prompts(seed=seed) if 16 < len(each) < 600)
    streams = [Stream(prompt) for prompt in prompts][:8]
    return {stream.prompt: tokens for stream, tokens in undisturbed(path, folder, streams, COUNT).items()}
