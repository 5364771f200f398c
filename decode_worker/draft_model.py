"""Guesses of a draft model: a small model of the same vocabulary, which goes on alone from where sequences are.

Its K and V are this worker's alone and lie in a pool of their own. They are computed from the tokens when a sequence is
first drafted for, and forgotten when others need the room. The longest unused go first, so nothing need tell of a
sequence's end. Pure, but for what runs the model.
"""

# pyright: strict

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from msgspec.structs import replace

from baton.messages import AttemptName, StepSample
from baton.step_cost_model import pairs
from decode_worker.drafter import FAR, LATELY, Draft
from decode_worker.sequence import Sequence
from engine.step.batch import Chunk, Sampled
from engine.step.block_table import BlockTable
from engine.step.outcome import ScheduledBatch
from engine.step.timing import WorkerStepTimes, sample_of

_CATCH_UP = 512  # tokens of contexts that it computes before a step, at most
_FEW = 4  # tokens that it computes of a sequence without asking whether they are worth it
_USUAL = 17  # tokens of a sequence that are computed before a guess, at most: more are a prompt's


@dataclass
class _Context:
    """The pages of one sequence, and which tokens they hold."""

    pages: BlockTable = field(default_factory=BlockTable)
    computed: int = 0  # tokens of the sequence from its start
    ahead: list[int] = field(default_factory=list[int])  # and the guesses behind these


class DraftModel:
    """A draft model, its pages, and what its steps take."""

    ask = None

    def __init__(
        self,
        run: Callable[[Items[Chunk]], tuple[Items[Sampled | None], float]],
        num_pages: int,
        page_size: int,
        max_positions: int,
        calibration: Items[StepSample] = (),
    ) -> None:
        """`run`: a step of the model on `num_pages` pages, which returns what was drawn, and the seconds.
        `calibration`: steps that were run before."""
        self.costs = WorkerStepTimes(calibration)
        self._run, self._page_size, self._max_positions = run, page_size, max_positions
        self._free = list(range(num_pages))
        self._contexts: dict[AttemptName, _Context] = {}  # the longest unused first
        self._lately = [1.0, 1.0]  # times what the fit expects of rows: the first step of a guess, and a further one

    def drew(self, plan: ScheduledBatch, drawn: Items[Items[Sampled]]) -> None:
        """See `Drafter`. It learns what was drawn from the tokens."""

    def most(self, sequence: Sequence) -> int:
        return self._max_positions - len(sequence.tokens)

    def catching_up(self, sequence: Sequence) -> float:
        context = self._contexts.get(sequence.name)
        tokens = len(sequence.tokens) - (0 if context is None else context.computed + len(context.ahead))
        return self.costs.seconds(tokens, pairs(tokens)) if tokens > _FEW else 0.0

    def seconds(self, steps: int, sequences: int, context: int) -> float:
        first, further = self._lately
        return (first + (steps - 1) * further) * self.costs.seconds(rows=sequences, context=context)

    def guess(self, drafts: Items[Draft], within: float | None) -> float:
        """See `Drafter`. A sequence that is to be caught up with for longer is caught up with in part. One that the
        pool has no room for beside the others gets no guess either."""
        budget = min(_CATCH_UP, (within is not None and self.costs.tokens_within(within)) or _CATCH_UP)
        samples: list[StepSample] = []
        context = sum(len(draft.sequence.tokens) for draft in drafts)
        names = {draft.sequence.name for draft in drafts}
        chunks: list[tuple[Draft, Chunk]] = []
        for draft in drafts:
            if (chunk := self._first(draft, budget, names)) is not None:
                budget -= len(chunk.tokens) - 1
                chunks.append((draft, chunk))
        while chunks:
            sampled, seconds = self._run([chunk for _, chunk in chunks])
            samples.append(sample_of([chunk for _, chunk in chunks], seconds))
            both = zip(chunks, sampled, strict=True)
            chunks = [(draft, follow) for (draft, chunk), drawn in both if (follow := self._next(draft, chunk, drawn))]
        if samples:
            self._learn(samples, len(drafts), context)
            self.costs.add_steps(samples)
        return sum(sample.seconds for sample in samples)

    def _learn(self, samples: Items[StepSample], sequences: int, context: int) -> None:
        """The first step computes what was accepted besides, in another way than rows, so it is learned apart."""
        each = self.costs.seconds(rows=sequences, context=context)
        if samples[0].tokens > _USUAL * sequences or not each:
            return
        further = [sample for sample in samples[1:] if sample.rows == sequences]
        for which, steps in enumerate((samples[:1], further)):
            for step in [step for step in steps if step.seconds]:
                most = FAR * self._lately[which]
                self._lately[which] += LATELY * (min(step.seconds / each, most) - self._lately[which])

    def _first(self, draft: Draft, budget: int, names: Collection[AttemptName]) -> Chunk | None:
        """The chunk that brings the model to the end of the sequence, or as near as the budget allows."""
        sequence = draft.sequence
        known = len(sequence.tokens)
        context = self._contexts.pop(sequence.name, None) or _Context()
        self._contexts[sequence.name] = context
        context.computed = min(context.computed, known - 1)
        for token in context.ahead:
            if context.computed == known - 1 or token != sequence.tokens[context.computed]:
                break
            context.computed += 1
        context.ahead.clear()
        tokens = sequence.tokens[context.computed : context.computed + max(1, budget)]
        whole = context.computed + len(tokens) == known
        reach = known + draft.count - 1 if whole else context.computed + len(tokens)
        if not self._grow(context, -(-reach // self._page_size), names):
            return None
        start, context.computed = context.computed, context.computed + len(tokens)
        draw = replace(draft.draw, mask=None, logprobs=None) if whole else None
        return Chunk(tokens, start, context.pages, draw)

    def _next(self, draft: Draft, chunk: Chunk, drawn: Sampled | None) -> Chunk | None:
        """The chunk that follows what was drawn; none: no more is wanted."""
        if drawn is None or not drawn.finite or drawn.token in draft.sequence.stop_token_ids:
            return None
        draft.guess.append(drawn.token)
        if len(draft.guess) == draft.count:
            return None
        self._contexts[draft.sequence.name].ahead.append(drawn.token)
        return Chunk([drawn.token], chunk.end, chunk.pages, chunk.sample)

    def _grow(self, context: _Context, pages: int, names: Collection[AttemptName]) -> bool:
        """Give it so many pages, if need be those of sequences that are not drafted for now."""
        missing = pages - len(context.pages)
        while missing > len(self._free):
            if (unused := next((name for name in self._contexts if name not in names), None)) is None:
                return False
            self._free += self._contexts.pop(unused).pages
        context.pages.extend(self._free.pop() for _ in range(missing))
        return True
