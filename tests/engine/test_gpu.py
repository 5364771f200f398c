"""The same engine on CUDA: one code path, so what is exact on the CPU must be exact there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.batch import Chunk, TokenDraw
from engine.engine import Engine
from tests import checkpoints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(family)
    engine = Engine.load(path, "float32", "cuda", 64, 16, head=True)
    prompt = list(range(3, 203))
    expected, gaps = checkpoints.reference(path).generate(prompt, 24)
    tokens, pages = list(prompt), list(range(20))
    engine.step([Chunk(prompt[:-1], 0, pages)])
    for token, gap in zip(expected, gaps, strict=True):
        (drawn,) = engine.step([Chunk(tokens[-1:], len(tokens) - 1, pages, TokenDraw(temperature=0.0))])
        assert drawn is not None
        assert drawn.token == token or gap < 1e-3
        tokens.append(token)


def test_a_page_survives_the_way_to_host_memory_and_back(checkpoint: Callable[[str], Path]) -> None:
    engine = Engine.load(checkpoint("llama"), "float32", "cuda", 8, 16, head=False)
    engine.step([Chunk(list(range(3, 35)), 0, [0, 1])])
    there = memoryview(bytearray(engine.layout.page_bytes))
    engine.pages.copy_out(1, there)
    engine.pages.copy_in(there, 5)
    assert torch.equal(engine.pages.view(1).cpu(), engine.pages.view(5).cpu())
