"""How far predictions are from what happens.

    error = |ln(actual / predicted)|        0.1: about a tenth too much, or too little

Pure.
"""

# pyright: strict

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

PredictionKind: TypeAlias = Literal["prefill", "step", "fetch", "ttft", "tpot"]
"""What was predicted: a step that computes prompts, one that only decodes, loading cached pages from below an arena or
from another node, a request's time to its first token, and per token after that."""

_WINDOW = 256  # predictions of each kind


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Errors of the last predictions of one kind."""

    count: int
    median: float
    p90: float


class PredictionErrors:
    """The last predictions of each kind."""

    def __init__(self) -> None:
        self._errors: Mapping[PredictionKind, deque[float]] = {
            kind: deque(maxlen=_WINDOW) for kind in get_args(PredictionKind)
        }

    def add_pair(self, kind: PredictionKind, predicted: float, actual: float) -> None:
        """Seconds that something was to take, and took. What was not predicted, or took no time, is not counted."""
        if predicted > 0 and actual > 0:
            self._errors[kind].append(abs(math.log(actual) - math.log(predicted)))  # their ratio may overflow

    def summaries(self) -> Mapping[PredictionKind, PredictionError]:
        """Of the kinds of which there have been any."""
        return {kind: _score(sorted(errors)) for kind, errors in self._errors.items() if errors}


def _score(errors: list[float]) -> PredictionError:
    return PredictionError(len(errors), errors[len(errors) // 2], errors[len(errors) * 9 // 10])
