"""Quantized checkpoints on our own engine: each format is exactly the numbers that it stands for."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import CorruptWeights, UnsupportedModel
from engine.cpu import build
from engine.cpu.packed_linear import PackedLinears
from engine.engine import Engine
from engine.models import weights
from engine.models.config import load_spec
from engine.models.memory import weight_bytes
from tests.engine.driver import assert_same_tokens, generate, prompt_of
from tests.support import quantized_checkpoints

FORMATS = list(quantized_checkpoints.FORMATS)
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "initializer_range": 0.1}
UP = "model.layers.0.mlp.up_proj"

Quantized = Callable[..., Path]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """`quantized(format, recipe="llama")`: a checkpoint; beside it lies the plain one that it stands for."""

    @cache
    def checkpoint_of(name: str, recipe: str = "llama") -> Path:
        return quantized_checkpoints.make(name, tmp_path_factory.mktemp("model") / name, recipe, **SIZES)

    return checkpoint_of


def load(path: Path, *, native: bool = True, dtype: str = "float32") -> Engine:
    return Engine.load(path, dtype, "cpu", 9, 16, True, threads=1, native=native)


def all_matrices(path: Path) -> dict[str, torch.Tensor]:
    """The products of the checkpoint in `path` as the loader reads them, in float32."""
    spec = load_spec(path)
    read: dict[str, torch.Tensor] = {}

    class Maker:
        stacks_experts = False
        bits = 0

        def copies(self, dtype: torch.dtype) -> bool:
            return True

        def keeps(self, groups: Any, dtype: torch.dtype) -> bool:
            return False

        def linear(self, weight: Any) -> Any:
            read[str(len(read))] = weight.weight
            return weight

        def mlp(self, gate: Any, up: Any, down: Any) -> Any:
            return self.linear(gate), (self.linear(up), self.linear(down))

    weights.load(path, spec, torch.float32, torch.device("cpu"), True, Maker())
    return read


@pytest.mark.parametrize("recipe", ["llama", "phi3"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_the_numbers_that_it_stands_for(name: str, recipe: str, quantized: Quantized):
    path = quantized(name, recipe)
    ours, meant = all_matrices(path), all_matrices(quantized_checkpoints.plain(path))
    assert ours.keys() == meant.keys()
    assert len(ours) > 5
    for product, weight in ours.items():
        assert torch.equal(weight, meant[product]), product


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_has_the_tokens_of_these_numbers(name: str, native: bool, quantized: Quantized):
    path = quantized(name)
    ours, plain = load(path, native=native), load(quantized_checkpoints.plain(path))
    prompt = prompt_of(60, seed=3)
    expected, gaps = quantized_checkpoints.checkpoints.reference(quantized_checkpoints.plain(path)).generate(prompt, 40)
    assert_same_tokens(generate(ours, prompt, 40, [7, 30, 1]), expected, gaps)
    assert ours.fingerprint != plain.fingerprint


def test_the_last_blocks_of_fp8_may_be_smaller(tmp_path: Path):
    path = quantized_checkpoints.make(
        "fp8-blocks", tmp_path, "llama", **SIZES | {"hidden_size": 160, "intermediate_size": 192}
    )
    ours, meant = all_matrices(path), all_matrices(quantized_checkpoints.plain(path))
    assert all(torch.equal(weight, meant[product]) for product, weight in ours.items())
    prompt = prompt_of(60, seed=3)
    expected, gaps = quantized_checkpoints.reference("fp8-blocks", path).generate(prompt, 40)
    assert_same_tokens(generate(load(path), prompt, 40, [7, 30, 1]), expected, gaps)


@pytest.mark.parametrize("inner", [128, 96])
@pytest.mark.parametrize("name", ["gptq-act-order", "fp8-blocks"])
def test_experts_have_the_tokens_of_their_numbers(name: str, inner: int, tmp_path: Path):
    path = quantized_checkpoints.make(name, tmp_path, "qwen3-moe", **SIZES, moe_intermediate_size=inner)
    prompt = prompt_of(60, seed=3)
    expected, gaps = quantized_checkpoints.reference(name, path).generate(prompt, 40)
    assert_same_tokens(generate(load(path), prompt, 40, [7, 30, 1]), expected, gaps)


@pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: torch does the work here")
@pytest.mark.parametrize(
    ("name", "dtype", "numerics"),
    [
        ("int8", "bfloat16", "native-2-int8/"),
        ("int4", "float32", "native-2-int4/"),
        ("awq", "bfloat16", "native-2-int4/"),
        ("fp8", "float32", "native-2-fp8/"),
        ("fp8-blocks", "bfloat16", "native-2-fp8/"),
        ("gptq-act-order", "bfloat16", "native-2-int4/"),
        ("int4", "float16", "torch-"),
    ],
)
def test_the_class_of_numerics_names_what_kernels_compute_with(
    name: str, dtype: str, numerics: str, quantized: Quantized
):
    assert load(quantized(name), dtype=dtype).numerics.startswith(numerics)


def test_weights_in_few_bits_take_little_memory(quantized: Quantized):
    spec = load_spec(quantized("int4"))
    packed, dense = (weight_bytes(spec, torch.bfloat16, PackedLinears(groups=groups)) for groups in (True, False))
    plain = 2 * (spec.vocab_size * spec.hidden_size + (2 * spec.num_layers + 1) * spec.hidden_size)
    assert packed - plain * 2 < 0.3 * (dense - plain * 2)


def broken(path: Path, to: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Path:
    """Copy a checkpoint with one tensor changed, or left out."""
    to.mkdir()
    for file in path.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize("name", FORMATS)
def test_each_tensor_must_be_there_and_have_its_shape(name: str, quantized: Quantized, tmp_path: Path):
    path = quantized(name)
    parts = [each for each in load_file(path / "model.safetensors") if each.startswith(UP)]
    assert len(parts) > 1
    for number, part in enumerate(parts):
        for way, change in enumerate((None, lambda tensor: tensor[:-1])):
            wrong = broken(path, tmp_path / f"{number}-{way}", part, change)
            with pytest.raises(CorruptWeights, match=part):
                load(wrong)


def no_number(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() * float("nan")).to(tensor.dtype)


@pytest.mark.parametrize(
    ("name", "part", "change", "why"),
    [
        ("gptq-act-order", "g_idx", lambda groups: groups + 1, "beyond the 4"),
        ("gptq-act-order", "g_idx", lambda groups: groups * 0, "more than 32"),
        ("int4-act-order", "weight_g_idx", lambda groups: groups - 1, "beyond the 4"),
        ("int4", "weight_shape", lambda shape: shape * 2, "says .512, 256., the config .256, 128."),
        ("int4", "weight_packed", lambda codes: codes.float(), "is F32; known: I32"),
        ("int8", "weight_scale", no_number, "no finite"),
        ("fp8", "weight_scale", no_number, "no finite"),
        ("fp8", "weight", no_number, "no numbers"),
        ("fp8-blocks", "weight", no_number, "no numbers"),
        ("fp8-blocks", "weight_scale_inv", no_number, "no finite"),
        ("mxfp4", "weight_scale", lambda scale: scale * 0 + 255, "no finite"),
        ("nvfp4", "weight_global_scale", lambda whole: whole * 0, "no finite"),
        ("nvfp4", "weight_global_scale", lambda whole: whole * float("inf"), "no finite"),
        ("gptq", "scales", no_number, "no finite"),
        ("awq", "scales", no_number, "no finite"),
    ],
)
def test_tensors_that_contradict_each_other(
    name: str, part: str, change: Any, why: str, quantized: Quantized, tmp_path: Path
):
    with pytest.raises(CorruptWeights, match=f"{UP}.{part} .*{why}"):
        load(broken(quantized(name), tmp_path / "broken", f"{UP}.{part}", change))


@pytest.mark.parametrize("name", FORMATS)
def test_the_check_before_the_start_reads_no_weights(name: str, quantized: Quantized):
    from engine.engine import linear_maker

    spec = load_spec(quantized(name))
    assert weights.check(quantized(name), spec, torch.bfloat16, linear_maker("cpu", spec)) == (spec, ())


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("gptq", {"bits": 3}, r"Invalid enum value 3 - at `\$\.bits`"),
        ("gptq", {"dynamic": {"+:x": {"bits": 8}}}, "dynamic"),
        ("awq", {"version": "gemv"}, "gemv"),
        ("int4", {"format": "marlin-24"}, "marlin-24"),
        ("int4", {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized.* with 4 bits by group"),
        ("nvfp4", {"format": "mxfp4-pack-quantized"}, "mxfp4-pack-quantized.* with 4 bits by tensor_group"),
        ("fp8", {"format": "naive-quantized"}, "naive-quantized.* with 8 bits by channel"),
        ("int4", {"config_groups": {}}, r"config_groups for \[\]"),
        ("int4", {"config_groups": {"one": 5}}, "Expected `object`, got `int`"),
        ("int4", {"ignore": ["re:("]}, "missing \\)"),
    ],
)
def test_settings_that_are_not_known_are_refused_by_name(
    name: str, change: dict[str, Any], why: str, quantized: Quantized, tmp_path: Path
):
    raw = json.loads((quantized(name) / "config.json").read_text())
    raw["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match=why):
        load_spec(tmp_path)


def test_a_matrix_that_is_left_out_is_stored_plain(quantized: Quantized, tmp_path: Path):
    path = quantized("int4")
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(UP)}
    tensors[f"{UP}.weight"] = load_file(quantized_checkpoints.plain(path) / "model.safetensors")[f"{UP}.weight"]
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"]["ignore"] += [r"re:.*layers\.0\.mlp\.up.*"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    for product, weight in all_matrices(tmp_path).items():
        assert torch.equal(weight, all_matrices(path)[product])
