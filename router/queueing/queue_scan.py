"""Which queued requests are tried, and when: the first few whenever there may be room, the others by and by.

Trying every request after every event costs more than it is worth. Mostly the first can't be placed, and those behind
it wait for the same worker. But another request may not need what one waits for, such as a prefill slot. So with each
tick a few requests further behind are tried, until all have been since the cluster changed.

Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator

from router.members import ClusterChanges
from router.queueing.waiting_queue import WaitingQueue
from router.request import Request

_FIRST = 8  # requests that are tried in a round before the first ones are known to wait for something
_BEHIND = 8  # and with a tick so many of those behind them


class QueueScan:
    """Goes through a queue in rounds."""

    def __init__(self, queue: WaitingQueue, changes: ClusterChanges) -> None:
        self._queue = queue
        self._changes = changes
        self._ticked = False  # since the last scan, and a request is to be tried again, or further
        self._remaining: list[Request] = []  # requests still to be tried, the next one last
        self._changed_since_listed = False  # there has been room since these were listed
        self._unplaceable: set[str] = set()  # in this round, and can't be placed

    @property
    def due(self) -> bool:
        """Whether it is time for a round."""
        return self._changes.room or self._ticked

    def tick(self, again: bool) -> None:
        """Time passes; `again`: that alone may let the first ones be placed."""
        self._ticked = again or self._changed_since_listed or bool(self._remaining)

    def scan(self, now: float) -> Iterator[Request]:
        """Yield queued requests in service order. Call `mark_unplaceable` on each that fails before advancing. An
        abandoned scan resumes at the next tick."""
        behind = self._ticked
        self._changed_since_listed |= self._changes.room
        self._changes.room = self._ticked = False
        self._unplaceable = set()
        for request in self._queue.in_order(now):
            if len(self._unplaceable) >= _FIRST:
                if behind:
                    yield from self._scan_remaining(now)
                return
            yield request
        self._remaining, self._changed_since_listed = [], False

    def mark_unplaceable(self, request: Request) -> None:
        """It can't be placed now."""
        self._unplaceable.add(request.name)

    def _scan_remaining(self, now: float) -> Iterator[Request]:
        """From where the last round ended."""
        if not self._remaining and self._changed_since_listed:
            self._remaining = [*self._queue.in_order(now)][::-1]
            self._changed_since_listed = False
        enough = len(self._unplaceable) + _BEHIND
        while self._remaining and len(self._unplaceable) < enough:
            request = self._remaining[-1]
            if request in self._queue and request.name not in self._unplaceable:
                yield request
            self._remaining.pop()
