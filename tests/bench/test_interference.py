"""Interference: what is counted, what is judged against what, and that processes stay on their cores."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence

import pytest

from baton.errors import Unavailable
from bench import processes
from bench.cluster import interference
from bench.cluster.interference import COLOCATED, SPLIT, Seen
from bench.streams import Prompts, Streams, tokens_in


class Fake:
    """A server that sends messages of these sizes, and yields to the event loop between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.requests: list[tuple[int, int]] = []

    async def generate(self, prompt: Sequence[int], count: int) -> AsyncGenerator[int, None]:
        self.requests.append((len(prompt), count))
        for size in self._sizes:
            await asyncio.sleep(0)
            yield size


def streams(server: Fake) -> Streams:
    return Streams(server, Prompts(100, seed=1), number=2, prompt=64, output=5)


async def run_for(running: Streams, turns: int) -> None:
    async with running:
        for _ in range(turns):
            await asyncio.sleep(0)


def test_streams_ask_again_and_again_and_gaps_are_within_a_request() -> None:
    running = streams(server := Fake([1, 3, 1]))
    asyncio.run(run_for(running, 100))
    assert len(server.requests) > 4
    assert set(server.requests) == {(64, 5)}
    first_tokens = len(server.requests)
    tokens = sum(count for _, count in running.arrived)
    assert tokens - first_tokens <= len(running.gaps) <= tokens - first_tokens + 2
    # Of a message with three tokens, two.
    assert sum(gap.seconds == 0 for gap in running.gaps) >= 2 * len(running.gaps) // 5


def test_a_stream_that_fails_is_told() -> None:
    class Broken(Fake):
        async def generate(self, prompt: Sequence[int], count: int) -> AsyncGenerator[int, None]:
            await asyncio.sleep(0)
            yield 1
            raise Unavailable("gone")

    async def run() -> None:
        async with streams(Broken([])):
            for _ in range(10):
                await asyncio.sleep(0)

    with pytest.raises(Unavailable, match="gone"):
        asyncio.run(run())


def test_tokens_of_a_completions_message() -> None:
    assert tokens_in({"choices": [{"text": "ab", "token_ids": [4, 5]}]}) == 2
    assert tokens_in({"choices": [{"text": "", "token_ids": None}]}) == 0
    assert tokens_in({"choices": [], "usage": {}}) == 0
    with pytest.raises(Unavailable, match="too long"):
        tokens_in({"error": {"message": "too long"}})


def seen(p99: float, rate: float) -> list[Seen]:
    return [Seen((p99 / 10, p99, p99 * 2), rate, (500.0, 700.0))]


def test_ours_are_judged_by_the_better_setting_of_the_peer() -> None:
    lines = interference.results(
        {COLOCATED: seen(180, 330), SPLIT: seen(30, 280), "vLLM": seen(295, 407), "vLLM, chunks of 512": seen(167, 296)}
    )
    judged = {line.case: (line.ratio, line.ok) for line in lines if line.target is not None}
    assert judged == {
        f"{COLOCATED}: itl p99": (180 / 167, False),
        f"{COLOCATED}: output tokens": (330 / 296, True),
        f"{SPLIT}: itl p99": (30 / 167, True),
        f"{SPLIT}: output tokens": (280 / 296, True),
    }


@pytest.fixture
def sleeper() -> Iterator[int]:
    code = "import threading, sys; threading.Thread(target=sys.stdin.read).start(); print('', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process.pid
    process.communicate()


def test_every_thread_of_a_pinned_process_stays_on_its_cores(sleeper: int) -> None:
    core = min(os.sched_getaffinity(0))
    processes.pin(sleeper, {core})
    assert processes.cores_of(sleeper) == {frozenset({core})}
