"""Engines that take turns at a case: with the same prompts, the machine's limits measured around each of them.

A turn during which other processes used the CPU is repeated by all engines. If that does not help, it does not count.
On a machine of two cores, an unrelated build slows a case by more than the engines differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.engine import roofline
from bench.engine.roofline import Limits
from bench.peers.adapter import Peer, Tokens
from bench.peers.cases import Case
from bench.processes import Neighbours

QUIET = 0.1  # cores that others may use
_TRIES = 3


@dataclass(frozen=True)
class Run:
    """One engine's run of a case: the better of the limits before and after it, and the cores that others used."""

    seconds: float
    limits: Limits
    others: float


@dataclass(frozen=True)
class Turn:
    """The run and the tokens of each engine for one case, by name."""

    runs: Mapping[str, Run]
    tokens: Mapping[str, Tokens]

    @property
    def others(self) -> float:
        return max(run.others for run in self.runs.values())


def quiet(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that other processes did not disturb, or the quietest third where that is more."""
    ranked = sorted(turns, key=lambda turn: turn.others)
    calm = sum(turn.others <= QUIET for turn in ranked)
    return ranked[: max(calm, -(-len(ranked) // 3))]


class Turns:
    """Takes turns with one number of threads and one dtype. Construct it when the engines are running."""

    def __init__(self, engines: Mapping[str, Peer], vocabulary: int, threads: int, dtype: torch.dtype) -> None:
        self._engines = engines
        self._vocabulary = vocabulary
        self._threads, self._dtype = threads, dtype
        self._neighbours = Neighbours()
        self._before = self._limits()
        self._seed = 0

    def take(self, case: Case, order: Sequence[str]) -> Turn:
        """Return the quietest of up to three tries, each with prompts that no engine has seen. Raises PeerFailed."""
        tries: list[Turn] = []
        while len(tries) < _TRIES and (not tries or tries[-1].others > QUIET):
            tries.append(self._try(case, order))
        return min(tries, key=lambda turn: turn.others)

    def _try(self, case: Case, order: Sequence[str]) -> Turn:
        self._seed += 1
        prompts = case.prompts(self._vocabulary, self._seed)
        runs: dict[str, Run] = {}
        tokens: dict[str, Tokens] = {}
        for name in order:
            self._neighbours.lap()
            answer = self._engines[name].generate(prompts, case.output)
            others = self._neighbours.lap()
            after = self._limits()
            runs[name] = Run(answer.seconds, self._before.best(after), others)
            tokens[name], self._before = answer.tokens, after
        return Turn(runs, tokens)

    def _limits(self) -> Limits:
        return roofline.machine_limits(self._threads, self._dtype)
