"""The bare engine: `Engine.step` in a loop, in a process of its own. It is the reference for a cluster.

    python -m bench.bare DIRECTORY DTYPE THREADS

That is streams that begin and end together; `generate_batch` is what other processes run any others with.

For each line of JSON on stdin, `{"prompts": [[ids]], "count": n}`, one line on stdout: `times`, when each of the `n`
steps ended, and `cpu`, the CPU time of one, all in seconds.
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
from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw
from engine.step.block_table import BlockTable

_PAGE_SIZE, _PAGES, _STEP_TOKENS = 16, 512, 512
_GREEDY = TokenDraw(temperature=0)


class Steps(Struct, frozen=True):
    """How the steps of some streams of tokens went, in seconds."""

    times: list[float]  # when each ended, on `time.perf_counter`, which all processes share
    cpu: float  # of the loop's thread, for one step

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


def generate(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> Steps:
    """Generate `count` greedy tokens for each, in as many steps once all but their last tokens are computed."""
    running = _sequences(prompts, count, _PAGE_SIZE)
    for one in running:
        while one.pending > 1:
            chunk = one.chunk(min(one.pending - 1, _STEP_TOKENS))
            engine.step([chunk])
            one.computed = chunk.end
    times, cpu = [], time.thread_time()
    for _ in range(count):
        for one, drawn in zip(running, engine.step([one.chunk(1) for one in running]), strict=True):
            assert drawn is not None
            one.computed += 1
            one.tokens.append(drawn.token)
        times.append(time.perf_counter())
    return Steps(times, (time.thread_time() - cpu) / count)


def generate_batch(
    engine: Engine, prompts: Sequence[Sequence[int]], count: int, max_num_batched_tokens: int
) -> list[list[int]]:
    """Generate `count` greedy tokens for each prompt, all of them submitted now; return those tokens.

    Steps are put together as a decode worker does it: a token for every sequence that has had its first, then, in their
    order, as much of the prompts as makes `max_num_batched_tokens` tokens in all.
    """
    running = sequences = _sequences(prompts, count, engine.layout.page_size)
    while running:
        budget, chunks, taken = max_num_batched_tokens, [], []
        for one in sorted(running, key=lambda each: each.pending > 1):
            share = min(one.pending, budget)
            if share:
                budget -= share
                chunks.append(one.chunk(share))
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
    pages: BlockTable
    computed: int = 0

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed

    def chunk(self, count: int) -> Chunk:
        end = self.computed + count
        draw = _GREEDY if end == len(self.tokens) else None
        return Chunk(self.tokens[self.computed : end], self.computed, self.pages, draw)


def _sequences(prompts: Sequence[Sequence[int]], count: int, page_size: int) -> list[_Sequence]:
    """Return a sequence for each prompt, with pages for `count` tokens more. They keep their block tables from step to
    step, as a worker's do."""
    made: list[_Sequence] = []
    first = 0
    for prompt in prompts:
        needed = -(-(len(prompt) + count) // page_size)
        made.append(_Sequence(list(prompt), len(prompt) + count, BlockTable(range(first, first + needed))))
        first += needed
    return made


def main() -> None:
    directory, dtype, threads = sys.argv[1:]
    engine = Engine.load(Path(directory), dtype, "cpu", _PAGES, _PAGE_SIZE, head=True, threads=int(threads))
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(msgspec.json.encode(generate(engine, asked["prompts"], asked["count"])).decode(), flush=True)


class BareEngine:
    """The other end of that process, which ends with this object."""

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        command = [sys.executable, "-m", "bench.bare", str(model), dtype, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._answer() != "ready":
            raise StartupError("the bare engine did not start; its reason stands above")

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> Steps:
        assert self._process.stdin is not None
        asked = {"prompts": [list(prompt) for prompt in prompts], "count": count}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return msgspec.json.decode(self._answer(), type=Steps)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()  # closes its stdin, which ends it


if __name__ == "__main__":
    main()
