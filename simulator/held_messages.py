"""Messages between routers and other processes that arrive when a caller says so: the adversary of
`SimulatedNetwork.message`.

Each link keeps its order, and there is none between two of them. A process's heartbeats have a link of their own, as
they come from a thread of their own. A link leads to an address: a process gets what was said to
its predecessor there.
"""

# pyright: strict

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from baton.messages import Heartbeat

T = TypeVar("T")


class HeldMessages:
    """All messages on their way."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._links: dict[tuple[str, str, bool], deque[Callable[[], object]]] = {}
        self._addresses: dict[str, str] = {}
        self.cut: set[frozenset[str]] = set()  # pairs of addresses: nothing arrives there, and nothing is lost

    def join(self, incarnation: str, address: str) -> None:
        """Let a process have that address. The messages of an earlier one there are lost."""
        for (sender, _, _), waiting in self._links.items():
            if sender == address:
                waiting.clear()
        self._addresses[incarnation] = address

    def message(self, sender: str, to: str, deliver: Callable[..., object], *words: Any) -> None:
        """Send a message, by incarnations; as `SimulatedNetwork.message`."""
        beats = isinstance(getattr(words[0], "message", None), Heartbeat)
        link = (self._address(sender), self._address(to), beats)
        self._links.setdefault(link, deque()).append(partial(deliver, *words))

    def arrive(self, to: str, loss: float = 0.0, lag: float = 0.0) -> None:
        """Deliver what is on its way to an address, link by link in any order; see `mishaps`."""
        links = [link for link in self._links if link[1] == to and frozenset(link[:2]) not in self.cut]
        self._dice.shuffle(links)
        for link in links:
            for deliver in mishaps(self._links[link], self._dice, loss, lag):
                deliver()

    def _address(self, incarnation: str) -> str:
        return self._addresses.get(incarnation, incarnation)


def mishaps(waiting: deque[T], dice: random.Random, loss: float, lag: float) -> Iterator[T]:
    """Yield what arrives of all that waits now. `loss`: probability that a message is lost (and, as likely, that it
    comes twice); `lag`: that nothing more arrives this time."""
    for _ in range(len(waiting)):
        if lag and dice.random() < lag:
            return
        chance = dice.random() if loss else 1.0
        message = waiting.popleft()
        if chance >= loss:
            yield message
        if loss <= chance < 2 * loss:
            yield message
