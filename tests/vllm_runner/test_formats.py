"""Quantized checkpoints on vLLM's runner, against the numbers that each format means, computed by transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from safetensors.torch import load_file, save_file

from baton.errors import UnsupportedModel
from engine.checkpoint.formats import read_matrix
from engine.models.config import load_spec
from engine.models.quantize import quantize
from engine.models.weights import matrices
from tests.support import adapters, checkpoints, quantized_checkpoints
from tests.vllm_runner.driver import GREEDY, Generation, likely, load, members, prompt_of, run, texts

DTYPES = {"int8": "float32", "fp8": "float32", "gptq": "float16", "awq": "float16"}
"""What each format is computed in. vLLM takes GPTQ and AWQ in 16 bits only."""
COUNT, LENGTHS = 16, (40, 70, 9)
NEAR, LIKELIEST = 0.3, 0.85
"""Logits have a deviation of 1.2, and the likeliest of 1,000 lies 3 of them above the mean. A number on the edge
between two codes may be rounded to the other one: of 700 tokens, the worst was 0.21 below the likeliest. The
fewest that were the likeliest were 43 of 48."""
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "initializer_range": 0.1}


compare = partial(likely, near=NEAR, share=LIKELIEST)


@pytest.mark.technique("Quantized weights")
@pytest.mark.parametrize("name", DTYPES)
def test_tokens_are_the_likeliest_of_the_numbers_that_are_meant(name: str, tmp_path: Path):
    path = quantized_checkpoints.make(name, tmp_path, **SIZES)
    runner = load(path, DTYPES[name])
    sequences = members(LENGTHS)
    run(runner, sequences, COUNT)
    runner.close()
    compare(quantized_checkpoints.reference(name, path), texts(sequences))


@pytest.mark.parametrize("name", DTYPES)
def test_adapters_of_quantized_checkpoints(name: str, tmp_path: Path):
    """Rows with an adapter of all products and rows without one. vLLM computes adapters beside the quantized products,
    from inputs that are not quantized."""
    path = quantized_checkpoints.make(name, tmp_path / "model", **SIZES)
    adapter = adapters.make(
        tmp_path / "adapter", quantized_checkpoints.plain(path), 9, products=adapters.ALL, scale=0.1
    )
    runner = load(path, DTYPES[name], lora_modules={"one": str(adapter)})
    (card,) = runner.adapters
    bare = members(LENGTHS)
    adapted = [
        Generation(prompt_of(n, n), range(8 * i, 8 * i + 8), GREEDY, card.digest) for i, n in enumerate(LENGTHS, 3)
    ]
    run(runner, [*bare, *adapted], COUNT)
    runner.close()
    compare(quantized_checkpoints.reference(name, path), texts(bare))
    compare(adapters.add(quantized_checkpoints.reference(name, path), adapter), texts(adapted))
    assert [one.tokens for one in bare] != [one.tokens for one in adapted]


@pytest.mark.parametrize("group", [32, 128])
def test_what_baton_quantize_writes(group: int, tmp_path: Path):
    """In 4 bits: vLLM has no kernel for 8 on CPUs."""
    plain = checkpoints.make("qwen3", tmp_path / "plain", **SIZES)
    quantize(plain, tmp_path / "int4", 4, group, False, lambda _: None)
    meant = load_file(plain / "model.safetensors")
    spec, packed = load_spec(tmp_path / "int4"), load_file(tmp_path / "int4" / "model.safetensors")
    for _, name, shape in matrices(spec):
        groups = read_matrix(spec.stored, name, shape, lambda part, *_: packed[part])
        meant[f"{name}.weight"] = groups.dense()
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    runner = load(tmp_path / "int4", "float16")
    sequences = members(LENGTHS)
    run(runner, sequences, COUNT)
    runner.close()
    compare(checkpoints.reference(plain), texts(sequences))


def test_four_bits_in_float32_are_refused(tmp_path: Path):
    path = quantized_checkpoints.make("gptq", tmp_path, hidden_size=128, head_dim=32, intermediate_size=256)
    with pytest.raises(UnsupportedModel, match=r"float32 is not supported.*gptq"):
        load(path, "float32")


def test_an_error_names_the_adapters_and_the_format(tmp_path: Path):
    path = quantized_checkpoints.make("awq", tmp_path / "model", hidden_size=128, head_dim=32, intermediate_size=256)
    adapter = adapters.make(tmp_path / "adapter", quantized_checkpoints.plain(path), 9)
    with pytest.raises(UnsupportedModel, match=r"and LoRA adapters one on awq weights: (?s:.*)float32"):
        load(path, "float32", lora_modules={"one": str(adapter)})
