"""Whose turn it is when several routers want the same room.

A router hears at once of the room that its own work gives back, and of other room a heartbeat later. So the router with
most of a full worker would always be first, and the others would wait for ever. After refusing a router, a worker
therefore reserves the next free pages for it, provided that router holds fewer pages there than the one that asks
(max-min fairness). A refused router is expected to ask again at the worker's next heartbeat. The promise is forgotten
soon after, in case it has found another place. Pure.
"""

# pyright: strict

from collections.abc import Mapping

_KEEP = 1.0  # seconds for which room is kept; a few heartbeats


class RouterFairness:
    """Which routers were refused not long ago."""

    def __init__(self) -> None:
        self._refused: dict[str, float] = {}  # when, seconds

    def must_wait(self, router: str, held: Mapping[str, int], now: float) -> bool:
        """Whether another router is before this one. `held`: how much each has here; none means nothing."""
        self._refused = {name: at for name, at in self._refused.items() if now < at + _KEEP}
        mine = held.get(router, 0)
        return any(held.get(other, 0) < mine for other in self._refused if other != router)

    def refused(self, router: str, now: float) -> None:
        self._refused[router] = now

    def admitted(self, router: str) -> None:
        """It has got what it wanted; or it is gone."""
        self._refused.pop(router, None)
