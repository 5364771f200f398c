"""The seam of what guesses for all sequences of a step together: a draft model, heads, or a draft of the runner's own.

It draws with the random numbers that the model itself will draw with, so a guess is right wherever both find nearly the
same logits. Pure, but for what computes.
"""

# pyright: strict

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from decode_worker.sequence import Sequence
from engine.step.batch import Sampled, TokenDraw
from engine.step.outcome import ScheduledBatch

LATELY = 0.1  # weight of the newest step
FAR = 4.0  # times what was expected: so much counts of a step that took longer


@dataclass
class Draft:
    """A sequence that is to be drafted for: up to `count` tokens."""

    sequence: Sequence
    draw: TokenDraw  # of its next token
    count: int
    guess: list[int] = field(default_factory=list[int])


class Drafter(Protocol):
    """Guesses, and knows what guessing takes."""

    def drew(self, plan: ScheduledBatch, drawn: Items[Items[Sampled]]) -> None:
        """The last step has run `plan`, and drawn these tokens for each of its chunks."""
        ...

    def most(self, sequence: Sequence) -> int:
        """Return how many tokens of the sequence it can guess before the next step."""
        ...

    def seconds(self, steps: int, sequences: int, context: int) -> float:
        """Return what so many steps take that guess for so many sequences, which have `context` tokens together."""
        ...

    @property
    def ask(self) -> Callable[[int], None] | None:
        """Have it guess up to so many tokens after each draw of the step to come, for the step after that. None: it
        guesses as `guess` is called."""
        ...

    def catching_up(self, sequence: Sequence) -> float:
        """Return the seconds that it needs, besides, before it can guess for this sequence."""
        ...

    def guess(self, drafts: Items[Draft], within: float | None) -> float:
        """Fill in the guesses, all of them in as many steps as the longest has tokens. Return the seconds it took. A
        sequence that must be caught up with for more than `within` seconds, where that counts, gets no guess."""
        ...
