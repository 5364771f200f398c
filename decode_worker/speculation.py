"""Proposals in the steps of a decode worker: which are made, and what is learned of them.

How many a step verifies is decided by `decode_worker.proposal_counts`, from what was drawn and from what steps take.
What was not verified is compared with the draws all the same: a sequence that begins to repeat itself is seen without a
cost. Where a decision would take too large a share of a step, nothing is guessed for that step.

By the same costs a step saves its sequence `accepted · seconds` less what its proposals have made all wait: each
accepted token is one that no step of its own has drawn. Pure.
"""

# pyright: strict

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile

from msgspec.structs import replace

from baton.messages import AttemptName, StepSample
from decode_worker.drafter import Draft, Drafter
from decode_worker.proposal_counts import Guesser, ProposalChooser, ProposalCounts
from decode_worker.proposers import Proposer
from decode_worker.row_curve import RowCurve
from decode_worker.sequence import Proposals, Sequence
from decode_worker.sequence_pages import SequencePages
from engine.step.batch import Chunk, Sampled, TokenDraw
from engine.step.outcome import ScheduledBatch
from engine.step.timing import WorkerStepTimes, sample_of

MOST = 16  # proposals of a sequence and step
_FIRST = (0.5, 0.8)  # probability that a guess is right before anything is known: a proposer's, the drafter's
_WEIGHT = 0.1  # of the newest guess of a sequence
_ALL = 0.005  # and of a worker's, with which new sequences begin
_FORGET = 0.002  # of what is known of the drafter, with each step without it
_HIGHEST = 0.98
_DEPTH = 4  # guesses of a drafter that can make any number, where costs don't count
_LATELY = 0.2  # weight of the newest step
_FAR = 4.0  # times what was expected: so much counts of a step that took longer


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
    most: int
    count: int = 0

    @property
    def guesser(self) -> Guesser:
        right = min(self.proposals.rights[self.proposals.drafted], _HIGHEST)
        return Guesser(right, self.most, self.proposals.drafted)


