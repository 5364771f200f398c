"""`model.quantization` on our own engine: the bits of the checkpoint that `baton quantize` writes, or a refusal."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import load
from baton.errors import ConfigError, UnsupportedModel
from engine.checkpoint import rounding
from engine.cpu import build
from engine.engine import Engine, linear_maker, quantization_lack
from engine.models.config import load_spec, parse_spec
from engine.models.memory import weight_bytes
from engine.models.quantize import quantize
from engine.spec import QUANTIZED_AT_LOAD
from engine.step.batch import Chunk, TokenDraw
from engine.vllm_runner import VLLM_VERSION
from engine.vllm_runner.requirements import Installation
from tests.engine.driver import generate, prompt_of
from tests.support import checkpoints
from worker.engine_choice import engine_facts, engine_of

pytestmark = pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: refused there")

SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "initializer_range": 0.1}
FAMILIES = ("llama", "llama-bias", "mistral", "qwen2", "qwen3", "phi3", "gemma3", "mixtral", "qwen3-moe")
FORMATS = list(QUANTIZED_AT_LOAD)

Maker = Callable[[str], Path]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    def make(recipe: str) -> Path:
        experts: dict[str, Any] = {"moe_intermediate_size": 128} if recipe == "qwen3-moe" else {}
        return checkpoints.make(recipe, tmp_path_factory.mktemp("model") / recipe, **SIZES, **experts)

    return cache(make)


@pytest.fixture(scope="module")
def written(plain: Maker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`written(recipe, format)`: the checkpoint that `baton quantize` makes."""

    def make(recipe: str, form: str) -> Path:
        out = tmp_path_factory.mktemp("quantized") / form
        quantize(plain(recipe), out, QUANTIZED_AT_LOAD[form], 128, False, lambda _: None)
        return out

    return cache(make)


def engine(path: Path, dtype: str = "float32", head: bool = True, **more: Any) -> Engine:
    return Engine.load(path, dtype, "cpu", 9, 16, head, threads=1, **more)


def logits(one: Engine) -> torch.Tensor:
    """Of the last of 50 tokens, in the order of the vocabulary."""
    (sampled,) = one.step([Chunk(prompt_of(50), 0, range(4), TokenDraw(temperature=0, logprobs=one.vocab_size))])
    assert sampled is not None
    return torch.tensor([value for _, value in sorted(sampled.top)])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_its_bits_are_those_of_the_checkpoint_that_baton_quantize_writes(
    family: str, form: str, plain: Maker, written: Callable[[str, str], Path]
):
    ours, theirs = engine(plain(family), quantization=form), engine(written(family, form))
    assert torch.equal(logits(ours), logits(theirs))
    assert generate(ours, prompt_of(60, seed=3), 30, [7, 30, 1]) == generate(theirs, prompt_of(60, seed=3), 30)
    assert torch.equal(ours.pool, theirs.pool)
    assert ours.numerics == theirs.numerics
    assert f"-{form}/" in ours.numerics


@pytest.mark.parametrize("form", FORMATS)
def test_they_are_in_bfloat16_too(form: str, plain: Maker, written: Callable[[str, str], Path]):
    ours, theirs = engine(plain("llama"), "bfloat16", quantization=form), engine(written("llama", form), "bfloat16")
    assert torch.equal(logits(ours), logits(theirs))


def test_numbers_are_rounded_in_the_dtype_that_the_model_was_published_in(plain: Maker, tmp_path: Path):
    """A checkpoint in float32 whose config says bfloat16."""
    source = tmp_path / "published"
    source.mkdir()
    for file in plain("llama").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    raw = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(raw))
    quantize(source, tmp_path / "out", 4, 128, False, lambda _: None)
    assert torch.equal(logits(engine(source, quantization="int4")), logits(engine(tmp_path / "out")))


