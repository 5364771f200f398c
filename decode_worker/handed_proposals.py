"""Proposals that the runner's own draft has made in the step that drew, and handed out beside its tokens.

They are there before the next step is planned. So guessing costs nothing here: it is a part of every step. Pure, but
for what hands them out.
"""

# pyright: strict

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from itertools import takewhile

from baton.messages import AttemptName
from decode_worker.drafter import Draft
from decode_worker.sequence import Sequence
from engine.step.batch import Sampled
from engine.step.outcome import ScheduledBatch


class HandedProposals:
    """The proposals after the last step, for each of its sequences that has drawn."""

    def __init__(self, last: Callable[[], Mapping[int, Items[int]]]) -> None:
        """`last` returns those of the last step, by number of the chunk."""
        self._last = last
        self._guesses: Mapping[AttemptName, Items[int]] = {}

    def drew(self, plan: ScheduledBatch, drawn: Items[Items[Sampled]]) -> None:
        last = self._last()
        self._guesses = {
            name: last.get(number, ()) for number, (name, each) in enumerate(zip(plan, drawn, strict=True)) if each
        }

    def most(self, sequence: Sequence) -> int:
        return len(self._guesses.get(sequence.name, ()))

    def seconds(self, steps: int, sequences: int, context: int) -> float:
        return 0.0

    def catching_up(self, sequence: Sequence) -> float:
        return 0.0

    def guess(self, drafts: Items[Draft], within: float | None) -> float:
        for draft in drafts:
            stops = draft.sequence.stop_token_ids
            guess = self._guesses[draft.sequence.name][: draft.count]
            draft.guess += takewhile(lambda token, stops=stops: token not in stops, guess)
        return 0.0
