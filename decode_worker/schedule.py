"""What the next step runs: one token for every decoding sequence first, then prompt tails within the token budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.messages import AttemptName, Sampling
from decode_worker.sequence import Phase, Sequence


@dataclass(frozen=True)
class Draw:
    """Sample a token after a chunk: parameters, and the index of the token in the request's output."""

    sampling: Sampling
    index: int


@dataclass(frozen=True)
class PlannedChunk:
    """New tokens of one sequence: `start` is the position of the first, `pages` cover everything up to the last."""

    name: AttemptName
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    draw: Draw | None


def plan_step(sequences: Iterable[Sequence], budget: int) -> list[PlannedChunk]:
    """Chunks for the running sequences, at most `budget` tokens in all.

    Iteration-level scheduling (Orca, OSDI'22) with chunked prefill (Sarathi-Serve, OSDI'24): sequences that wait for
    their next token never wait for somebody's prompt. Every sequence given here must hold the pages that its known
    tokens need."""
    running = sorted((s for s in sequences if s.phase is Phase.RUNNING), key=lambda s: s.rank)
    decoding = [s for s in running if s.pending == 1]
    tails = [s for s in running if s.pending > 1]
    chunks: list[PlannedChunk] = []
    for sequence in decoding + tails:
        count = min(sequence.pending, budget)
        if count <= 0:
            break
        budget -= count
        chunks.append(_chunk(sequence, count))
    return chunks


def _chunk(sequence: Sequence, count: int) -> PlannedChunk:
    start = sequence.computed
    end = start + count
    draw = Draw(sequence.sampling, sequence.generated) if end == len(sequence.tokens) else None
    pages = -(-end // sequence.page_size)
    return PlannedChunk(sequence.name, tuple(sequence.tokens[start:end]), start, tuple(sequence.pages[:pages]), draw)
