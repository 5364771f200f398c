"""What Baton adds to vLLM's worker, without vLLM."""

import random
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.device.page_pool import PagePool
from engine.step.batch import TokenDraw
from engine.vllm_runner import extension
from engine.vllm_runner.draw import FirstDraw
from engine.vllm_runner.extension import BatonExtension
from engine.vllm_runner.messages import Row
from kvstore.arena.memory import Arena
from kvstore.checksum import head_checksums, join_checksums, page_checksum
from tests.support.threaded_device import ThreadedCopies

BLOCKS, HEADS, LAYERS, PAGE_SIZE, HEAD_DIM = 12, 2, 3, 16, 8
PART = HEADS * LAYERS * PAGE_SIZE * 2 * HEAD_DIM * 2  # bytes of a page that one of two ranks has


class GpuRank(BatonExtension):
    """One of two ranks, with a GPU whose copies are late. Its driver pins so many pieces of the arena."""

    def __init__(self, rank: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = rank
        self.parallel_config: Any = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
        self.cache_config: Any = SimpleNamespace(cache_dtype="auto")
        self.model_config: Any = SimpleNamespace(dtype=torch.bfloat16, use_mla=False)
        self.baton_draw: Any = SimpleNamespace()
        self.use_v2_model_runner = False
        pages = torch.zeros(BLOCKS, HEADS, LAYERS, PAGE_SIZE, 2 * HEAD_DIM, dtype=torch.bfloat16)
        self.model_runner: Any = SimpleNamespace(kv_caches=list(pages.unbind(2)))
        self.pool = PagePool(pages, PART, HEADS)
        self.copies: Any = ThreadedCopies(self.pool, pieces, slowest=0.001)
        self.copies.duplicate = self.pool.duplicate
        monkeypatch.setattr(extension, "die_with_parent", lambda: None)
        monkeypatch.setattr(extension, "_form", lambda *args: "paired")
        monkeypatch.setattr(extension, "_copies", lambda blocks: self.copies)
        assert self.baton_prepare()["beside"]

    def page(self, number: int) -> bytes:
        return bytes(self.pool.view(number).numpy())


@pytest.mark.parametrize("pieces", [1, 0], ids=["pinned", "refused"])
def test_pages_of_a_gpu_go_through_pinned_memory(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """Each rank copies and hashes its own heads, on the mover's threads and never on the one that runs steps."""
    arena = Arena.create(BLOCKS * 2 * PART)
    arena.divide(2 * PART)
    ranks = [GpuRank(rank, pieces, monkeypatch) for rank in range(2)]
    content, order = random.Random(5), list(range(BLOCKS))
    hashing: set[str] = set()

    def hashed(part: Any, heads: int) -> list[int]:
        hashing.add(threading.current_thread().name.rpartition("_")[0])
        return head_checksums(part, heads)

    monkeypatch.setattr("engine.cuda.mover.head_checksums", hashed)
    content.shuffle(order)
    for rank in ranks:
        rank.baton_attach(f"/proc/self/fd/{arena.fd}", arena.slots, arena.page_bytes, [LAYERS])
        rank._baton_mover._pinning.submit(lambda: None).result()  # pinning has ended
        for page in range(BLOCKS):
            rank.pool.view(page)[:] = torch.frombuffer(bytearray(content.randbytes(PART)), dtype=torch.uint8)
    sums = [rank.baton_out(range(BLOCKS), order) for rank in ranks]
    for block, slot in enumerate(order):
        page = b"".join(rank.page(block) for rank in ranks)
        assert bytes(arena.slot(slot)) == page
        assert join_checksums([head for rank in sums for head in rank[block]]) == page_checksum(page, 2 * HEADS)
    before = [rank.page(0) for rank in ranks]
    assert [rank.baton_in(order, range(BLOCKS), True) for rank in ranks] == sums
    assert [rank.baton_in(order[1:], range(BLOCKS - 1), False) for rank in ranks] == [[[]] * (BLOCKS - 1)] * 2
    assert [rank.page(0) for rank in ranks] != before
    assert all(bool(rank.copies.pinned) == bool(pieces) for rank in ranks)
    assert all(bool(rank.copies.staged) == (not pieces) for rank in ranks)
    assert hashing <= {"copies-out", "copies-in"}
    arena.close()


def test_a_step_without_draws_ends_when_the_device_has_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's second model runner answers at once, with an output to wait for."""
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", SimpleNamespace(AsyncModelRunnerOutput=object))  # type: ignore[arg-type]
    waited: list[bool] = []
    worker: Any = BatonExtension()
    worker.baton_draw = SimpleNamespace(tell=lambda rows: None, scores=dict, launched=None, drawn={})
    worker.execute_model = lambda order: None
    worker.sample_tokens = lambda grammar: SimpleNamespace(get_output=lambda: waited.append(True))
    worker.use_v2_model_runner = True
    launched = worker.baton_step(None, (), (), {})
    assert waited == []
    assert launched.get_output() == ({}, {}, (), {}, 0.0)
    assert waited == [True]
    worker.use_v2_model_runner, worker.sample_tokens = False, lambda grammar: SimpleNamespace()
    worker.model_runner = SimpleNamespace()
    assert worker.baton_step(None, (), (), {}) == ({}, {}, (), {}, 0.0)


def test_what_vllm_measures_is_our_draw_of_all_rows() -> None:
    """Its profile runs its sampler over as many rows as a step may have, and names none of them."""
    runner = SimpleNamespace(sampler=None, device=torch.device("cpu"), input_batch=SimpleNamespace(req_ids=[]))
    draw = FirstDraw(runner)
    assert draw._tokens(torch.rand(5, 40), draw.names).shape == (5, 1)
    assert len(draw.drawn) == 5
    assert all(draw.rows[name].draw.logprobs for name in draw.drawn)
    silent, greedy = Row(1, False, [0], 6, (), (), None), TokenDraw(temperature=0.0)
    draw.measured, draw.rows, draw.drawn = False, {"a": silent, "b": replace(silent, draw=greedy), "c": silent}, {}
    assert draw._tokens(torch.eye(3), ["a", "b", "c"]).tolist() == [[0], [1], [0]]
    assert list(draw.drawn) == ["b"]


def test_proposals_count_up_to_the_first_that_is_not_drawn() -> None:
    """Each row is drawn from its own logits: here token n follows hidden state n."""
    greedy = TokenDraw(temperature=0.0)
    model = SimpleNamespace(compute_logits=lambda hidden: torch.eye(16)[hidden])
    runner = SimpleNamespace(
        sampler=None, device=torch.device("cpu"), model=model, input_batch=SimpleNamespace(req_ids=["a", "b", "c", "d"])
    )
    draw = FirstDraw(runner)
    right = Row(1, True, [9, 2, 3], 0, (), (), greedy, verify=[greedy, greedy])
    wrong = replace(right, tokens=[9, 5, 8])
    draw.measured, draw.hidden = False, torch.tensor([0, 2, 3, 4, 5, 6, 7, 7, 1, 5, 6])
    single = Row(2, True, [1], 9, (), (), greedy)
    draw.rows = {"a": single, "b": right, "c": replace(single, tokens=[1] * 4, draw=None), "d": wrong}
    tokens = draw._tokens(torch.zeros(4, 16), ["a", "b", "c", "d"]).tolist()
    assert tokens == [[0, -1, -1], [2, 3, 4], [0, -1, -1], [1, -1, -1]]
    assert {name: [one.token for one in each] for name, each in draw.drawn.items()} == {
        "a": [0],
        "b": [2, 3, 4],
        "d": [1],
    }
