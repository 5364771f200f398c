"""config.json of either age, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ModelError, ModelNotFound, UnsupportedModel
from engine.layers.rotary import RopeConfig
from engine.models.config import ModelSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def test_a_plain_llama():
    config = ModelSpec.from_dict(LLAMA)
    assert (config.family, config.head_dim, config.num_kv_heads) == ("llama", 16, 2)
    assert config.windows == (None,) * 4
    assert config.rope == RopeConfig(10_000.0)
    assert config.eos_ids == (2,)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.tied_embeddings, config.qk_norm))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(10_000.0, "linear", 2.0)),
        (
            {"rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}},
            RopeConfig(7.0, "linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512),
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512),
        ),
    ],
)
def test_both_spellings_of_rope(change: dict[str, Any], expected: RopeConfig):
    assert ModelSpec.from_dict(LLAMA | change).rope == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (MISTRAL | {"sliding_window": 128}, (128,) * 4),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (LLAMA | {"sliding_window": 128}, (None,) * 4),
        (QWEN2 | {"sliding_window": 128}, (None,) * 4),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": False, "max_window_layers": 0}, (None,) * 4),
        (
            QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 128),
        ),
        (
            QWEN3
            | {
                "sliding_window": 128,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (128, None, 128, None),
        ),
    ],
)
def test_windows(raw: dict[str, Any], expected: tuple[int | None, ...]):
    assert ModelSpec.from_dict(raw).windows == expected


def test_families_differ_in_biases_and_norms():
    qwen2, qwen3 = ModelSpec.from_dict(QWEN2), ModelSpec.from_dict(QWEN3 | {"attention_bias": True})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 128)
    mistral = ModelSpec.from_dict(MISTRAL | {"attention_bias": True, "mlp_bias": True})
    assert not mistral.qkv_bias
    assert not mistral.mlp_bias


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"quantization_config": "awq"}, "awq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str):
    with pytest.raises(UnsupportedModel, match=named):
        ModelSpec.from_dict(LLAMA | change)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked"] * 4}, "chunked"),
        (MISTRAL | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types"),
    ],
)
def test_unknown_layers_are_refused(raw: dict[str, Any], named: str):
    with pytest.raises(UnsupportedModel, match=named):
        ModelSpec.from_dict(raw)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"eos_token_id": "2"}, "eos_token_id"),
    ],
)
def test_a_senseless_value_is_named(change: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        ModelSpec.from_dict(LLAMA | change)


def test_end_of_sequence_ids_prefer_the_generation_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelSpec.from_directory(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert ModelSpec.from_directory(tmp_path).eos_ids == (7, 8)


def test_origin_is_no_part_of_the_canonical_config():
    renamed = LLAMA | {"_name_or_path": "/elsewhere", "transformers_version": "9"}
    reordered = dict(reversed(renamed.items()))
    assert ModelSpec.from_dict(reordered).canonical == ModelSpec.from_dict(LLAMA).canonical
    assert ModelSpec.from_dict(LLAMA | {"rms_norm_eps": 1e-6}).canonical != ModelSpec.from_dict(LLAMA).canonical


def test_no_checkpoint_there(tmp_path: Path):
    with pytest.raises(ModelNotFound, match="nowhere"):
        ModelSpec.from_directory(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        ModelSpec.from_directory(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_json_object(name: str, content: bytes, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        ModelSpec.from_directory(tmp_path)
