"""The page's data as JSON: one snapshot a second, however many viewers there are.

Owns the second hand of `DashboardMonitor`, the surveys of the prefix map, and the bytes of the last snapshot. The first
viewer that asks has the second's snapshot made. So a router without viewers makes none, and looks at no prefix map.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

import msgspec

from baton.clock import Clock
from router.frontend.client_sessions import RouterDriver

log = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between two snapshots
_VIEWED = 5.0  # seconds for which an answer counts as a viewer
SLICE = 256
"""Runs of the prefix map that are looked at in one turn of the loop."""
_REST = 0.01  # seconds between two slices
_SURVEY_EVERY = 2.0  # seconds from the end of one look at the prefix map to the next


class DashboardFeed:
    """Makes the data."""

    def __init__(self, driver: RouterDriver, clock: Clock) -> None:
        self._driver, self._clock = driver, clock
        self._snapshot: tuple[int, bytes] = (-1, b"")  # its sequence, JSON
        self._seen = float("-inf")  # when a viewer last asked
        self._surveyed = float("-inf")
        self.snapshots = 0  # made so far

    async def run(self) -> None:
        """Take a sample each second, and look at the prefix map while there are viewers. A picture is not worth a
        router: whatever fails here is logged, and the router goes on."""
        due = self._clock.now()
        surveying: asyncio.Task[None] | None = None
        try:
            while True:
                now = self._clock.now()
                if now >= due:
                    due = max(due + PERIOD, now)
                    with _logged("sample"):
                        self._driver.monitor.sample(now, _unix_ms())
                viewed = now - self._seen < _VIEWED and now - self._surveyed > _SURVEY_EVERY
                if viewed and (surveying is None or surveying.done()):
                    surveying = asyncio.create_task(self._survey())
                await asyncio.sleep(max(0.0, due - self._clock.now()))
        finally:
            if surveying is not None:
                surveying.cancel()

    def snapshot(self) -> bytes:
        """Return the second's snapshot as JSON."""
        self._seen = self._clock.now()
        monitor = self._driver.monitor
        if self._snapshot[0] != monitor.sequence:
            latest = monitor.snapshot(self._seen, _unix_ms(), self._driver.unready)
            self._snapshot = (latest.sequence, msgspec.json.encode(latest))
            self.snapshots += 1
        return self._snapshot[1]

    async def _survey(self) -> None:
        """Look at the whole prefix map in slices, and draw it on a thread."""
        monitor = self._driver.monitor
        with _logged("survey of the prefix map"):
            survey = monitor.survey()
            while not survey.step(SLICE):  # noqa: ASYNC110 - other tasks get their turns
                await asyncio.sleep(_REST)
            picture = await asyncio.to_thread(survey.draw)
            monitor.surveyed(survey, picture, self._clock.now())
        self._surveyed = self._clock.now()


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("the dashboard's %s failed", what)


def _unix_ms() -> int:
    return int(time.time() * 1_000)
