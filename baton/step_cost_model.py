"""How long a step of an engine takes, learned from the steps that were run. Workers plan with it, the router places
with it.

    seconds = fixed  +  token · prompt tokens  +  pair · pairs  +  row · rows  +  context · tokens of the rows' contexts
            + mixed, where there are both prompt tokens and rows

A *row* is a sequence that gets one token. A *pair* is a prompt token and a position that it attends to, itself
included, which is what makes the end of a long prompt slower than its beginning. *mixed* is what the two take more than
their sum; an engine may run one after the other, and read its weights twice. No coefficient is ever negative.

The estimate has the least sum of relative errors over the last steps, newer ones weighing more; small errors squared,
larger ones absolute (Huber, Robust Estimation of a Location Parameter, 1964), and gross ones less and less. So small
steps count as much as large ones, and that a process stood still once in a while moves nothing. It is found by
reweighted least squares: a round as soon as a step took another time than was expected, one for every few that did not.

What the last steps say nothing about stays as it was. Those with prompts and those without are remembered apart, so
that a thousand steps of one kind don't wear away what the other kind costs; and each estimate is the nearest to the one
before that fits (a proximal term), so that steps which are all alike lead to no wild guesses.

A few steps in a row that were all far slower, or all far faster, are no accident: the machine has changed, and those
remembered are taken to have lasted so many times as long.

Pure: the times are given.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baton.messages import StepSample

_Array: TypeAlias = npt.NDArray[np.float64]

_REMEMBERED = 64  # steps of each kind
_KEEP = 0.98  # weight of a step beside the next one of its kind
_NEAR = 0.02  # how much the last estimate counts beside what is remembered
_SMALL = 0.1  # relative errors up to this are squared, larger ones absolute
_GROSS = 1.0  # the larger an error beyond this, the less it moves
_FAR = 1.5  # times what was expected, or a part of it
_BELIEVED = 4  # steps that far off in a row
_HEIRLOOM = 4.0  # steps of each kind that others' experience counts as
_ROUNDS = 32  # until they make no difference
_WILD = 10.0  # times what was expected, or a part of it: nothing could be expected
_AS_EXPECTED = 0.05  # relative error of a step that is learned from with others
_AT_ONCE = 32  # of these: a router has many workers, and a round takes a tenth of a millisecond
_SHORTEST, _LONGEST = 1e-9, 1e9  # seconds of any step


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """The coefficients of the formula above, each in seconds."""

    fixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    row: float = 0.0
    context: float = 0.0
    mixed: float = 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """In this order. `dataclasses.astuple` copies each and takes a fifth of a fit."""
        return self.fixed, self.token, self.pair, self.row, self.context, self.mixed

    def of(self, tokens: int = 0, pairs: int = 0, rows: int = 0, context: int = 0) -> float:
        both = self.mixed if tokens and rows else 0.0
        prompts = tokens * self.token + pairs * self.pair
        return self.fixed + prompts + rows * self.row + context * self.context + both


class StepCostModel:
    """The fit. Knows nothing until the first `observe`, unless it has `cost` to begin with."""

    def __init__(self, cost: StepCoefficients | None = None) -> None:
        self.cost = cost or StepCoefficients()
        self.largest = 0  # prompt tokens of the largest step so far; what is said of far larger ones is a guess
        # The steps that are remembered: without prompts, and with.
        self._amounts: _Array = np.zeros((2, _REMEMBERED, len(fields(StepCoefficients))))
        self._seconds: _Array = np.ones((2, _REMEMBERED))
        self._weights: _Array = np.zeros((2, _REMEMBERED))
        self._oldest = [0, 0]  # of each kind
        self._news = 0  # steps remembered since the last round; one that was not expected counts for many
        self._far: tuple[dict[int, float], dict[int, float]] = ({}, {})
        """Of each kind the last in a row that took far longer than expected, or far shorter: where they are remembered,
        and how many times as long they took."""

    @classmethod
    def from_peers(cls, elders: Sequence[StepCostModel]) -> StepCostModel:
        """One that begins with what others remember, as if from a few steps of its own."""
        from_peers = cls(elders[0].cost)
        from_peers.largest = max(elder.largest for elder in elders)
        for kind in range(2):
            weights = np.concatenate([elder._weights[kind] for elder in elders])
            newest = np.argsort(weights, kind="stable")[-_REMEMBERED:]
            from_peers._amounts[kind] = np.concatenate([elder._amounts[kind] for elder in elders])[newest]
            from_peers._seconds[kind] = np.concatenate([elder._seconds[kind] for elder in elders])[newest]
            from_peers._weights[kind] = weights[newest] * _HEIRLOOM / max(_HEIRLOOM, weights[newest].sum())
        from_peers.calibrate()
        return from_peers

    @property
    def knows_anything(self) -> bool:
        return bool(self._weights.any())

    @property
    def knows_prompts(self) -> bool:
        return self.largest > 0

    def observe(self, *steps: StepSample) -> None:
        """Learn from some steps, in their order. Those of nothing, and times that are none, teach nothing."""
        self._remember_all(steps)
        if self._news >= _AT_ONCE:
            self._fit()

    def calibrate(self, steps: Sequence[StepSample] = ()) -> None:
        """Learn as much as these steps can tell: as many rounds as make a difference."""
        self._remember_all(steps)
        for _ in range(_ROUNDS):
            self._fit()

    def seconds(self, tokens: int = 0, pairs: int = 0, rows: int = 0, context: int = 0) -> float:
        """What such a step would take; 0 before the first has been observed."""
        return self.cost.of(tokens, pairs, rows, context)

    def tokens_within(self, seconds: float, context: int = 0, rows: int = 0) -> int | None:
        """How many prompt tokens, each attending to `context` earlier positions, make a step of so many rows longer by
        no more than that. None while nothing is known that bounds them."""
        each = self.cost.token + context * self.cost.pair
        if not self.knows_prompts or each <= 0:
            return None
        return max(0, int((seconds - (self.cost.mixed if rows else 0.0)) / each))

    def _remember_all(self, steps: Sequence[StepSample]) -> None:
        for step in steps:
            if step.tokens + step.rows > 0 and _SHORTEST <= step.seconds <= _LONGEST:
                self._remember(step)

    def _remember(self, step: StepSample) -> None:
        """In place of the oldest of its kind."""
        kind = int(step.tokens > 0)
        weights, index = self._weights[kind], self._oldest[kind]
        self._oldest[kind] = (index + 1) % _REMEMBERED
        weights *= _KEEP
        weights[index] = 1.0
        both = bool(step.tokens and step.rows)
        self._amounts[kind, index] = (1.0, step.tokens, step.pairs, step.rows, step.context, both)
        self._seconds[kind, index] = step.seconds
        expected = self.cost.of(step.tokens, step.pairs, step.rows, step.context)
        if expected and step.tokens <= self.largest:
            self._compare(kind, index, step.seconds / expected)
        self.largest = max(self.largest, step.tokens)
        self._news += 1 if abs(step.seconds - expected) <= _AS_EXPECTED * expected else _AT_ONCE

    def _compare(self, kind: int, index: int, ratio: float) -> None:
        """The step remembered at `index` took so many times what was expected. If it shows that the machine is not
        what it was, steps of before are taken to have lasted that many times as long."""
        run = self._far[kind]
        near = 1 / _FAR <= ratio <= _FAR
        if near or any((other > 1) != (ratio > 1) for other in run.values()):
            run.clear()
        if near:
            return
        run[index] = ratio
        if len(run) == _BELIEVED:
            before = np.ones(_REMEMBERED, dtype=np.bool_)
            before[list(run)] = False
            scaled = self._seconds[kind, before] * (min(run.values()) if ratio > 1 else max(run.values()))
            self._seconds[kind, before] = np.clip(scaled, _SHORTEST, _LONGEST)
            run.clear()
            self._fit()

    def _fit(self) -> None:
        """One round. The minimum over x ≥ 0 of  Σ weight · (amounts · x / expected − seconds / expected)²  +
        near · Σᵢ momentsᵢᵢ · (xᵢ − lastᵢ)², in units that make every momentsᵢᵢ 1. What no step had any of stays as it
        was."""
        self._news = 0
        cost = np.array(self.cost.coefficients)
        amounts, seconds = self._amounts.reshape(-1, len(cost)), self._seconds.reshape(-1)
        expected = (amounts @ cost).clip(seconds / _WILD, seconds * _WILD)
        errors = np.abs(seconds / expected - 1)
        weights = self._weights.reshape(-1) / (expected * expected)
        weights /= np.maximum(errors, _SMALL) * np.maximum(errors / _GROSS, 1)
        weighted = (amounts * weights[:, None]).T
        moments = weighted @ amounts
        unit = np.sqrt(moments.diagonal())
        unit[unit == 0] = 1.0  # `near` alone speaks for what no step had any of
        matrix = moments / (unit * unit[:, None]) + _NEAR * np.eye(len(unit))
        least = _least(matrix, weighted @ seconds / unit + _NEAR * unit * cost)
        self.cost = StepCoefficients(*(least / unit).tolist())


def _least(matrix: _Array, vector: _Array) -> _Array:
    """The minimum of xᵀ·matrix·x / 2 − vectorᵀ·x over x ≥ 0, near enough: what comes out negative is held at 0 and the
    rest solved again."""
    solution, free = np.zeros(len(vector)), np.ones(len(vector), dtype=np.bool_)
    solution[:] = np.linalg.solve(matrix, vector)
    while solution.min() < 0:
        free &= solution >= 0
        solution[:] = 0.0
        solution[free] = np.linalg.solve(matrix[free][:, free], vector[free])
    return solution


def pairs(new: int, context: int = 0) -> int:
    """Pairs of `new` tokens behind `context` others: each attends to those, to the new ones before it, and itself."""
    return new * context + new * (new + 1) // 2
