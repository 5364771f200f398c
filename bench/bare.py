"""The engine alone: `Engine.step` in a loop, in a process of its own, and nothing else. What a cluster is measured by.

    python -m bench.bare DIRECTORY DTYPE THREADS

That is one stream at a time; `generate_batch` is what other processes run many sequences at once with.

For each line of JSON on stdin, `{"prompt": [ids], "count": n}`, one line on stdout: `gaps`, the `n` − 1 gaps between
the tokens, and `cpu`, the CPU time of one, all in seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from baton.errors import StartupError
from engine.batch import Chunk, Draw
from engine.engine import Engine

_PAGE_SIZE, _PAGES, _STEP_TOKENS = 16, 512, 512
_GREEDY = Draw(temperature=0)


class Stream(Struct, frozen=True):
    """How one stream of tokens went, in seconds."""

    gaps: list[float]
    cpu: float  # of the loop's thread, for one token


def generate(engine: Engine, prompt: Sequence[int], count: int) -> Stream:
    """Generate `count` greedy tokens."""
    pages = range(-(-(len(prompt) + count) // _PAGE_SIZE))
    for start in range(0, len(prompt) - 1, _STEP_TOKENS):
        engine.step([Chunk(prompt[start : min(start + _STEP_TOKENS, len(prompt) - 1)], start, pages)])
    token, times, cpu = prompt[-1], [], time.thread_time()
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        (drawn,) = engine.step([Chunk([token], position, pages, _GREEDY)])
        assert drawn is not None
        token = drawn.token
        times.append(time.perf_counter())
    spent = time.thread_time() - cpu
    return Stream([later - earlier for earlier, later in pairwise(times)], spent / count)


def generate_batch(engine: Engine, prompts: Sequence[Sequence[int]], count: int, step_tokens: int) -> list[list[int]]:
    """Generate `count` greedy tokens for each prompt, all of them submitted now; return those tokens.

    Steps are put together as a decode worker does it: a token for every sequence that has had its first, then, in their
    order, as much of the prompts as makes `step_tokens` tokens in all.
    """
    size = engine.layout.page_size
    sequences: list[_Sequence] = []
    first = 0
    for prompt in prompts:
        needed = -(-(len(prompt) + count) // size)
        sequences.append(_Sequence(list(prompt), len(prompt) + count, range(first, first + needed)))
        first += needed
    running = sequences
    while running:
        budget, chunks, taken = step_tokens, [], []
        for one in sorted(running, key=lambda each: each.pending > 1):
            share = min(one.pending, budget)
            if share:
                budget -= share
                chunks.append(one.chunk(share, size))
                taken.append(one)
        for one, chunk, drawn in zip(taken, chunks, engine.step(chunks), strict=True):
            one.computed = chunk.end
            if drawn is not None:
                one.tokens.append(drawn.token)
        running = [one for one in running if len(one.tokens) < one.length]
    return [one.tokens[-count:] for one in sequences]


@dataclass
class _Sequence:
    """The tokens known of one sequence; it is done when there are `length`."""

    tokens: list[int]
    length: int
    pages: range
    computed: int = 0

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed

    def chunk(self, count: int, page_size: int) -> Chunk:
        end = self.computed + count
        draw = _GREEDY if end == len(self.tokens) else None
        return Chunk(self.tokens[self.computed : end], self.computed, self.pages[: -(-end // page_size)], draw)


def main() -> None:
    directory, dtype, threads = sys.argv[1:]
    engine = Engine.load(Path(directory), dtype, "cpu", _PAGES, _PAGE_SIZE, head=True, threads=int(threads))
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(msgspec.json.encode(generate(engine, asked["prompt"], asked["count"])).decode(), flush=True)


class BareEngine:
    """The other end of that process, which ends with this object."""

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        command = [sys.executable, "-m", "bench.bare", str(model), dtype, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._answer() != "ready":
            raise StartupError("the bare engine did not start; its reason stands above")

    def generate(self, prompt: Sequence[int], count: int) -> Stream:
        assert self._process.stdin is not None
        print(json.dumps({"prompt": list(prompt), "count": count}), file=self._process.stdin, flush=True)
        return msgspec.json.decode(self._answer(), type=Stream)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()  # closes its stdin, which ends it


if __name__ == "__main__":
    main()
