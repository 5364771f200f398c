"""How many proposals a step verifies, learned from what was drawn and from what steps take.

With e(a, k) = a + a² + … + aᵏ expected tokens from k proposals, of which each is right with probability a, a step has
those k that make

    (rows + Σ e(aᵢ, kᵢ)) / (seconds + Σ kᵢ · rowᵢ)

largest. Its terms fall, so at the largest rate r each sequence has all proposals with aᵏ > r · row (Dinkelbach, 1967).
Where a batch makes steps long, few or none are worth their rows. What was not verified is compared with the draws all
the same: a sequence that begins to repeat itself is seen without a cost.

By the same costs a step saves its sequence `accepted · seconds − Σ kᵢ · rowᵢ`: each accepted token is one that no step
of its own has drawn, and the rows of all proposals have held up all. Pure.
"""

# pyright: strict

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile

from msgspec.structs import replace

from baton.messages import AttemptName
from decode_worker.proposers import Proposer
from decode_worker.sequence import Proposals, Sequence
from decode_worker.sequence_pages import SequencePages
from engine.step.batch import Chunk, Sampled, TokenDraw
from engine.step.outcome import ScheduledBatch
from engine.step.timing import WorkerStepTimes, sample_of

MOST = 16  # proposals of a sequence and step
_FIRST = 0.5  # probability that a guess is right, before anything is known
_WEIGHT = 0.1  # of the newest guess of a sequence
_ALL = 0.005  # and of a worker's, with which new sequences begin
_HIGHEST = 0.98
_ROUNDS = 8


