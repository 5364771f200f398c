"""Threads that compute token masks while the model runs."""

# pyright: strict

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from msgspec import Struct

from engine.step.batch import TokenMask

_MOST_THREADS = 4
PATIENCE = 0.05
"""Seconds for which a step that has run waits for masks, or as long as the model took if that is longer. A mask takes
0.02 to 2 ms, but 0.2 s where a grammar is very ambiguous. A sequence whose mask is late gets no token in this step, and
computes its last token again in the next."""


class MasksUnderWay(Struct, frozen=True):
    """What to wait for, and when it was begun."""

    quick: Sequence[Future[None]]
    slow: Sequence[Future[None]]
    began: float  # seconds of `time.perf_counter`


class MaskThreads:
    """Two pools of threads, so that grammars that take long wait for each other and not the others for them."""

    def __init__(self) -> None:
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._quick, self._slow = _Pool(threads), _Pool(1)
        self._late: list[Future[None]] = []  # of earlier steps

    def start(self, masks: Sequence[TokenMask]) -> MasksUnderWay:
        """Begin to compute those masks that no thread has begun with."""
        quick = deque(mask for mask in masks if not mask.slow and mask.begin())
        slow = deque(mask for mask in masks if mask.slow and mask.begin())
        self._late = [one for one in self._late if not one.done()] + self._slow.compute(slow)
        return MasksUnderWay(self._quick.compute(quick), self._late, time.perf_counter())

    def wait(self, under_way: MasksUnderWay, *, slow: bool = True) -> None:
        """Wait until the quick ones are computed, but not long. With `slow`, a step waits for slow and late ones if
        there is nothing else to wait for."""
        if awaited := under_way.quick or (under_way.slow if slow else ()):
            late = wait(awaited, max(PATIENCE, time.perf_counter() - under_way.began)).not_done
            self._late += late.difference(self._late)


class _Pool:
    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "mask")

    def compute(self, masks: deque[TokenMask]) -> list[Future[None]]:
        """Each thread takes the next mask until none is left."""
        return [self._pool.submit(_compute, masks) for _ in range(min(self._threads, len(masks)))]


def _compute(masks: deque[TokenMask]) -> None:
    while masks:
        try:
            mask = masks.popleft()
        except IndexError:  # another thread took the last one
            return
        mask.compute()
