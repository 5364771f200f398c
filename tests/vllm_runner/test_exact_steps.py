"""Bits of pages and logits in bfloat16, whatever else a step has and wherever chunks end. Needs vLLM's environment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from bench import models
from engine.step.batch import Chunk, TokenDraw
from engine.step.block_table import BlockTable
from engine.vllm_runner.runner import VllmRunner
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopiedOut, CopyOut
from tests.support import checkpoints
from tests.vllm_runner.driver import PAGE, load, prompt_of

LENGTH, DRAWN = 420, 8  # tokens, of which the last ones are drawn after
COVERING = -(-LENGTH // PAGE)
FULL = LENGTH // PAGE
PROMPT = prompt_of(LENGTH, 1)
DRAW = TokenDraw(temperature=0.0, logprobs=64)

Bits = tuple[bytes, dict[int, object]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide(tmp_path_factory.mktemp("wide"))


def wide(folder: Path) -> Path:
    """A checkpoint that is large enough that products of one row take another kernel than those of several.

    Its `o_proj` is small enough for a kernel of its own on a CPU with AMX.
    """
    config = models.LLAMA_100M | {"vocab_size": checkpoints.VOCAB, "num_hidden_layers": 8, "num_attention_heads": 8}
    return models.write_shape(folder, config)


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def runner(path: Path, request: pytest.FixtureRequest) -> Iterator[VllmRunner]:
    with closing(load(path, "bfloat16", threads=2, eager=request.param)) as result:
        yield result


def serve(runner: VllmRunner, ends: list[int], companions: int, seed: int) -> Bits:
    """Compute the prompt in chunks with these ends, each step with up to so many others. Return its pages, and the
    likeliest tokens by position."""
    rng, table = random.Random(seed), BlockTable()
    table.extend(rng.sample(range(32), COVERING))
    tops: dict[int, object] = {}
    for start, end in pairwise([0, *ends]):
        draw = DRAW if end > LENGTH - DRAWN else None
        chunks = [Chunk(PROMPT[start:end], start, table, draw)]
        for number in range(rng.randint(min(companions, 1), companions)):
            size = rng.choice((1, 5, 40))
            chunks.append(Chunk(prompt_of(size, rng.randrange(99)), 0, [40 + 2 * number, 41 + 2 * number]))
        rng.shuffle(chunks)
        at = next(number for number, chunk in enumerate(chunks) if chunk.pages is table)
        if (sampled := runner.launch(chunks).wait().sampled[at]) is not None:
            tops[end] = sampled.top
    arena = Arena.create(FULL * runner.layout.page_bytes)
    arena.divide(runner.layout.page_bytes)
    mover = runner.mover(verify=False)
    mover.attach(arena)
    copied = mover.start([CopyOut(1, index, table[index], index) for index in range(FULL)]).wait()
    assert isinstance(copied, CopiedOut)
    return bytes(arena.view[: FULL * runner.layout.page_bytes]), tops


def ends_of(sizes: tuple[int, ...], seed: int) -> list[int]:
    """Ends of chunks of some of these sizes, then of one token each for what is drawn after."""
    rng, ends = random.Random(seed), [0]
    while ends[-1] < LENGTH - DRAWN:
        ends.append(min(ends[-1] + rng.choice(sizes), LENGTH - DRAWN))
    return [*ends[1:], *range(LENGTH - DRAWN + 1, LENGTH + 1)]


def test_bits_depend_on_no_companions_and_no_borders(runner: VllmRunner) -> None:
    right = serve(runner, ends_of((200,), 0), 3, 0)
    assert len(right[1]) == DRAWN
    same: dict[object, tuple[bool, bool]] = {}
    for sizes, companions in (((200,), 0), ((200,), 3), ((1, 3, 32, 45, 100), 0), ((1, 3, 32, 45, 100), 3), ((7,), 0)):
        for seed in (1, 2):
            pages, tops = serve(runner, ends_of(sizes, seed), companions, seed)
            same[sizes, companions, seed] = (pages == right[0], tops == right[1])
    assert not {case: each for case, each in same.items() if not all(each)}, "(sizes, companions, seed): pages, tokens"


@pytest.mark.parametrize("runner", [True], ids=["eager"], indirect=True)
def test_bits_do_not_depend_on_threads(path: Path, runner: VllmRunner) -> None:
    with closing(load(path, "bfloat16", threads=1)) as other:
        assert serve(other, ends_of((45, 100), 3), 2, 3) == serve(runner, ends_of((45, 100), 4), 0, 4)
