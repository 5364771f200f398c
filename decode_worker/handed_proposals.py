"""Proposals that the runner's own draft makes in the step that draws, and hands out beside its tokens.

They are there before the next step is planned. So how many there shall be is decided with the step before
(`Drafter.ask`). Pure, but for what hands them out.
"""

# pyright: strict

from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import takewhile
from typing import Protocol

from baton.messages import AttemptName
from decode_worker.drafter import FAR, LATELY, Draft
from decode_worker.sequence import Sequence
from engine.step.batch import Sampled
from engine.step.outcome import ScheduledBatch


class GuessingRunner(Protocol):
    """A runner that has a draft of its own."""

    guesses: int
    """How many tokens it proposes after each draw of the steps to come."""

    @property
    def proposals(self) -> Mapping[int, Items[int]]:
        """Those after the last step, by number of the chunk."""
        ...

    @property
    def guess_seconds(self) -> float:
        """What they took. It is no part of that step's seconds."""
        ...


class HandedProposals:
    """The proposals after the last step, for each of its sequences that has drawn, and what they take."""

    def __init__(self, runner: GuessingRunner, most: int) -> None:
        """`most`: tokens that it proposes after a draw."""
        self._runner, self._most = runner, most
        self._each = 0.0  # seconds of a guess for all sequences of a step, lately
        self._seen = 0  # steps with guesses: the first ones count for more
        self._guesses: Mapping[AttemptName, Items[int]] = {}

    def drew(self, plan: ScheduledBatch, drawn: Items[Items[Sampled]]) -> None:
        last, seconds = self._runner.proposals, self._runner.guess_seconds
        self._guesses = {
            name: last.get(number, ()) for number, (name, each) in enumerate(zip(plan, drawn, strict=True)) if each
        }
        if seconds and (count := max(map(len, self._guesses.values()), default=0)):
            self._seen += 1
            each = seconds / count
            self._each += max(LATELY, 1 / self._seen) * (min(each, FAR * (self._each or each)) - self._each)

    def ask(self, most: int) -> None:
        self._runner.guesses = most

    def most(self, sequence: Sequence) -> int:
        return self._most

    def seconds(self, steps: int, sequences: int, context: int) -> float:
        return steps * self._each

    def catching_up(self, sequence: Sequence) -> float:
        return 0.0

    def guess(self, drafts: Items[Draft], within: float | None) -> float:
        for draft in drafts:
            stops = draft.sequence.stop_token_ids
            guess = self._guesses.get(draft.sequence.name, ())[: draft.count]
            draft.guess += takewhile(lambda token, stops=stops: token not in stops, guess)
        return self._runner.guess_seconds
