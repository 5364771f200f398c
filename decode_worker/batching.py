"""What the next step runs: one token for every decoding sequence, then partial prefills within their budget.

Iteration-level scheduling (Orca, OSDI'22) with chunked prefill (Sarathi-Serve, OSDI'24): a sequence that waits for its
next token never waits for another request's prompt. A *partial prefill* is the rest of a prompt that is computed here.
A *short* one takes at most a unit of alignment, as where all before it was cached. A *long* one is a prompt that is
prefilled locally.

No sequence starves:

- Short ones run in order of rank, and have half of the prompts' budget before the long ones get theirs. Without long
  ones no sequence need wait long for its next token. Then short ones have a budget of their own, much smaller, and come
  in parts. One that has waited for `first_step` seconds runs even if it delays other sequences, within the step's
  budget.
- Long ones are run in order of rank plus what they take times `_STRETCH`, both in seconds: a shorter one overtakes,
  but none is overtaken by those that come later than that. They have at least half of the prompts' budget.
- More decoding sequences than a step has tokens or rows take turns, those first whose last turn is the longest ago.

Chunks of long ones are multiples of a page, or of `CHUNK_ALIGNMENT` tokens where pages are larger (`chunk_alignment`).
"""

# pyright: strict

from msgspec import Struct
from msgspec.structs import replace

from decode_worker.sequence import Sequence
from engine.step.batch import CHUNK_ALIGNMENT, Chunk, TokenDraw
from engine.step.outcome import ScheduledBatch

_STRETCH = 4.0  # seconds that a long partial prefill may be overtaken for each second that it takes
_BEING_DRAWN = (0,)  # tokens of a chunk whose only one is not known yet


class BatchBudget(Struct, frozen=True):
    """What a step may hold. `prompts`: tokens of partial prefills, at least two units of alignment; `short_prompts`:
    the same where all are short. `tokens`: those of the whole step, except that partial prefills always get two
    units. `overdue`: a short one that runs since then goes before everything else. `rate`: prompt tokens computed
    per second. `alignment`: chunks of long ones are multiples of so many tokens. `rows`: sequences of the whole step,
    at least four. `whole`: no short one is cut, so that chunks begin at fixed borders. Without partial prefills only
    `tokens` and `rows` matter."""

    tokens: int
    prompts: int = 0
    short_prompts: int = 0
    overdue: float = 0.0
    rate: float = 0.0
    alignment: int = 1
    rows: int = 1 << 30
    whole: bool = False


def chunk_alignment(page_size: int) -> int:
    """Return the tokens of which chunks of long partial prefills are multiples. It is a page, so that pages fill up,
    but no more than a step can have without delaying decoding sequences, however large pages are."""
    return min(page_size, CHUNK_ALIGNMENT)


def build_batch(decoding: list[Sequence], partial_prefills: list[Sequence], budget: BatchBudget) -> ScheduledBatch:
    """Chunks for the running sequences: those with one token to compute, and those with more. Each must hold the pages
    that its known tokens need, or at least a page for its next ones."""
    most = min(budget.tokens, budget.rows - min(2, len(partial_prefills)))  # a short and a long one have room
    if len(decoding) > most:
        decoding = sorted(decoding, key=lambda s: (s.under_way is not None, s.last_step, s.rank))[:most]
    plan = {s.name: _chunk(s, 1) for s in decoding}
    if partial_prefills:
        plan |= {s.name: _chunk(s, count) for s, count in _share_budget(partial_prefills, budget, len(decoding))}
    return plan


def _share_budget(partial_prefills: list[Sequence], budget: BatchBudget, decoding: int) -> list[tuple[Sequence, int]]:
    """How many tokens of which partial prefills, in a step with so many decoding sequences."""
    room, rows = budget.tokens - decoding, budget.rows - decoding
    whole = budget.alignment
    short = sorted((s for s in partial_prefills if s.chunk_limit <= whole), key=lambda s: s.rank)
    long = sorted((s for s in partial_prefills if s.chunk_limit > whole), key=lambda s: _due(s, budget.rate))
    left = budget.prompts if long else budget.short_prompts
    entitled = max(whole, left // 2) if long else left
    overdue = max(entitled, room - (whole if long else 0))
    chosen: list[tuple[Sequence, int]] = []
    waiting: list[Sequence] = []
    spent = 0
    for sequence in sorted(short, key=lambda s: s.running_since > budget.overdue):
        most = (overdue if sequence.running_since <= budget.overdue else entitled) - spent
        if len(chosen) == rows - bool(long):
            waiting.append(sequence)
        elif sequence.chunk_limit <= most or (most > 0 and not long and not budget.whole):
            chosen.append((sequence, min(sequence.chunk_limit, most)))
            spent += chosen[-1][1]
        else:
            waiting.append(sequence)
    left = max(left - spent, whole if long else 0)
    for sequence in long + waiting:
        most = sequence.chunk_limit
        count = min(most if most <= left else left // whole * whole, sequence.computable)
        if count <= 0 or len(chosen) == rows:
            break
        chosen.append((sequence, count))
        left -= count
    return chosen


def _due(sequence: Sequence, rate: float) -> tuple[float, int]:
    """When a long partial prefill is to be done; the same from step to step but for what is learned about the rate."""
    urgency, arrival = sequence.rank
    return (urgency + _STRETCH * sequence.remaining_prefill / rate if rate else urgency, arrival)


def _chunk(sequence: Sequence, count: int) -> Chunk:
    """The next `count` tokens; the last known one is followed by a draw."""
    start, end = sequence.next_start, sequence.next_start + count
    draw = _draw(sequence) if end == sequence.next_known else None
    if sequence.under_way is not None and start == len(sequence.tokens):
        tokens, scoring, follows = _BEING_DRAWN, None, sequence.under_way.number
    else:
        tokens, scoring, follows = sequence.tokens[start:end], sequence.scoring(end), None
    return Chunk(
        tokens, start, sequence.pages, draw, scoring, follows, sequence.adapter, window_pages=sequence.window_pages,
        kv_window=sequence.kv_window, observed=sequence.observed(end),
    )  # fmt: skip


def _draw(sequence: Sequence) -> TokenDraw:
    if (draw := sequence.draw) is None:
        draw = sequence.draw = TokenDraw.of(sequence.sampling)
    if sequence.logits_editor is None and sequence.grammar is None:
        return draw
    return replace(
        draw,
        edits=None if sequence.logits_editor is None else sequence.logits_editor.edits(sequence.tokens),
        mask=None if sequence.grammar is None else sequence.grammar.mask(sequence.tokens),
    )
