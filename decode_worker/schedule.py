"""What the next step runs: one token for every decoding sequence first, then prompt tails within the token budget."""

from __future__ import annotations

from collections.abc import Iterable

from decode_worker.sequence import Phase, Sequence
from engine.batch import Chunk, Draw
from engine.steps import Plan


def plan_step(sequences: Iterable[Sequence], budget: int) -> Plan:
    """Chunks for the running sequences, at most `budget` tokens in all.

    Iteration-level scheduling (Orca, OSDI'22) with chunked prefill (Sarathi-Serve, OSDI'24): sequences that wait for
    their next token never wait for somebody's prompt. Every sequence given here must hold the pages that its known
    tokens need."""
    running = sorted((s for s in sequences if s.phase is Phase.RUNNING), key=lambda s: s.rank)
    decoding = [s for s in running if s.pending == 1]
    tails = [s for s in running if s.pending > 1]
    plan: Plan = {}
    for sequence in decoding + tails:
        count = min(sequence.pending, budget)
        if count <= 0:
            break
        budget -= count
        plan[sequence.name] = _chunk(sequence, count)
    return plan


def _chunk(sequence: Sequence, count: int) -> Chunk:
    """The next `count` tokens; the last known one is followed by a draw."""
    start, end = sequence.computed, sequence.computed + count
    pages = sequence.pages[: -(-end // sequence.page_size)]
    draw = _draw(sequence) if end == len(sequence.tokens) else None
    return Chunk(sequence.tokens[start:end], start, pages, draw)


def _draw(sequence: Sequence) -> Draw:
    wanted = sequence.sampling
    return Draw(
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        seed=wanted.seed,
        logprobs=wanted.logprobs,
    )
