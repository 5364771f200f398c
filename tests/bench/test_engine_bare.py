"""The bare engine's loop: its tokens are those of one prompt at a time, its steps those of a decode worker."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from bench import bare, random_model
from engine.engine import Engine
from engine.step.batch import Chunk, Sampled

PAGE_SIZE = 16


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    checkpoint: Path = tmp_path_factory.mktemp("tiny")
    random_model.write(checkpoint)
    return Engine.load(checkpoint, "float32", "cpu", 64, PAGE_SIZE, head=True, threads=1)


def test_a_batch_has_the_tokens_of_its_prompts_alone(engine: Engine) -> None:
    prompts = [list(range(2, 2 + length)) for length in (1, 15, 40, 70)]
    together = bare.generate_batch(engine, prompts, 5, max_num_batched_tokens=32)
    assert together == [bare.generate_batch(engine, [prompt], 5, max_num_batched_tokens=512)[0] for prompt in prompts]


def test_steps_are_full_and_those_that_decode_come_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[tuple[int, int, bool]]] = []
    run = Engine.step

    def step(self: Engine, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        steps.append([(chunk.start, len(chunk.tokens), chunk.sample is not None) for chunk in chunks])
        return run(self, chunks)

    monkeypatch.setattr(Engine, "step", step)
    bare.generate_batch(engine, [list(range(2, 14)), list(range(2, 32))], 2, max_num_batched_tokens=16)
    assert steps == [[(0, 12, True), (0, 4, False)], [(12, 1, True), (4, 15, False)], [(19, 11, True)], [(30, 1, True)]]


def test_streams_begin_together_and_every_step_has_a_token_of_each(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[tuple[int, int]]] = []
    run = Engine.step

    def step(self: Engine, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        steps.append([(chunk.start, len(chunk.tokens)) for chunk in chunks])
        return run(self, chunks)

    monkeypatch.setattr(Engine, "step", step)
    went = bare.generate(engine, [list(range(2, 14)), [5]], 3)
    assert steps == [[(0, 11)], [(11, 1), (0, 1)], [(12, 1), (1, 1)], [(13, 1), (2, 1)]]
    assert len(went.times) == 3
    assert went.gaps == [later - earlier for earlier, later in pairwise(went.times)]
