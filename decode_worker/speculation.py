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
from baton.step_cost_model import pairs
from decode_worker.draft_model import Draft, DraftModel
from decode_worker.proposers import Proposer
from decode_worker.sequence import Proposals, Sequence
from decode_worker.sequence_pages import SequencePages
from engine.step.batch import Chunk, Sampled, TokenDraw
from engine.step.outcome import ScheduledBatch
from engine.step.timing import WorkerStepTimes, sample_of

MOST = 16  # proposals of a sequence and step
_FIRST = (0.5, 0.8)  # probability that a guess is right before anything is known: a proposer's, the draft model's
_WEIGHT = 0.1  # of the newest guess of a sequence
_ALL = 0.005  # and of a worker's, with which new sequences begin
_FORGET = 0.002  # of what is known of the draft model, with each step without it
_HIGHEST = 0.98
_DEPTH = 4  # guesses of the draft model, where costs don't count
_CATCH_UP = 512  # tokens of contexts that the draft model computes before a step, at most
_ROUNDS = 8


@dataclass
class SpeculationStats:
    """Counts since the start."""

    drafts: int = 0  # chunks with proposals
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass
class _Candidate:
    """A sequence that may have proposals."""

    name: AttemptName
    sequence: Sequence
    proposals: Proposals
    draw: TokenDraw
    row: float  # seconds that each proposal adds to the step, and to one of the draft model
    most: int
    count: int = 0

    @property
    def right(self) -> float:
        return min(self.proposals.rights[self.proposals.drafted], _HIGHEST)


