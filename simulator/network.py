"""Who hears what when: messages between processes, and pages between nodes.

A node sends and receives pages at the speed of its network card, each way by itself, one transfer after the other.
What a process says to another arrives in the order in which it was said, unless a link loses it.
"""

# pyright: strict

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from simulator.clock import Agenda
from simulator.timing import Timing


class SimulatedNetwork:
    """All the links of a cluster."""

    def __init__(self, agenda: Agenda, timing: Timing, rng: random.Random) -> None:
        self._agenda, self._timing, self._rng = agenda, timing, rng
        self._living: dict[str, object] = {}  # by incarnation
        self._sending: dict[str, float] = defaultdict(float)  # until when each node's card is busy, seconds
        self._receiving: dict[str, float] = defaultdict(float)
        self._arrivals: dict[tuple[str, str], float] = defaultdict(float)  # of the last between two stores
        self.cuts: set[tuple[str, str]] = set()  # names of a router and of another process that can't reach each other
        self.loss = 0.0  # probability that a message between router and others is lost
        self.lost = 0
        self.bytes = 0  # of pages
        self.busy: dict[str, float] = defaultdict(float)  # seconds that each node's card has spent on sending

    def join(self, incarnation: str, process: object) -> None:
        self._living[incarnation] = process

    def leave(self, incarnation: str) -> None:
        """Nothing reaches it any more, and nothing that it has not said yet is ever said."""
        self._living.pop(incarnation, None)

    def process(self, incarnation: str) -> Any:
        """The living process of that incarnation, or none."""
        return self._living.get(incarnation)

    def message(self, sender: str, to: str, deliver: Callable[..., object], *words: Any) -> None:
        """Between a router and others, incarnations both; `deliver` is a method of the process `to`."""
        if self.cuts and self._apart(sender, to):
            self.lost += 1
            return
        if self.loss and self._rng.random() < self.loss:
            self.lost += 1
            return
        self._agenda.after(self._timing.message, self._deliver, to, deliver, words)

    def call(self, to: str, deliver: Callable[..., object], *words: Any) -> None:
        """Between a worker and its node's store."""
        self._agenda.after(self._timing.call, self._deliver, to, deliver, words)

    def pages(
        self, sender: tuple[str, str], receiver: tuple[str, str], size: int, sent: Callable[[], object],
        deliver: Callable[..., object], *words: Any,
    ) -> None:  # fmt: skip
        """Between two stores, each (node, incarnation); `size` bytes, 0 for mere words. `sent` is called once the
        sender needs the bytes no more."""
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
        self._arrivals[link] = arrived = max(arrived, self._arrivals[link])
        self._agenda.at(arrived, self._deliver, receiver[1], deliver, words)

    def _apart(self, one: str, other: str) -> bool:
        names = [process.peer.name for each in (one, other) if (process := self.process(each)) is not None]
        return tuple(names) in self.cuts or tuple(reversed(names)) in self.cuts

    def _deliver(self, to: str, deliver: Callable[..., object], words: tuple[Any, ...]) -> None:
        if to in self._living:
            deliver(*words)
