"""Quantized checkpoints on vLLM's runner, against the numbers that each format means, computed by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from baton.errors import UnsupportedModel
from engine.vllm_runner.runner import VllmRunner
from tests import quantized
from tests.vllm_runner.test_runner import PAGE, PAGES, ROWS, TOKENS, Generation, prompt_of, run

DTYPES = {"int8": "float32", "fp8": "float32", "gptq": "float16", "awq": "float16"}
"""What each format is computed in. vLLM takes GPTQ and AWQ in 16 bits only."""
COUNT, LENGTHS = 16, (40, 70, 9)
NEAR, LIKELIEST = 0.1, 0.9  # logits have a deviation of 1.2, and the likeliest of 1,000 lies 3 of them above the mean


def load(path: Path, dtype: str) -> VllmRunner:
    return VllmRunner.load(path, dtype, PAGES, PAGE, max_rows=ROWS, max_tokens=TOKENS, threads=1, eager=True)


@pytest.mark.parametrize("name", DTYPES)
def test_tokens_are_the_likeliest_of_the_numbers_that_are_meant(name: str, tmp_path: Path):
    """A number on the edge between two codes may be rounded to the other one, so near ties may end otherwise."""
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "initializer_range": 0.1}
    path = quantized.make(name, tmp_path, **sizes)
    reference, runner = quantized.reference(name, path), load(path, DTYPES[name])
    sequences = [Generation(prompt_of(length, length), range(8 * i, 8 * i + 8)) for i, length in enumerate(LENGTHS)]
    run(runner, sequences, COUNT)
    runner.close()
    likeliest = 0
    for length, one in zip(LENGTHS, sequences, strict=True):
        drawn = [sampled.token for sampled in one.drawn]
        logits = reference.logits(one.tokens)[length - 1 : -1]
        lost = logits.amax(dim=-1) - logits[range(COUNT), drawn]
        assert lost.max() < NEAR
        likeliest += int((lost == 0).sum())
        assert len(set(drawn)) > COUNT // 2
    assert likeliest >= LIKELIEST * COUNT * len(LENGTHS)


def test_four_bits_in_float32_are_refused(tmp_path: Path):
    path = quantized.make("gptq", tmp_path, hidden_size=128, head_dim=32, intermediate_size=256)
    with pytest.raises(UnsupportedModel, match=r"float32 is not supported.*gptq"):
        load(path, "float32")
