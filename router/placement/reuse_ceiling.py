"""The hit rate that a cache without bounds would have: the ceiling of what any cache and any routing can reach. Pure.

Of the pages that requests ask for, each page's first request in the window must compute it, and all others need not:

    ceiling = (pages asked for − different pages) · page size / prompt tokens

The different pages are estimated with HyperLogLog, whose standard error is 0.8 % here. Keys are hashes already, so
their bits are used as they are. A window is a ring of sketches: it forgets one twelfth of itself at a time. All windows
together take 0.6 MB, however many pages there are.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, log

import numpy as np
import numpy.typing as npt

from baton.messages import KEY_BYTES

WINDOWS: Mapping[str, float] = {"15m": 900.0, "1h": 3_600.0, "24h": 86_400.0}
"""By the name that metrics use, seconds."""

_PARTS = 12  # of a window
_BITS = 14  # of a key choose its register
_REGISTERS = 1 << _BITS
_RANKS = 65  # a register holds at most the number of zeros at the end of 64 bits, and one
_BUFFER = 4_096  # pages that wait until it is worth it to look at them all at once
_LOOK = 1.0  # seconds between two estimates: one takes 0.2 ms


class ReuseCeiling:
    """What has been asked for lately."""

    def __init__(self, page_size: int) -> None:
        """`page_size` is in tokens."""
        self._page_size = page_size
        self._windows = {name: _Window(seconds / _PARTS) for name, seconds in WINDOWS.items()}
        self._buffer: list[bytes] = []
        self._tokens = 0  # of prompts whose pages are in the buffer
        self._next_look = -inf
        self._shares: Mapping[str, float] = {}

    @property
    def shares(self) -> Mapping[str, float]:
        """The ceiling by window, 0 to 1, as of the last `tick`. A window without a prompt is left out."""
        return self._shares

    def count_prompt(self, keys: Sequence[bytes], tokens: int, now: float) -> None:
        """A prompt of so many tokens came, with these keys of its full pages."""
        self._buffer += keys
        self._tokens += tokens
        if len(self._buffer) >= _BUFFER:
            self._flush(now)

    def tick(self, now: float) -> None:
        """Bring `shares` up to date, at most once a second."""
        if now < self._next_look:
            return
        self._next_look = now + _LOOK
        self._flush(now)
        self._shares = {
            name: max(0.0, min(1.0, (window.pages - window.different()) * self._page_size / window.tokens))
            for name, window in self._windows.items()
            if window.tokens
        }

    def _flush(self, now: float) -> None:
        keys = np.frombuffer(b"".join(self._buffer), dtype="<u8").reshape(-1, KEY_BYTES // 8)
        registers = (keys[:, 0] & np.uint64(_REGISTERS - 1)).astype(np.int64)
        bits = keys[:, 1]
        lowest = bits & (~bits + np.uint64(1))
        ranks = (np.log2(np.maximum(lowest, np.uint64(1)).astype(np.float64)) + 1).astype(np.uint8)
        ranks[bits == 0] = _RANKS
        for window in self._windows.values():
            window.add_keys(registers, ranks, self._tokens, now)
        self._buffer, self._tokens = [], 0


class _Window:
    """A ring of sketches, each for a part of the window."""

    def __init__(self, seconds: float) -> None:
        """`seconds` of a part."""
        self._seconds = seconds
        self._sketches = np.zeros((_PARTS, _REGISTERS), np.uint8)
        self._pages = [0] * _PARTS
        self._tokens = [0] * _PARTS
        self._part: int | None = None  # since the clock's zero; none: nothing has come

    @property
    def pages(self) -> int:
        return sum(self._pages)

    @property
    def tokens(self) -> int:
        return sum(self._tokens)

    def add_keys(self, registers: npt.NDArray[np.int64], ranks: npt.NDArray[np.uint8], tokens: int, now: float) -> None:
        part = int(now // self._seconds)
        first = part - _PARTS if self._part is None else self._part
        for new in range(max(first + 1, part - _PARTS + 1), part + 1):
            at = new % _PARTS
            self._sketches[at] = 0
            self._pages[at] = self._tokens[at] = 0
        self._part = part
        at = part % _PARTS
        np.maximum.at(self._sketches[at], registers, ranks)
        self._pages[at] += len(registers)
        self._tokens[at] += tokens

    def different(self) -> float:
        """Estimate how many of the pages differ (Ertl's estimator, which needs no correction for few or many)."""
        counts = np.bincount(self._sketches.max(axis=0), minlength=_RANKS + 1).tolist()
        total = _REGISTERS * _zeros_weight(counts[0] / _REGISTERS)
        total += sum(count * 2.0**-rank for rank, count in enumerate(counts) if rank)
        return _REGISTERS * _REGISTERS / (2 * log(2) * total)


def _zeros_weight(share: float) -> float:
    """What the registers without a page weigh: share + Σ share^(2^k) · 2^(k−1) over k ≥ 1."""
    if share == 1.0:
        return inf
    total, factor, power = share, 1.0, share
    while True:
        power *= power
        before, total = total, total + power * factor
        factor += factor
        if total == before:
            return total
