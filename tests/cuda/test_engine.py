"""Our engine's steps, draws and copies on a GPU that does everything late and in any order: the same as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.engine
from engine.cuda.draws import _MaskedDraws
from engine.device.uploads import Download
from engine.engine import Engine
from engine.step.batch import Chunk, Sampled, TokenDraw
from engine.step.block_table import BlockTable
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopyIn
from kvstore.layout import PageLayout
from tests.cuda.fake_gpu import FakeGpu, HostWaits, Race
from tests.engine import test_engine_gpu
from tests.support import checkpoints
from tests.support.thorough import cases

pytestmark = pytest.mark.slow

PROMPTS = list(range(3, 43)), list(range(50, 70))
DRAWS = TokenDraw(temperature=0.0), TokenDraw(temperature=0.9, top_p=0.9, seed=4, logprobs=2)
COUNT = 4  # tokens of each output

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """As everywhere, with two layers."""
    return cache(lambda name: checkpoints.make(name, tmp_path_factory.mktemp(name), num_hidden_layers=2))


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> list[list[Sampled]]:
    """What a CPU draws for each prompt."""
    cpu = Engine.load(checkpoint("llama"), "float32", "cpu", 64, 16, True, 1, native=False)
    outputs: list[list[Sampled]] = []
    for prompt, draw in zip(PROMPTS, DRAWS, strict=True):
        tokens, drawn = list(prompt), list[Sampled]()
        for _ in range(COUNT):
            (one,) = cpu.step([Chunk(tokens, 0, list(range(8)), draw)])
            assert one is not None
            drawn.append(one)
            tokens.append(one.token)
        outputs.append(drawn)
    return outputs


@pytest.fixture(autouse=True)
def _pools_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(num_pages: int, layout: PageLayout, device: str) -> torch.Tensor:
        pool = right(num_pages, layout, device)
        if (gpu := FakeGpu.current) is not None:
            gpu.watch_pages(pool, layout.page_bytes)
        return pool

    right = engine.engine._make_pool
    monkeypatch.setattr(engine.engine, "_make_pool", make)


def steps_ahead(checkpoint: Checkpoint, expected: list[list[Sampled]]) -> None:
    """Launch each step before the one before it is collected. Raises where its tokens are not those of a CPU."""
    gpu = Engine.load(checkpoint("llama"), "float32", "cuda", 64, 16, head=True)
    tables = BlockTable(range(8)), BlockTable(range(8, 16))
    ends = [len(prompt) for prompt in PROMPTS]
    torch.cuda.set_sync_debug_mode("error")
    running = gpu.launch([Chunk(*each) for each in zip(PROMPTS, (0, 0), tables, DRAWS, strict=True)])
    for number in range(COUNT):
        ahead = gpu.launch(
            [
                Chunk([0], end + number, table, draw, follows=place)
                for place, (end, table, draw) in enumerate(zip(ends, tables, DRAWS, strict=True))
            ]
        )
        running.done()
        for one, right in zip(running.wait().sampled, (drawn[number] for drawn in expected), strict=True):
            assert one.token == right.token
            assert one.logprob == (None if right.logprob is None else pytest.approx(right.logprob, abs=1e-4))
        running = ahead


@pytest.mark.parametrize("seed", cases(range(20), range(2)))
def test_steps_ahead_draw_the_tokens_of_a_cpu(seed: int, checkpoint: Checkpoint, expected: list[list[Sampled]]) -> None:
    with FakeGpu(seed):
        steps_ahead(checkpoint, expected)


@pytest.mark.parametrize("seed", cases(range(20), range(2)))
def test_masked_draws_come_beside_a_step_ahead(seed: int, checkpoint: Checkpoint) -> None:
    with FakeGpu(seed):
        test_engine_gpu.test_masked_draws_come_beside_a_step_ahead(checkpoint)


@pytest.mark.parametrize("pins", [True, False])
def test_pages_move_beside_steps(pins: bool, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGpu(1):
        test_engine_gpu.test_pages_move_beside_steps(pins, checkpoint, monkeypatch)


def test_experts_wait_for_nothing(checkpoint: Checkpoint) -> None:
    with FakeGpu(2):
        test_engine_gpu.test_experts_wait_for_nothing("float32", checkpoint)


def fail(checkpoint: Checkpoint) -> None:
    """Copy into pages of a step that could not be launched as a whole."""
    gpu = Engine.load(checkpoint("llama"), "float32", "cuda", 64, 16, head=True)
    arena = Arena.create(2 * gpu.layout.page_bytes)
    arena.divide(gpu.layout.page_bytes)
    mover = gpu.mover(verify=False)
    mover.attach(arena)

    def full(hidden: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room for logits")

    gpu._model.logits = full  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        gpu.launch([Chunk(PROMPTS[0], 0, list(range(3)), DRAWS[0])])
    mover.start([CopyIn(1, 0, 0, 1, 0)]).wait()
    assert mover.close()


def test_what_lies_in_the_stream_of_a_step_that_failed_has_ended(checkpoint: Checkpoint) -> None:
    with FakeGpu(0):
        fail(checkpoint)


def _beside_waits_for_no_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.cuda.fake_gpu.Stream.wait_event", lambda self, event: None)


def _logits_are_dropped(patch: pytest.MonkeyPatch) -> None:
    def launch(self: Any) -> None:
        right(self)
        self._logits = self._launched._raw = self._launched._logits = None

    right = _MaskedDraws._launch
    patch.setattr(_MaskedDraws, "_launch", launch)


def _a_download_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Download, "wait", lambda self: self._tensor.cpu().numpy())


def _an_upload_is_pageable(patch: pytest.MonkeyPatch) -> None:
    def upload(array: Any, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    patch.setattr("engine.cuda.draws.upload", upload)


def _a_failed_step_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeGpu, "synchronize", lambda self, device=None: None)


MISTAKES = [
    (_beside_waits_for_no_event, Race, test_engine_gpu.test_masked_draws_come_beside_a_step_ahead),
    (_logits_are_dropped, Race, test_engine_gpu.test_masked_draws_come_beside_a_step_ahead),
    (_a_download_is_not_awaited, Race, test_engine_gpu.test_masked_draws_come_beside_a_step_ahead),
    (_an_upload_is_pageable, HostWaits, test_engine_gpu.test_masked_draws_come_beside_a_step_ahead),
    (_a_failed_step_goes_on, Race, fail),
]


@pytest.mark.parametrize(("mistake", "error", "check"), MISTAKES, ids=[each[0].__name__[1:] for each in MISTAKES])
def test_it_notices(
    mistake: Callable[[pytest.MonkeyPatch], None],
    error: type[Exception],
    check: Callable[[Checkpoint], None],
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistake(monkeypatch)
    with pytest.raises(error), FakeGpu(0):
        check(checkpoint)
