"""An adversary that chooses the order of a simulated cluster's events: how late each message is, how long a process
stands still before it goes on, what is lost, and what comes twice.

What it may choose is what a real cluster may see. Messages on one lane keep their order: a lane is one direction of a
link, heartbeats have one of their own, and so has each connection. All choices come from one random number generator,
so a seed, or hypothesis, chooses them.
"""

# pyright: strict

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.messages import Heartbeat
from simulator.clock import Agenda
from simulator.network import SimulatedNetwork
from simulator.timing import ModelTiming


@dataclass
class Adversary:
    """Rates of what goes wrong. They may change while the cluster runs."""

    dice: random.Random
    late: float = 0.1  # probability that a message is late
    late_seconds: float = 0.2  # on average
    standstill: float = 0.02  # probability that a process stands still before it goes on
    standstill_seconds: float = 0.1  # on average
    loss: float = 0.0  # probability that a message of a router's link is lost, and as likely that it comes twice
    jitter: float = 0.005  # seconds at most by which every message is late

    def lateness(self) -> float:
        """Choose the seconds by which a message is late."""
        dice = self.dice
        seconds = dice.random() * self.jitter
        return seconds + dice.expovariate(1 / self.late_seconds) if dice.random() < self.late else seconds

    def stands_still(self) -> float:
        """Choose the seconds for which a process stands still now."""
        dice = self.dice
        return dice.expovariate(1 / self.standstill_seconds) if dice.random() < self.standstill else 0.0

    def copies(self) -> int:
        """Choose how often a message of a router's link arrives: once, never or twice."""
        chance = self.dice.random() if self.loss else 1.0
        return (chance >= self.loss) + (self.loss <= chance < 2 * self.loss)


class AdversarialAgenda(Agenda):
    """An agenda on which processes go on late."""

    def __init__(self, adversary: Adversary) -> None:
        super().__init__()
        self._adversary = adversary

    def resume(self, when: float, do: Callable[..., object], *args: Any) -> None:
        self.at(max(when, self.now) + self._adversary.stands_still(), do, *args)


class AdversarialNetwork(SimulatedNetwork):
    """A network on which lanes overtake each other."""

    def __init__(self, agenda: Agenda, timing: ModelTiming, adversary: Adversary) -> None:
        super().__init__(agenda, timing, adversary.dice)
        self._adversary = adversary
        self._last: dict[tuple[object, ...], float] = defaultdict(float)  # arrival on each lane

    def message(self, sender: str, to: str, deliver: Callable[..., object], *words: Any) -> None:
        count = 0 if self.cuts and self._apart(sender, to) else self._adversary.copies()
        self.lost += not count
        beats = isinstance(getattr(words[0], "message", None), Heartbeat)
        for _ in range(count):
            self._send(self._timing.message, (sender, to, beats), to, deliver, words)

    def call(self, connection: int, to: str, deliver: Callable[..., object], *words: Any) -> None:
        self._send(self._timing.call, (connection, to), to, deliver, words)

    def _send(
        self, seconds: float, lane: tuple[object, ...], to: str, deliver: Callable[..., object], words: tuple[Any, ...]
    ) -> None:
        arrival = self._last[lane] = max(self._agenda.now + seconds + self._adversary.lateness(), self._last[lane])
        self._agenda.at(arrival, self._deliver, to, deliver, words)

    def _lateness(self) -> float:
        return self._adversary.lateness()