@dataclass
class SpeculationStats:
    """Counts since the start."""

    drafts: int = 0  # chunks with proposals
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Speculation:
    """Adds proposals to plans, and learns."""

    def __init__(
        self,
        make: Callable[[], Proposer],
        costs: WorkerStepTimes,
        pages: SequencePages,
        page_size: int,
        *,
        verify_all: bool = False,
    ) -> None:
        """`make`: a proposer for a sequence. `costs`: of steps. `pages`: from which the next one is taken early.
        `verify_all`: every guess is verified, whatever it costs."""
        self.stats = SpeculationStats()
        self._make, self._costs, self._pages, self._page_size = make, costs, pages, page_size
        self._verify_all = verify_all
        self._right = _FIRST
        self._seconds = self._longer = 0.0  # of the step without proposals, and what these add

    def extend(self, plan: ScheduledBatch, find: Callable[[AttemptName], Sequence | None], most_tokens: int) -> None:
        """Add proposals to the chunks of a plan, up to so many tokens in all."""
        self._longer = 0.0
        guessed: list[tuple[AttemptName, Sequence, Proposals]] = []
        for name, chunk in plan.items():
            if len(chunk.tokens) > 1 or chunk.sample is None or (sequence := find(name)) is None:
                continue
            if (proposals := self._guess(sequence, chunk.sample)) is not None:
                guessed.append((name, sequence, proposals))
        if not guessed:
            return
        room = most_tokens - sum(len(chunk.tokens) for chunk in plan.values())
        for (name, sequence, proposals), count in zip(guessed, self._counts(plan, guessed), strict=True):
            count = min(count, room, self._room(sequence, count, len(plan)))
            if count > 0:
                plan[name] = _with_proposals(plan[name], sequence, proposals.guess[:count])
                room -= count
                self._longer += len(plan[name].verify) * self._row(sequence)

    def learn(self, sequence: Sequence, chunk: Chunk, drawn: Items[Sampled]) -> None:
        """A chunk has run. `drawn`: its tokens, proposals accepted included."""
        if (proposals := sequence.proposals) is None:
            return
        if chunk.verify:
            self.stats.drafts += 1
            self.stats.draft_tokens += len(chunk.verify)
            right = right_proposals(chunk, drawn)
            self.stats.accepted_tokens += right
            proposals.verified += len(chunk.verify)
            proposals.accepted += right
            proposals.saved += right * self._seconds
        proposals.saved -= self._longer
        for each, guess in zip(drawn, proposals.guess, strict=False):
            right = each.token == guess
            proposals.right += _WEIGHT * (right - proposals.right)
            self._right += _ALL * (right - self._right)
            if not right:
                break
        proposals.guess = ()

    def _guess(self, sequence: Sequence, draw: TokenDraw) -> Proposals | None:
        """Let the sequence's proposer guess; none: it has no guess, or is of a kind that goes without."""
        if sequence.in_parts or (draw.mask is not None and draw.mask.slow):
            return None
        if sequence.proposals is None:
            sequence.proposals = Proposals(self._make(), self._right)
        proposals = sequence.proposals
        most = min(MOST, sequence.max_tokens - sequence.generated - 1)
        guess = proposals.proposer.propose(sequence.tokens, most) if most > 0 else ()
        proposals.guess = list(takewhile(lambda token: token not in sequence.stop_token_ids, guess))  # no row follows
        return proposals if proposals.guess else None

    def _counts(self, plan: ScheduledBatch, guessed: Items[tuple[AttemptName, Sequence, Proposals]]) -> list[int]:
        """How many proposals of each are worth their rows."""
        work, cost = sample_of(list(plan.values()), 0.0), self._costs.cost
        seconds = self._seconds = cost.of(work.tokens, work.pairs, work.rows, work.context)
        if self._verify_all:
            return [len(proposals.guess) for _, _, proposals in guessed]
        if not seconds:
            return [0] * len(guessed)
        rights = [min(proposals.right, _HIGHEST) for _, _, proposals in guessed]
        rows = [self._row(sequence) for _, sequence, _ in guessed]
        counts = [0] * len(guessed)
        for _ in range(_ROUNDS):
            tokens = work.rows + sum(map(_expected, rights, counts))
            rate = tokens / (seconds + sum(row * count for row, count in zip(rows, counts, strict=True)))
            before = counts
            counts = [
                min(len(proposals.guess), _worth(right, rate * row))
                for (_, _, proposals), right, row in zip(guessed, rights, rows, strict=True)
            ]
            if counts == before:
                break
        return counts

    def _row(self, sequence: Sequence) -> float:
        """Seconds that one of its proposals adds to a step."""
        return self._costs.cost.row + self._costs.cost.context * len(sequence.tokens)

    def _room(self, sequence: Sequence, count: int, sequences: int) -> int:
        """How many of so many proposals its pages have room for. The next page is taken only if each sequence of the
        step could have one."""
        known = len(sequence.tokens)
        needed = -(-(known + count) // self._page_size)
        room = len(sequence.pages) * self._page_size - known
        if count > room and self._pages.blocks.available > sequences and self._pages.grow(sequence, needed):
            return room if sequence.in_limbo else count
        return min(count, room)


def accepted(chunk: Chunk, drawn: Items[Sampled | None]) -> list[Sampled]:
    """Return the tokens that a chunk has drawn, of all its rows those that count: up to the first that is not the
    proposal of the next row."""
    valid: list[Sampled] = []
    for each, proposal in zip(drawn, (*chunk.proposals, None), strict=True):
        if each is None:
            break
        valid.append(each)
        if each.token != proposal or not each.finite:
            break
    return valid


def right_proposals(chunk: Chunk, drawn: Items[Sampled]) -> int:
    """Return how many of the first tokens are the chunk's proposals."""
    pairs = zip(drawn, chunk.proposals, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].token == pair[1], pairs))


def _with_proposals(chunk: Chunk, sequence: Sequence, guess: Items[int]) -> Chunk:
    """The chunk with proposals; without any if their masks can't be computed in this step."""
    assert chunk.sample is not None
    draws = [chunk.sample] * (len(guess) + 1)
    if sequence.logits_editor is not None:
        edits = sequence.logits_editor.edits_ahead(guess)
        draws[1:] = [replace(draw, edits=each) for draw, each in zip(draws[1:], edits, strict=True)]
    if (mask := chunk.sample.mask) is not None:
        if not (masks := mask.ahead(guess)):
            return chunk
        draws[1:] = [replace(draw, mask=each) for draw, each in zip(draws[1:], masks, strict=True)]
    return replace(chunk, tokens=[*chunk.tokens, *guess], sample=draws[-1], verify=draws[:-1])


def _expected(right: float, count: int) -> float:
    """e(a, k)."""
    return right * (1 - right**count) / (1 - right)


def _worth(right: float, bound: float) -> int:
    """The largest k with aᵏ > bound."""
    if bound <= 0:
        return MOST
    return max(0, math.ceil(math.log(bound) / math.log(right)) - 1) if right > bound else 0
