"""The network: messages between processes, and pages between nodes.

A node sends and receives pages at the speed of its network card, each direction independently, one transfer after the
other. Messages from one process to another arrive in order, unless a link loses them.
"""

# pyright: strict

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from simulator.clock import Agenda
from simulator.timing import ModelTiming


class SimulatedNetwork:
    """All the links of a cluster."""

    def __init__(self, agenda: Agenda, timing: ModelTiming, rng: random.Random) -> None:
        self._agenda, self._timing, self._rng = agenda, timing, rng
        self._living: dict[str, object] = {}  # by incarnation
        self._sending: dict[str, float] = defaultdict(float)  # time until which each node's card is busy
        self._receiving: dict[str, float] = defaultdict(float)
        self._arrivals: dict[tuple[str, str], float] = defaultdict(float)  # of the last message between two stores
        self.cuts: set[tuple[str, str]] = set()  # partitions: name of a router, name of the process it can't reach
        self.loss = 0.0  # probability that a message to or from a router is lost
        self.lost = 0
        self.bytes = 0  # of pages
        self.busy: dict[str, float] = defaultdict(float)  # seconds that each node's card has spent on sending

    def join(self, incarnation: str, process: object) -> None:
        self._living[incarnation] = process

    def leave(self, incarnation: str) -> None:
        """Remove a process: it receives and sends nothing more."""
        self._living.pop(incarnation, None)

    def process(self, incarnation: str) -> Any:
        """Return the live process of that incarnation, or None."""
        return self._living.get(incarnation)

    def message(self, sender: str, to: str, deliver: Callable[..., object], *words: Any) -> None:
        """Send a message to or from a router, by incarnations. `deliver` is a method of the process `to`."""
        if self.cuts and self._apart(sender, to):
            self.lost += 1
            return
        if self.loss and self._rng.random() < self.loss:
            self.lost += 1
            return
        self._agenda.after(self._timing.message, self._deliver, to, deliver, words)

    def call(self, connection: int, to: str, deliver: Callable[..., object], *words: Any) -> None:
        """Send a message over the connection of a worker and its node's store."""
        self._agenda.after(self._timing.call, self._deliver, to, deliver, words)

    def pages(
        self, sender: tuple[str, str], receiver: tuple[str, str], size: int, sent: Callable[[], object],
        deliver: Callable[..., object], *words: Any,
    ) -> None:  # fmt: skip
        """Send pages or a message between two stores, each given as (node, incarnation).

        `size`: bytes of pages, 0 for a message. `sent` is called once the sender no longer needs the bytes.
        """
        now, rate = self._agenda.now, self._timing.network
        seconds = size / rate
        arrived = now + self._timing.network_latency
        if size:
            self._sending[sender[0]] = gone = max(now, self._sending[sender[0]]) + seconds
            self.busy[sender[0]] += seconds
            self.bytes += size
            self._agenda.at(gone, sent)
            begins = max(gone - seconds + self._timing.network_latency, self._receiving[receiver[0]])
            self._receiving[receiver[0]] = arrived = begins + seconds
        link = (sender[1], receiver[1])
        self._arrivals[link] = arrived = max(arrived + self._lateness(), self._arrivals[link])
        self._agenda.at(arrived, self._deliver, receiver[1], deliver, words)

    def _lateness(self) -> float:
        """Return the seconds by which a message to another store is late; an adversary's are not 0."""
        return 0.0

    def _apart(self, one: str, other: str) -> bool:
        names = [process.peer.name for each in (one, other) if (process := self.process(each)) is not None]
        return tuple(names) in self.cuts or tuple(reversed(names)) in self.cuts

    def _deliver(self, to: str, deliver: Callable[..., object], words: tuple[Any, ...]) -> None:
        if to in self._living:
            deliver(*words)