class Speculation:
    """Adds proposals to plans, and learns."""

    def __init__(
        self,
        make: Callable[[], Proposer] | None,
        costs: WorkerStepTimes,
        pages: SequencePages,
        page_size: int,
        *,
        drafter: DraftModel | None = None,
        verify_all: bool = False,
    ) -> None:
        """`make`: a proposer for a sequence; none: there is none. `costs`: of steps. `pages`: from which the next one
        is taken early. `drafter`: guesses where the proposer has none. `verify_all`: every guess is verified, whatever
        it costs."""
        self.stats = SpeculationStats()
        self._make, self._costs, self._pages, self._page_size = make, costs, pages, page_size
        self._drafter, self._verify_all = drafter, verify_all
        self._rights = [*_FIRST]
        self._seconds = self._longer = 0.0  # of the step without proposals, and what these add

    def extend(self, plan: ScheduledBatch, find: Callable[[AttemptName], Sequence | None], most_tokens: int) -> float:
        """Add proposals to the chunks of a plan, up to so many tokens in all. Return the seconds that the draft model
        has taken."""
        self._longer = 0.0
        candidates = [
            candidate
            for name, chunk in plan.items()
            if len(chunk.tokens) == 1 and chunk.sample is not None and (sequence := find(name)) is not None
            if (candidate := self._candidate(name, sequence, chunk.sample)) is not None
        ]
        if not candidates:
            return 0.0
        room = most_tokens - sum(len(chunk.tokens) for chunk in plan.values())
        for each, count in zip(candidates, self._counts(plan, candidates), strict=True):
            each.count = min(count, room, self._room(each.sequence, count, len(plan)))
            room -= max(0, each.count)
        seconds = self._draft([each for each in candidates if each.proposals.drafted])
        for each in candidates:
            if each.count > 0 and (guess := each.proposals.guess[: each.count]):
                plan[each.name] = _with_proposals(plan[each.name], each.sequence, guess)
                self._longer += len(plan[each.name].verify) * self._row(each.sequence)
        self._longer += seconds
        return seconds

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
        kind = proposals.drafted
        for each, guess in zip(drawn, proposals.guess, strict=False):
            right = each.token == guess
            proposals.rights[kind] += _WEIGHT * (right - proposals.rights[kind])
            self._rights[kind] += _ALL * (right - self._rights[kind])
            if not right:
                break
        proposals.guess = ()

    def _candidate(self, name: AttemptName, sequence: Sequence, draw: TokenDraw) -> _Candidate | None:
        """Let the sequence's proposer guess, and leave it to the draft model if it has no guess; none: the sequence is
        of a kind that goes without, or nothing can guess."""
        most = min(MOST, sequence.max_tokens - sequence.generated - 1)
        if most <= 0 or sequence.in_parts or (draw.mask is not None and draw.mask.slow):
            return None
        if sequence.proposals is None:
            sequence.proposals = Proposals(self._make() if self._make else None, [*self._rights])
        proposals, row = sequence.proposals, self._row(sequence)
        guess = proposals.proposer.propose(sequence.tokens, most) if proposals.proposer else ()
        proposals.guess = list(takewhile(lambda token: token not in sequence.stop_token_ids, guess))  # no row follows
        proposals.drafted = not proposals.guess and self._drafter is not None
        if self._drafter is not None and proposals.drafted:
            row += self._drafter.costs.cost.row + self._drafter.costs.cost.context * len(sequence.tokens)
            return _Candidate(name, sequence, proposals, draw, row, most)
        return _Candidate(name, sequence, proposals, draw, row, len(proposals.guess)) if proposals.guess else None

    def _draft(self, candidates: Items[_Candidate]) -> float:
        """Have the draft model guess as much as is worth it. Return the seconds that it took."""
        drafts: list[Draft] = []
        for each in candidates:
            if each.count > 0:
                drafts.append(Draft(each.sequence, each.draw, each.count))
            else:  # nothing is learned of it, and it may have become better
                each.proposals.rights[True] += _FORGET * (_FIRST[True] - each.proposals.rights[True])
        if not drafts or self._drafter is None:
            return 0.0
        budget = _CATCH_UP if self._verify_all else self._drafter.costs.tokens_within(self._seconds)
        seconds = self._drafter.guess(drafts, min(_CATCH_UP, budget or _CATCH_UP))
        for draft in drafts:
            assert draft.sequence.proposals is not None
            draft.sequence.proposals.guess = draft.guess
        return seconds

    def _counts(self, plan: ScheduledBatch, candidates: Items[_Candidate]) -> list[int]:
        """How many proposals of each are worth their rows."""
        work, cost = sample_of(list(plan.values()), 0.0), self._costs.cost
        seconds = self._seconds = cost.of(work.tokens, work.pairs, work.rows, work.context)
        if self._verify_all:
            return [min(_DEPTH, each.most) if each.proposals.drafted else each.most for each in candidates]
        if not seconds:
            return [0] * len(candidates)
        step = self._drafter.costs.cost.fixed if self._drafter is not None else 0.0
        counts = [0] * len(candidates)
        rate = work.rows / seconds
        for _ in range(_ROUNDS):
            before = counts
            counts = [min(each.most, _worth(each.right, rate * each.row)) for each in candidates]
            depth = _depth([(each, count) for each, count in zip(candidates, counts, strict=True)], rate, step)
            counts = [
                min(count, depth) if each.proposals.drafted else count
                for each, count in zip(candidates, counts, strict=True)
            ]
            if counts == before:
                break
            pairs = list(zip(candidates, counts, strict=True))
            tokens = work.rows + sum(_expected(each.right, count) for each, count in pairs)
            rate = tokens / (seconds + depth * step + sum(each.row * count for each, count in pairs))
        return [
            count if self._catches_up(each, count, rate) else 0 for each, count in zip(candidates, counts, strict=True)
        ]

    def _catches_up(self, each: _Candidate, count: int, rate: float) -> bool:
        """Whether its guesses are worth the tokens that the draft model must compute first, if it goes on as long as
        it may."""
        if not (count and each.proposals.drafted and self._drafter is not None):
            return True
        if (tokens := self._drafter.pending(each.sequence)) <= _DEPTH:
            return True
        gain = _expected(each.right, count)
        steps = (each.sequence.max_tokens - each.sequence.generated) / (1 + gain)
        return self._drafter.costs.seconds(tokens, pairs(tokens)) < steps * (gain / rate - count * each.row)

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


def _depth(drafts: Items[tuple[_Candidate, int]], rate: float, step: float) -> int:
    """How many steps of the draft model are worth it, each for all that want so many: the last one whose expected
    tokens are more than its seconds would bring elsewhere."""
    drafts = [(each, count) for each, count in drafts if each.proposals.drafted]
    for number in range(1, MOST + 1):
        gains = [each.right**number - rate * each.row for each, count in drafts if count >= number]
        if sum(gains) <= rate * step:
            return number - 1
    return MOST


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
