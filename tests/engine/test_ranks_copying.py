"""Ranks copy pages beside their steps: orders by connections of their own, answers in the order of ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.vllm_runner.extension import BatonExtension
from engine.vllm_runner.ranks import CopyingRanks, RankLost, Ranks
from kvstore.checksum import join_checksums


class Rank(BatonExtension):
    """vLLM's worker. A step lasts until pages have been copied out."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.copied = threading.Event()

    def step(self) -> bool:
        return self.copied.wait(5.0)

    def baton_out(self, blocks: Sequence[int], slots: Sequence[int]) -> list[list[int]]:
        self.copied.set()
        return [[100 * self.rank + block, slot] for block, slot in zip(blocks, slots, strict=True)]


class Executor:
    """Runs one method at a time, as vLLM's does."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._busy = threading.Lock()

    def collective_rpc(self, method: str, timeout: float, args: Sequence[Any]) -> list[Any]:
        with self._busy:
            return [getattr(rank, method)(*args) for rank in self._ranks]


def three(deadline: float = 5.0) -> tuple[Ranks, list[Rank]]:
    workers = [Rank(number) for number in range(3)]
    return Ranks(Executor(workers[::-1]), 3, deadline), workers  # they connect in another order


def test_no_step_waits_for_a_copy() -> None:
    ranks, _ = three()
    copying = CopyingRanks(ranks)
    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(ranks.call, "step")
        sums = copying.checksums("baton_out", [5, 6], [7, 8])
        assert stepping.result() == [True] * 3, "the copies waited for the step"
    assert sums == [join_checksums([5, 7, 105, 7, 205, 7]), join_checksums([6, 8, 106, 8, 206, 8])]


def test_a_rank_that_fails_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: failed.set())
    ranks, workers = three()
    workers[1].baton_out = len  # type: ignore[assignment]
    with pytest.raises(RankLost, match="baton_out: a rank has failed or gone"):
        CopyingRanks(ranks).call("baton_out", [5], [7])
    assert failed.wait(5.0)


def test_a_rank_that_does_not_answer_is_lost() -> None:
    ranks, workers = three(deadline=0.2)
    stopped = threading.Event()
    workers[1].baton_out = lambda blocks, slots: [[stopped.wait(5.0)]]  # type: ignore[method-assign]
    with pytest.raises(RankLost, match="baton_out: rank 1 has not answered within 0 s"):
        CopyingRanks(ranks).call("baton_out", [5], [7])
    stopped.set()
