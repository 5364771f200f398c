"""The bare engine: `Engine.step` in a loop, in a process of its own. It is the reference for a cluster.

    python -m bench.bare MODEL DTYPE THREADS [STEP_TOKENS]

The process speaks the protocol of `bench.peers.adapter`. With STEP_TOKENS it is one of the peers. Without, a job is
streams that begin and end together; its answer has `times`, when each step ended, and `cpu`, the CPU time of one, all
in seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.peers.adapter import PeerProcess, Tokens, serve_answers
from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw
from engine.step.block_table import BlockTable

_PAGE_SIZE, _PAGES, _STEP_TOKENS = 16, 512, 512
_BATCH_PAGES = 1_024  # more than any case of the peers needs
_GREEDY = TokenDraw(temperature=0)


@dataclass(frozen=True)
class Steps:
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
        budget, chunks, batch = max_num_batched_tokens, [], []
        for one in sorted(running, key=lambda each: each.pending > 1):
            share = min(one.pending, budget)
            if share:
                budget -= share
                chunks.append(one.chunk(share))
                batch.append(one)
        for one, chunk, drawn in zip(batch, chunks, engine.step(chunks), strict=True):
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
    sequences: list[_Sequence] = []
    first = 0
    for prompt in prompts:
        needed = -(-(len(prompt) + count) // page_size)
        sequences.append(_Sequence(list(prompt), len(prompt) + count, BlockTable(range(first, first + needed))))
        first += needed
    return sequences


class BareEngine(PeerProcess):
    """The process that runs streams. It ends with this object."""

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        """Raises PeerFailed."""
        command = [sys.executable, "-m", "bench.bare", str(model), dtype, str(threads)]
        super().__init__("the bare engine", command, os.environ)

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> Steps:
        """Raises PeerFailed."""
        answer = self.ask({"prompts": [list(prompt) for prompt in prompts], "count": count})
        return Steps(answer["times"], answer["cpu"])


def _load(model: str, dtype: str, threads: str, step_tokens: str = "") -> Callable[[Tokens, int], dict[str, Any]]:
    pages = _BATCH_PAGES if step_tokens else _PAGES
    engine = Engine.load(Path(model), dtype, "cpu", pages, _PAGE_SIZE, head=True, threads=int(threads))
    if step_tokens:
        return lambda prompts, count: {"tokens": generate_batch(engine, prompts, count, int(step_tokens))}
    return lambda prompts, count: asdict(generate(engine, prompts, count))


if __name__ == "__main__":
    serve_answers(lambda: _load(*sys.argv[1:]))