def test_pages_of_other_formats_have_other_names(plain: Maker):
    path = plain("llama")
    forms = ("", *FORMATS)
    assert len({engine(path, quantization=form).fingerprint for form in forms}) == len(forms)
    assert len({engine(path, quantization=form, kv_cache_dtype="int8").fingerprint for form in forms}) == len(forms)
    for form in forms:
        assert engine(path, head=False, quantization=form).fingerprint == engine(path, quantization=form).fingerprint


def test_other_weights_are_quantized_when_they_replace_these(plain: Maker, tmp_path: Path):
    other = checkpoints.make("llama", tmp_path / "other", **SIZES, seed=7)
    one, fresh = engine(plain("llama"), quantization="int4"), engine(other, quantization="int4")
    one.reload(other)
    assert one.fingerprint == fresh.fingerprint
    assert torch.equal(logits(one), logits(fresh))


def test_the_estimate_of_memory_knows_the_format(plain: Maker, written: Callable[[str, str], Path]):
    spec = load_spec(plain("llama"))
    estimates: list[int] = []
    for form in FORMATS:
        at_load = weight_bytes(spec, torch.bfloat16, linear_maker("cpu", spec, form))
        stored = load_spec(written("llama", form))
        assert at_load == weight_bytes(stored, torch.bfloat16, linear_maker("cpu", stored))
        estimates.append(at_load)
    assert weight_bytes(spec, torch.bfloat16, linear_maker("cpu", spec)) > estimates[0] > estimates[1]


RAW: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
STORED = {"quantization_config": rounding.settings(8, 128, None, [])}


@pytest.mark.parametrize(
    ("form", "more", "settings", "device", "why"),
    [
        ("int8", {}, {}, "cpu", ""),
        ("int4", {}, {"dtype": "bfloat16"}, "cpu", ""),
        ("int8", {}, {}, "cuda:0", "quantizes weights on CPUs only"),
        ("int8", STORED, {}, "cpu", "quantized already .compressed-tensors"),
        ("int4", {}, {"dtype": "float16"}, "cpu", "not in float16: set model.dtype"),
        ("int4", {}, {"native": False}, "cpu", "model.native is false"),
        ("int4", {"hidden_size": 64, "intermediate_size": 192}, {}, "cpu", "a multiple of 128 inputs"),
        ("fp8", {}, {}, "cpu", "only vLLM's runner has that"),
    ],
)
def test_what_can_not_be_quantized_is_refused_by_name(
    form: str, more: dict[str, Any], settings: dict[str, Any], device: str, why: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(RAW | more))
    changes = {f"model.{name}": value for name, value in settings.items()}
    config = load(None, {"model.quantization": form, "pages.page_size": 32, **changes})
    if not why:
        assert engine_of(config, tmp_path, [device]).engine == "native"
        return
    with pytest.raises(ConfigError, match=f"model.quantization is {form}.*{why}"):
        engine_of(config, tmp_path, [device])


def test_a_model_that_our_kernels_do_not_compute_is_refused():
    spec = parse_spec(RAW)
    first = replace(spec.layers[0], rope=replace(spec.layers[0].rope, rotated=8))
    mixed = replace(spec, layers=(first, *spec.layers[1:]))
    assert not quantization_lack(spec, "cpu", "float32", True, "int8")
    assert "don't compute this model of the family llama" in quantization_lack(mixed, "cpu", "float32", True, "int8")


def test_the_engine_refuses_it_by_itself(plain: Maker, written: Callable[[str, str], Path]):
    with pytest.raises(UnsupportedModel, match="quantized already"):
        engine(written("llama", "int8"), quantization="int4")
    with pytest.raises(UnsupportedModel, match="fp8, and our own engine has int8 and int4"):
        engine(plain("llama"), quantization="fp8")


@pytest.mark.parametrize(("form", "lack"), [("int8", ""), ("fp8", ""), ("int4", "baton quantize")])
def test_vllm_is_given_what_it_has_on_gpus(form: str, lack: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    config = load(None, {"model.quantization": form, "model.engine": "vllm"})
    reason = engine_facts(config, tmp_path, ["cuda"], Installation(VLLM_VERSION)).vllm_lack
    assert lack in reason
    assert bool(lack) == bool(reason)
