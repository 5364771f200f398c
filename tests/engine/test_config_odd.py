"""Whatever a member of config.json holds, its readers take it or refuse it by name: a config comes from strangers."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint_files import read_config, read_optional, text_settings
from baton.config import load
from baton.errors import BatonError, CorruptWeights, ModelError
from deploy.commands.size import compute_pages
from engine.checkpoint.safetensors_reader import TensorFiles
from engine.models.config import parse_spec
from engine.vllm_runner import VLLM_VERSION, pages, requirements
from engine.vllm_runner.requirements import Installation
from tests.engine.test_config import GEMMA3, LLAMA, LLAMA3, MIXTRAL, PHI3, QWEN2, QWEN3_MOE

ODD: list[Any] = [None, True, -1, "x", [], {}, [{}], 2**26, 10**400, float("nan")]
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}
STATES = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_d_head": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "dtype": "bfloat16", "head_dim": 16},
    "yarn": LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "gemma3": GEMMA3 | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}},
    "qwen2": QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "phi3": PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
    "mixtral": MIXTRAL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": QWEN3_MOE,
    "packed": LLAMA | {"quantization_config": PACKED | {"kv_cache_scheme": {"strategy": "tensor"}}},
    "gptq": LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
    "latent": LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    "states": LLAMA | STATES | {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 2},
    "images": {"model_type": "qwen3_vl", "text_config": LLAMA | {"model_type": "qwen3"}},
}


def variants(config: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Each config that differs from this one in a single member, and where."""
    for name, value in config.items():
        for odd in ODD:
            yield name, config | {name: odd}
        if isinstance(value, dict):
            for path, changed in variants(value):
                yield (name, path), deepcopy(config) | {name: changed}


@pytest.mark.parametrize("name", CONFIGS)
def test_no_value_is_an_internal_error(tmp_path: Path, name: str):
    vllm, config = Installation(VLLM_VERSION, None), load(None, {"model.device": "cpu"})
    readers: list[Callable[[Any], Any]] = [
        parse_spec,
        lambda raw: requirements.problem(vllm, raw, 16, "cpu", 2),
        lambda raw: pages.largest_page(text_settings(raw), "auto", 16, "auto"),
        lambda raw: compute_pages(config, tmp_path, 16, 1, 2**33),
    ]
    for path, changed in variants(CONFIGS[name]):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        try:
            raw = read_config(tmp_path)
        except ModelError:
            continue
        for reader in readers:
            try:
                reader(raw)
            except BatonError:
                pass
            except Exception as error:
                raise AssertionError(f"{path}: {error!r}") from error


@pytest.mark.parametrize(("key", "value"), [("text_config", "x"), ("model_type", ["llama"]), ("vocab_size", 10**400)])
def test_a_member_that_no_reader_takes_is_named(tmp_path: Path, key: str, value: Any):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: value}))
    with pytest.raises(ModelError, match=rf"config\.json: {key} is "):
        read_config(tmp_path)


def test_half_a_character_is_named(tmp_path: Path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "\ud800"}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json can't be read: .*surrogates"):
        read_optional(path)
    path.write_text(json.dumps({"eos_token": "\U0001f642"}))
    assert read_optional(path) == {"eos_token": "\U0001f642"}


def test_an_index_that_is_nested_too_deep_is_named(tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CorruptWeights, match=r"index\.json has no readable weight_map"):
        TensorFiles(tmp_path)
