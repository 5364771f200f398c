"""What work costs on each worker, in seconds.

    a step that computes prompts   fixed + token · tokens + pair · pairs
    a decode step                  fixed + row · rows + context · tokens of all its sequences
    a step of both                 the sum of the two, with one `fixed`

A *pair* is a prompt token and a position that it attends to, itself included, which is what makes the end of a long
prompt slower than its beginning. No coefficient is ever negative. Pure.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass

from baton.pace import pairs


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Of computing prompts on one worker: seconds of a step, of a prompt token, of a pair."""

    fixed: float
    token: float
    pair: float

    def seconds(self, new: int, context: int = 0, chunk: int | None = None) -> float:
        """Computing `new` tokens behind `context` ones whose keys and values are there already, `chunk` tokens a step;
        by default all in one. Nothing new takes no time."""
        if new <= 0:
            return 0.0
        steps = -(-new // chunk) if chunk else 1
        return steps * self.fixed + new * self.token + pairs(new, context) * self.pair


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of decoding on one worker: seconds of a step, of a sequence in it, of a token of their contexts."""

    fixed: float
    row: float
    context: float

    def seconds(self, rows: int, context: int) -> float:
        """A step of `rows` sequences of `context` tokens in all."""
        return self.fixed + rows * self.row + context * self.context
