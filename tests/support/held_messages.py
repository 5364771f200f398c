"""Messages between routers and other processes that arrive when a caller says so: the adversary of
`SimulatedNetwork.message`.

A process's heartbeats have a lane of their own, as they come from a thread of their own. A lane leads to an address: a
process gets what was said to its predecessor there.
"""

# pyright: strict

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from baton.messages import Heartbeat
from tests.support.held_agenda import HeldAgenda


class HeldMessages:
    """All messages on their way."""

    def __init__(self, agenda: HeldAgenda, dice: random.Random) -> None:
        self._agenda, self._dice = agenda, dice
        self._addresses: dict[str, str] = {}
        self.cut: set[frozenset[str]] = set()  # pairs of addresses: nothing arrives there, and nothing is lost

    def join(self, incarnation: str, address: str) -> None:
        """Let a process have that address, and an earlier one leave it."""
        self.leave(address)
        self._addresses[incarnation] = address

    def leave(self, address: str) -> None:
        """Lose what the process there has said."""
        for lane in self._agenda.loaded("message"):
            if lane[2] == address:
                self._agenda.drop(*lane)

    def message(self, sender: str, to: str, deliver: Callable[..., object], *words: Any) -> None:
        """Send a message, by incarnations; as `SimulatedNetwork.message`."""
        beats = isinstance(getattr(words[0], "message", None), Heartbeat)
        self._agenda.hold(("message", self._address(to), self._address(sender), beats), deliver, *words)

    def arrive(self, to: str, loss: float = 0.0, lag: float = 0.0) -> None:
        """Deliver what is on its way to an address, lane by lane in any order.

        `loss`: probability that a message is lost (and, as likely, that it comes twice); `lag`: that nothing more
        arrives this time on its lane."""
        dice = self._dice
        lanes = [lane for lane in self._agenda.loaded("message", to) if frozenset(lane[1:3]) not in self.cut]
        dice.shuffle(lanes)
        for lane in lanes:
            for _ in self._agenda.waiting(*lane):
                if lag and dice.random() < lag:
                    break
                chance = dice.random() if loss else 1.0
                deliver = self._agenda.pop(lane)
                for _ in range((chance >= loss) + (loss <= chance < 2 * loss)):
                    deliver()

    def _address(self, incarnation: str) -> str:
        return self._addresses.get(incarnation, incarnation)
