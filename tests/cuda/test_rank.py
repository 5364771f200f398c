"""A rank of vLLM on a GPU that works late: our copies, duplicates and zeros around steps of its model runner."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.step.batch import TokenDraw
from engine.vllm_runner import extension
from engine.vllm_runner.draw import SecondDraw
from engine.vllm_runner.extension import BatonExtension
from engine.vllm_runner.messages import Row
from kvstore.arena.memory import Arena
from tests.cuda.fake_gpu import FakeGpu, HostWaits, Race
from tests.support.thorough import cases

BLOCKS, HEADS, LAYERS, PAGE_SIZE, WIDTH = 12, 2, 2, 16, 16
ROWS, VOCABULARY = 4, 64
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
        self.baton_draw: Any = SimpleNamespace(tell=lambda rows: None, scores=dict, launched=None)
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
        self.baton_step(order, list(order), (), {}).get_output()


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
    stands_in = SimpleNamespace(AsyncModelRunnerOutput=object, SamplerOutput=SimpleNamespace)
    for name in ("vllm.v1.outputs", "vllm.v1.worker.gpu.sample.output"):
        monkeypatch.setitem(sys.modules, name, stands_in)  # type: ignore[arg-type]


@pytest.mark.parametrize("pieces", [100, 0], ids=["pinned", "refused"])
@pytest.mark.parametrize("seed", cases(range(30), range(3)))
def test_pages_are_right_and_nothing_races(seed: int, pieces: int) -> None:
    serve(seed, pieces)


class Counting(Rank):
    """Computes logits whose likeliest token is one more than the row's last, and takes its tokens as vLLM does."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(gpu)
        last = torch.zeros(ROWS, 1, dtype=torch.int64, device="cuda")
        places = {name: row for row, name in enumerate("abcd")}
        self.model_runner.device, self.model_runner.sampler = torch.device("cuda"), None
        self.model_runner.req_states = SimpleNamespace(req_id_to_index=places, last_sampled_tokens=last)
        self.baton_draw = SecondDraw(self.model_runner)
        self.baton_draw.measured = False
        self.numbers = torch.arange(VOCABULARY, device="cuda")

    def execute_model(self, order: Any) -> None:
        last = self.model_runner.req_states.last_sampled_tokens
        self.logits = -(self.numbers - last[: len(order)] - 1).abs().float()
        self.batch = SimpleNamespace(req_ids=list(order))

    @torch.inference_mode()
    def sample_tokens(self, _: None) -> Any:
        output = self.baton_draw(self.logits, self.batch)
        states = self.model_runner.req_states
        rows = states.last_sampled_tokens[: len(self.batch.req_ids)]
        rows.copy_(torch.where(output.num_sampled[:, None] > 0, output.sampled_token_ids, rows))
        ended = torch.cuda.Event()
        ended.record()
        return SimpleNamespace(get_output=ended.synchronize)

    def launch(self, rows: Mapping[str, Row]) -> Any:
        return self.baton_step(list(rows), (), (), rows)


def count(seed: int) -> None:
    """Launch each step before the one before it is collected. Raises where a launch would wait for the device."""
    greedy, warm = TokenDraw(temperature=0.0), TokenDraw(temperature=1e-3, top_p=0.9)
    first = Row(0, True, [7], 5, (), (), greedy)
    follows, silent = replace(first, tokens=[0], follows=0), replace(first, appends=False, draw=None)
    with FakeGpu(seed) as gpu:
        rank = Counting(gpu)
        torch.cuda.set_sync_debug_mode("error")
        steps = [
            {"a": first, "b": replace(first, tokens=[20], draw=warm), "c": replace(first, tokens=[40])},
            {"a": follows, "b": replace(follows, draw=warm), "c": follows},
            {"a": follows, "b": silent, "c": follows},
            {"a": replace(first, tokens=[50]), "b": follows, "c": follows},
        ]
        under_way: deque[Any] = deque()
        drawn: list[dict[str, int]] = []
        for rows in [*steps, None, None]:
            if len(under_way) == 2 or (rows is None and under_way):
                tokens, _, corrected, *_ = under_way.popleft().get_output()
                drawn.append({name: one.token for name, (one,) in tokens.items()})
                assert corrected == []
            if rows is not None:
                under_way.append(rank.launch(rows))
    assert drawn == [
        {"a": 8, "b": 21, "c": 41}, {"a": 9, "b": 22, "c": 42}, {"a": 10, "c": 43}, {"a": 51, "b": 23, "c": 44}
    ]  # fmt: skip


@pytest.mark.parametrize("seed", cases(range(30), range(3)))
def test_a_step_takes_its_tokens_on_the_device_while_the_one_before_it_runs(seed: int) -> None:
    count(seed)


def test_it_notices_a_launch_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = SecondDraw._launch

    def waits(draw: SecondDraw, logits: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        tokens = launch(draw, logits, names)
        return tokens + tokens.sum().item() * 0

    monkeypatch.setattr(SecondDraw, "_launch", waits)
    with pytest.raises(HostWaits):
        count(0)


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