class Speculation:
    """Adds proposals to plans, and learns."""

    def __init__(
        self,
        make: Callable[[], Proposer] | None,
        costs: WorkerStepTimes,
        pages: SequencePages,
        page_size: int,
        *,
        drafter: Drafter | None = None,
        verify_all: bool = False,
    ) -> None:
        """`make`: a proposer for a sequence; none: there is none. `costs`: of steps. `pages`: from which the next one
        is taken early. `drafter`: guesses where the proposer has none. `verify_all`: every guess is verified, whatever
        it costs."""
        self.stats = SpeculationStats()
        self.guesses = False  # whether any sequence of the last plan has a guess, which a draw is to be compared with
        self._make, self._costs, self._pages, self._page_size = make, costs, pages, page_size
        self._drafter, self._verify_all = drafter, verify_all
        self._ask = drafter.ask if drafter is not None else None
        self._depth = _DEPTH
        if self._ask is not None:
            self._depth = MOST
            self._ask(MOST if verify_all else 0)
        self._next_counts: dict[AttemptName, int] = {}  # of the drafter in the last step, for the next one
        self._rights = [*_FIRST]
        self._curve = RowCurve(costs.cost)
        self._chooser = ProposalChooser(self._curve)
        self._lately = 1.0  # times what the fit, which lags behind, expects: steps without proposals
        self._without = 0.0  # seconds of the step without proposals, by the fit
        self._seconds = self._longer = 0.0  # of the step's rows without proposals, and what these add
        self.step_failed()

    def extend(self, plan: ScheduledBatch, find: Callable[[AttemptName], Sequence | None], most_tokens: int) -> float:
        """Add proposals to the chunks of a plan, up to so many tokens in all. Return the seconds that the drafter has
        taken for it by now."""
        self._longer, self.guesses = 0.0, False
        context = sum(chunk.start + 1 for chunk in plan.values())
        self._without = self._costs.cost.of(rows=len(plan), context=context)
        decides = self._verify_all or self._chooser.is_due(self._without * self._lately)
        if not (decides or self._next_counts):
            return 0.0
        candidates = [
            candidate
            for name, chunk in plan.items()
            if len(chunk.tokens) == 1
            and chunk.sample is not None
            and not chunk.observed
            and (sequence := find(name)) is not None
            if (candidate := self._candidate(name, sequence, chunk.sample)) is not None
        ]
        work = sample_of(list(plan.values()), 0.0)
        counts = self._counts(work, candidates) if decides and candidates else [0] * len(candidates)
        if self._ask is not None and not self._verify_all:
            counts = self._ahead(candidates, counts, self._ask)
        if not candidates:
            return 0.0
        self.guesses = True
        room = most_tokens - work.tokens - (rows := work.rows)
        for each, count in zip(candidates, counts, strict=True):
            each.count = min(count, room, self._room(each.sequence, count, len(plan)))
            room -= max(0, each.count)
        seconds = self._draft([each for each in candidates if each.proposals.drafted])
        for each in candidates:
            if each.count > 0 and (guess := each.proposals.guess[: each.count]):
                plan[each.name] = _with_proposals(plan[each.name], each.sequence, guess)
        more = sum(len(plan[each.name].verify) for each in candidates)
        self._longer = seconds + self._seconds * (self._curve.times(rows + more, rows) - 1)
        return seconds if self._ask is None else 0.0

    def step_failed(self) -> None:
        """Whatever the last step was has drawn nothing."""
        if self._drafter is not None:
            self._drafter.drew({}, ())

    def step_ended(self, plan: ScheduledBatch, step: StepSample, drawn: Items[Items[Sampled]]) -> None:
        """Learn what the step took. `drawn`: the tokens of each chunk, proposals accepted included."""
        if self._drafter is not None:
            self._drafter.drew(plan, drawn)
        if step.tokens or not step.seconds:
            self._curve.interrupt()
            return
        self._curve.observe(len(plan), step.rows, step.seconds)
        if self._without:
            took = step.seconds / self._curve.times(step.rows, len(plan)) / self._without
            self._lately += _LATELY * (min(took, _FAR * self._lately) - self._lately)

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
        """Let the sequence's proposer guess, and leave it to the drafter if it has no guess; none: the sequence is of a
        kind that goes without, or nothing can guess."""
        most = min(MOST, sequence.max_tokens - sequence.generated - 1)
        if sequence.unobserved:  # a row that is observed is no proposal
            most = min(most, sequence.next_observed - len(sequence.tokens))
        if most <= 0 or sequence.in_parts or (draw.mask is not None and draw.mask.slow):
            return None
        if sequence.proposals is None:
            sequence.proposals = Proposals(self._make() if self._make else None, [*self._rights])
        proposals = sequence.proposals
        guess = proposals.proposer.propose(sequence.tokens, most) if proposals.proposer else ()
        proposals.guess = list(takewhile(lambda token: token not in sequence.stop_token_ids, guess))  # no row follows
        proposals.drafted = not proposals.guess and self._drafter is not None
        if proposals.drafted and self._drafter is not None:
            most = min(most, self._drafter.most(sequence))
        else:
            most = len(proposals.guess)
        return _Candidate(name, sequence, proposals, draw, most) if most > 0 else None

    def _draft(self, candidates: Items[_Candidate]) -> float:
        """Have the drafter guess as much as is worth it. Return the seconds that it took."""
        drafts: list[Draft] = []
        for each in candidates:
            if each.count > 0:
                drafts.append(Draft(each.sequence, each.draw, each.count))
            else:  # nothing is learned of it, and it may have become better
                each.proposals.rights[True] += _FORGET * (_FIRST[True] - each.proposals.rights[True])
        if not drafts or self._drafter is None:
            return 0.0
        seconds = self._drafter.guess(drafts, None if self._verify_all else self._seconds)
        for draft in drafts:
            assert draft.sequence.proposals is not None
            draft.sequence.proposals.guess = draft.guess
        return seconds

    def _ahead(self, candidates: Items[_Candidate], counts: Items[int], ask: Callable[[int], None]) -> Items[int]:
        """Have the drafter guess so many for the next step. Return the counts for this one: of what it has guessed, as
        many as were decided on then, and for a sequence about which nothing was, as many as for any other."""
        before, most = self._next_counts, max(self._next_counts.values(), default=0)
        drafted = [(each.name, count) for each, count in zip(candidates, counts, strict=True) if each.proposals.drafted]
        next_most = max((count for _, count in drafted), default=0)
        self._next_counts = dict(drafted) if next_most else {}
        ask(next_most)
        return [
            min(before.get(each.name, most), each.most) if each.proposals.drafted else count
            for each, count in zip(candidates, counts, strict=True)
        ]

    def _counts(self, work: StepSample, candidates: Items[_Candidate]) -> Items[int]:
        """How many proposals of each are worth their rows, in a step with that to do without them."""
        cost = self._costs.cost
        self._seconds = cost.of(rows=work.rows, context=work.context) * self._lately
        if self._verify_all:
            return [min(self._depth, each.most) if each.proposals.drafted else each.most for each in candidates]
        if not self._seconds:
            return [0] * len(candidates)
        prompts = cost.of(work.tokens, work.pairs, work.rows, work.context) - self._seconds / self._lately
        drafted = [len(each.sequence.tokens) for each in candidates if each.proposals.drafted]

        def drafting(steps: int) -> float:
            return self._drafter.seconds(steps, len(drafted), sum(drafted)) if self._drafter is not None else 0.0

        guessers = [each.guesser for each in candidates]
        chosen = self._chooser.choose(guessers, work.rows, self._seconds, prompts, drafting)
        steps = max((count for each, count in zip(guessers, chosen.counts, strict=True) if each.drafted), default=0)
        if steps and chosen.trial and not self._chooser.pay(drafting(steps)):
            return [0 if each.drafted else count for each, count in zip(guessers, chosen.counts, strict=True)]
        return [
            count if self._catches_up(each, count, chosen) else 0
            for each, count in zip(candidates, chosen.counts, strict=True)
        ]

    def _catches_up(self, each: _Candidate, count: int, chosen: ProposalCounts) -> bool:
        """Whether its guesses are worth what the drafter must compute first, if it goes on as long as it may. In a
        trial: whether that may be spent."""
        if not (count and each.proposals.drafted and self._drafter is not None):
            return True
        if not (seconds := self._drafter.catching_up(each.sequence)):
            return True
        if chosen.trial:
            return self._chooser.pay(seconds)
        right = each.guesser.right
        gain = right * (1 - right**count) / (1 - right)
        steps = (each.sequence.max_tokens - each.sequence.generated) / (1 + gain)
        return seconds < steps * (gain / chosen.rate - count * chosen.row)

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
