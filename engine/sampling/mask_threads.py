"""Threads that compute token masks while the model runs."""

# pyright: strict

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from engine.batch import TokenMask

_MOST_THREADS = 4
PATIENCE = 0.02
"""Seconds for which a step that has run waits for masks. One takes 0.02 to 2 ms, but 0.2 s where a grammar is very
ambiguous. Then its sequence gets no token in this step, and delays no other one."""


class MaskThreads:
    """Two pools of threads, so that grammars that take long wait for each other and not the others for them."""

    def __init__(self) -> None:
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pools = {slow: ThreadPoolExecutor(1 if slow else threads, "mask") for slow in (False, True)}
        self._threads = {False: threads, True: 1}

    def start(self, masks: Sequence[TokenMask]) -> list[Future[None]]:
        """Begin to compute those masks that no thread has begun with. Returns what to wait for."""
        under_way: list[Future[None]] = []
        for slow, pool in self._pools.items():
            fresh = deque(mask for mask in masks if mask.slow == slow and mask.begin())
            count = min(self._threads[slow], len(fresh))
            under_way += [pool.submit(_compute, fresh) for _ in range(count)]
        return under_way

    def wait(self, under_way: Sequence[Future[None]]) -> None:
        """Wait until all are computed, but no longer than `PATIENCE`."""
        if under_way:
            wait(under_way, PATIENCE)


def _compute(masks: deque[TokenMask]) -> None:
    while masks:
        try:
            mask = masks.popleft()
        except IndexError:  # another thread took the last one
            return
        mask.compute()
