"""A rank of vLLM on a GPU that works late: our copies, duplicates and zeros around steps of its model runner."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.vllm_runner import extension
from engine.vllm_runner.extension import BatonExtension
from kvstore.arena.memory import Arena
from tests.cuda.fake_gpu import FakeGpu, Race
from tests.support.thorough import cases

BLOCKS, HEADS, LAYERS, PAGE_SIZE, WIDTH = 12, 2, 2, 16, 16
PAGE_BYTES = HEADS * LAYERS * PAGE_SIZE * WIDTH

pytestmark = pytest.mark.slow


class Rank(BatonExtension):
    """vLLM's worker. A step fills blocks, and its second model runner answers before that has run."""

    rank = 0
    use_v2_model_runner = True
    parallel_config: Any = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    cache_config: Any = SimpleNamespace(cache_dtype="fp8")
    model_config: Any = SimpleNamespace(dtype=torch.bfloat16, use_mla=False)

    def __init__(self, gpu: FakeGpu) -> None:
        pages = torch.empty(BLOCKS, HEADS, LAYERS, PAGE_SIZE, WIDTH, dtype=torch.uint8, device="cuda")
        gpu.watch_pages(pages, PAGE_BYTES)
        self.caches = list(pages.unbind(2))
        self.model_runner: Any = SimpleNamespace(kv_caches=self.caches)
        self.baton_draw: Any = SimpleNamespace(scores=dict)
        self.baton_prepare()

    def execute_model(self, order: dict[int, int]) -> None:
        for block, value in order.items():
            for cache in self.caches:
                cache[block].fill_(value)
        self.ended = torch.cuda.Event()
        self.ended.record()

    def sample_tokens(self, _: None) -> Any:
        return SimpleNamespace(get_output=self.ended.synchronize)

    def fill(self, order: dict[int, int]) -> None:
        self.baton_step(order, list(order), (), {})


def serve(seed: int, pieces: int) -> None:
    """Load pages, compute, copy within the device, and hand pages over, as orders come. Raises for a race, and for a
    wrong page."""
    with FakeGpu(seed) as gpu:
        gpu.pinnable = pieces
        rank, arena = Rank(gpu), Arena.create(2 * BLOCKS * PAGE_BYTES)
        arena.divide(PAGE_BYTES)
        for slot in range(4):
            arena.slot(slot)[:] = bytes([100 + slot]) * PAGE_BYTES
        rank.baton_attach(f"/proc/self/fd/{arena.fd}", arena.slots, arena.page_bytes, [LAYERS])
        torch.cuda.set_sync_debug_mode("error")
        rank.baton_in([0, 1, 2], [0, 1, 2], True)
        rank.fill({3: 3, 4: 4})
        rank.baton_out([0, 3, 4], [5, 6, 7])
        rank.baton_duplicate(3, 8)
        rank.baton_in([3], [3], False)
        rank.fill({4: 44})
        rank.baton_out([8, 4, 3], [8, 9, 10])
        values = {slot: set(arena.slot(slot)) for slot in range(5, 11)}
        assert values == {5: {100}, 6: {3}, 7: {4}, 8: {3}, 9: {44}, 10: {103}}


@pytest.fixture(autouse=True)
def _pages_have_their_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_form", lambda *args: "paired")


@pytest.mark.parametrize("pieces", [100, 0], ids=["pinned", "refused"])
@pytest.mark.parametrize("seed", cases(range(30), range(3)))
def test_pages_are_right_and_nothing_races(seed: int, pieces: int) -> None:
    serve(seed, pieces)


def _a_step_is_answered_before_it_ran(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rank, "sample_tokens", lambda self, _: SimpleNamespace())


def _pages_are_zeroed_beside_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeGpu, "synchronize", lambda self, device=None: None)


def _copies_in_do_not_wait_for_duplicates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.cuda.fake_gpu.Stream.wait_event", lambda self, event: None)


@pytest.mark.parametrize(
    "mistake",
    [_a_step_is_answered_before_it_ran, _pages_are_zeroed_beside_copies, _copies_in_do_not_wait_for_duplicates],
    ids=lambda mistake: mistake.__name__[1:],
)
def test_it_notices(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(Race):
        serve(0, 100)
