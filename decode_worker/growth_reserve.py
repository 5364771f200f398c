"""How many pages to keep free for the sequences that run, learned from how long outputs have been.

To admit a sequence for each that leaves, the pool must have room not for what the running ones could become but for
what they will, together, at the worst moment. At that moment, `t` tokens from now, sequence i has given its pages back
with probability 1 − Sᵢ(t), and otherwise taken those of t more tokens:

    taken(t) = Σ Sᵢ(t) · growthᵢ(t)  −  Σ (1 − Sᵢ(t)) · ownᵢ          reserve = max over t of taken(t) + z · σ(t)

but no less than a page each, which those that began together take together, and no more than what is allowed.

Why not the sum of all expected growth: most of it never stands in the pool at one time. Why a margin: half of the time
more is taken than expected, and a preemption costs the victim a prefill. That the future peak is what counts is the
idea of the past-future scheduler (Gong et al., ASPLOS'25); the estimate here is our own, since it must cope with
outputs of which only a beginning was seen.

Sᵢ(t) is the probability that an output goes on for t tokens more, given those it has. It comes from a hazard, the
chance to end per token, that is constant in each of a few dozen ranges of length. It is the ends seen there per token
seen there (Kaplan and Meier's estimate, over ranges). So an output cut off by `max_tokens`, by a lost router or by the
present moment counts as no shorter than it was. `max_tokens` itself ends a sequence for certain.

Pure.
"""

# pyright: strict

from collections.abc import Sequence
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

_Vector = npt.NDArray[np.float64]

_EDGES: _Vector = np.array([0.0, *(step * 2.0**power for power in range(3, 21) for step in (1.0, 1.5))])
"""Where the ranges of length begin, in tokens; the last ends nowhere."""
_TYPICAL = 256.0  # tokens: half of all outputs are no longer, before anything is known
_PRIOR = 4.0  # outputs that this assumption counts for
_REMEMBERED = 512  # outputs, about; older ones fade
_HORIZONS = 32  # moments at which the pool is looked at
_MARGIN = 1.0  # standard deviations: z


class GrowthOutlook(Struct, frozen=True):
    """A sequence that holds pages, as far as its future is concerned."""

    generated: int  # output tokens it has
    left: int  # output tokens that max_tokens still allows
    known: int  # tokens in all; of a model with a window, from the first page on that it holds
    pages: int  # that it holds
    own: int  # of these, pages that only this sequence refers to
    most: float = inf  # pages that it will ever hold at a time


class GrowthReserve(Protocol):
    """A rule for the pages to keep free; tests compare others with ours."""

    def output_ended(self, begun: int, generated: int, cut: bool) -> None:
        """A sequence that began with `begun` output tokens has ended with `generated`; `cut`: it would have gone on."""
        ...

    def pages_to_keep(self, holders: Sequence[GrowthOutlook], page_size: int) -> int:
        """Pages that should be free for what these sequences are going to take."""
        ...


class LearnedGrowthReserve:
    """Outputs that ended, and the rule."""

    def __init__(self) -> None:
        widths = np.diff(_EDGES)
        survive = _TYPICAL / (_TYPICAL + _EDGES)  # Lomax: heavy tails, as outputs have
        lived = _TYPICAL * np.log((_TYPICAL + _EDGES[1:]) / (_TYPICAL + _EDGES[:-1]))
        last = survive[-1]
        self._prior_ends: _Vector = _PRIOR * np.append(survive[:-1] - survive[1:], last)
        self._prior_seen: _Vector = _PRIOR * np.append(lived, last * _EDGES[-1])
        self._ends: _Vector = np.zeros(len(_EDGES))
        self._seen: _Vector = np.zeros(len(_EDGES))  # tokens generated in each range
        self._widths: _Vector = np.append(widths, np.inf)

    def output_ended(self, begun: int, generated: int, cut: bool) -> None:
        keep = 1 - 1 / _REMEMBERED
        self._ends *= keep
        self._seen *= keep
        self._seen += self._tokens(np.array([generated]))[0] - self._tokens(np.array([begun]))[0]
        if not cut:
            self._ends[np.searchsorted(_EDGES, generated, side="left") - 1 if generated else 0] += 1

    def pages_to_keep(self, holders: Sequence[GrowthOutlook], page_size: int) -> int:
        """See `GrowthReserve`. O(sequences · horizons)."""
        if not holders:
            return 0
        columns = np.array([(o.generated, o.left, o.known, o.pages, o.own, o.most) for o in holders], dtype=np.float64)
        generated, left, known, pages, own, most = columns.T[:, :, None]
        ahead = _horizons(left)
        survives = self._survives(generated, ahead) * (ahead <= left)
        growth = np.maximum(0, np.minimum(np.ceil((known + np.minimum(ahead, left)) / page_size), most) - pages)
        needs = (survives * growth - (1 - survives) * own).sum(0)
        spread = np.sqrt((survives * (1 - survives) * (growth + own) ** 2).sum(0))
        worst = int(np.ceil((needs + _MARGIN * spread).max()))
        allowed = int(np.maximum(0, np.minimum(np.ceil((known + left) / page_size), most) - pages).sum())
        return min(allowed, max(len(holders), worst))

    def _survives(self, generated: _Vector, ahead: _Vector) -> _Vector:
        """Probability that an output of so many tokens goes on for `ahead` more, [sequences, horizons]."""
        running = self._tokens(generated[:, 0]).sum(0)
        hazard = (self._prior_ends + self._ends) / (self._prior_seen + self._seen + running)
        total = np.append(0.0, np.cumsum(hazard[:-1] * self._widths[:-1]))  # up to each edge

        def until(length: _Vector) -> _Vector:
            at = np.searchsorted(_EDGES, length, side="right") - 1
            return total[at] + hazard[at] * (length - _EDGES[at])

        return np.exp(until(generated) - until(generated + ahead))

    def _tokens(self, lengths: npt.NDArray[np.int64] | _Vector) -> _Vector:
        """Tokens that outputs of these lengths have in each range, [outputs, ranges]."""
        return np.clip(np.asarray(lengths, dtype=np.float64)[:, None] - _EDGES, 0.0, self._widths)


def _horizons(left: _Vector) -> _Vector:
    """Moments to look at, [1, moments]: near ones more closely; and just before sequences reach their limits, which is
    when what is taken by sequences that end together is most."""
    near = np.geomspace(1, max(1.0, float(left.max())), _HORIZONS)
    limits = np.quantile(left, np.linspace(0, 1, _HORIZONS), method="nearest")
    return np.unique(np.concatenate([near.round(), limits]))[None, :]
