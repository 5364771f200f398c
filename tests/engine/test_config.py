"""config.json of either age, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ModelError, ModelNotFound, UnsupportedModel
from engine.models.config import load_spec, parse_spec
from engine.spec import ExpertsSpec, RopeSpec

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
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 128,
    "sliding_window_pattern": 2,
}
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
STRETCHED = RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 512)


def test_a_plain_llama():
    config = parse_spec(LLAMA)
    assert (config.family, config.head_dim, config.num_kv_heads) == ("llama", 16, 2)
    assert config.windows == (None,) * 4
    assert config.layers[0].rope == RopeSpec(10_000.0)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.tied_embeddings, config.qk_norm))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope_theta": 5e5}, RopeSpec(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeSpec(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeSpec(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(10_000.0, "linear", 2.0)),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}}, RopeSpec(7.0, "linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, STRETCHED),
        ({"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}, STRETCHED),
        ({"partial_rotary_factor": 0.5}, RopeSpec(10_000.0, rotated=8)),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, RopeSpec(10_000.0)),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            RopeSpec(10_000.0, "yarn", 4.0, original_max_positions=64, attention_factor=1 + 0.1 * math.log(4)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            RopeSpec(10_000.0, "yarn", 4.0, original_max_positions=4096),
        ),
    ],
)
def test_both_spellings_of_rope(change: dict[str, Any], expected: RopeSpec):
    assert parse_spec(LLAMA | change).layers[0].rope == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (MISTRAL | {"sliding_window": 128}, (128,) * 4),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (LLAMA | {"sliding_window": 128}, (None,) * 4),
        (QWEN2 | {"sliding_window": 128}, (None,) * 4),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": False, "max_window_layers": 0}, (None,) * 4),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 128)),
        (QWEN3 | WINDOWED | {"sliding_window": 128, "use_sliding_window": True}, (128, None, 128, None)),
    ],
)
def test_windows(raw: dict[str, Any], expected: tuple[int | None, ...]):
    assert parse_spec(raw).windows == expected


def test_phi3_takes_the_long_factors_where_it_was_stretched():
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    long = parse_spec(PHI3 | {"original_max_position_embeddings": 1024, "rope_scaling": scaling})
    assert long.layers[0].rope == RopeSpec(
        10_000.0,
        "longrope",
        4.0,
        original_max_positions=1024,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(1024)),
        factors=(2.0,) * 8,
    )
    # Phi-3's first configs called it "yarn".
    assert parse_spec(PHI3 | {"rope_scaling": scaling | {"type": "yarn"}}).layers[0].rope == RopeSpec(
        10_000.0, "longrope", original_max_positions=4096, factors=(1.0,) * 8
    )


def test_gemma3_in_both_spellings():
    old = GEMMA3 | {"rope_theta": 5e5, "rope_local_base_freq": 7.0, "rope_scaling": {"type": "linear", "factor": 8}}
    new = GEMMA3 | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
        },
    }
    for raw in (old, new):
        spec = parse_spec(raw)
        assert spec.windows == (128, None, 128, None)
        assert [layer.rope for layer in spec.layers[:2]] == [RopeSpec(7.0), RopeSpec(5e5, "linear", 8.0)]
        assert spec.tied_embeddings
        assert (spec.attention_scale, spec.embedding_scale) == (1 / 16, 8.0)


def test_mixtures_of_experts():
    mixtral = parse_spec(MIXTRAL | {"num_local_experts": 4, "num_experts_per_tok": 1})
    assert [layer.experts for layer in mixtral.layers] == [ExpertsSpec(4, 1, 160, True)] * 4
    qwen = parse_spec(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [layer.experts for layer in qwen.layers] == [None, ExpertsSpec(8, 2, 48, False), None, None]


def test_blocks_of_fp8_are_known():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert parse_spec(LLAMA | {"quantization_config": fp8}).stored.method == "fp8"
    with pytest.raises(UnsupportedModel, match="fp8"):
        parse_spec(LLAMA | {"quantization_config": fp8 | {"weight_block_size": [64, 64]}})


def test_families_differ_in_biases_and_norms():
    qwen2, qwen3 = parse_spec(QWEN2), parse_spec(QWEN3 | {"attention_bias": True})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 128)
    mistral = parse_spec(MISTRAL | {"attention_bias": True, "mlp_bias": True})
    assert not mistral.qkv_bias
    assert not mistral.mlp_bias


CHUNKED = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked"] * 4}


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (LLAMA | {"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (LLAMA | {"architectures": None, "model_type": "mamba"}, "mamba"),
        *(
            (LLAMA | {"quantization_config": {"quant_method": name}}, name)
            for name in ("awq", "compressed-tensors", "gptq", "mxfp4")
        ),
        (LLAMA | {"quantization_config": {}}, "quantization_config"),
        (LLAMA | {"quantization_config": "awq"}, "awq"),
        (LLAMA | {"hidden_act": "gelu"}, "gelu"),
        (LLAMA | {"rope_scaling": {"type": "mrope", "factor": 4.0}}, "mrope"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation"),
        (PHI3 | {"hidden_act": "gelu"}, "hidden_act"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN2 | CHUNKED, "chunked"),
        (MISTRAL | WINDOWED, "layer_types"),
    ],
)
def test_refused_by_name(raw: dict[str, Any], named: str):
    with pytest.raises(UnsupportedModel, match=named):
        parse_spec(raw)


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
        (PHI3 | {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, "hold 8 numbers"),
        (PHI3 | {"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        (PHI3 | {"partial_rotary_factor": 2}, "partial_rotary_factor"),
    ],
)
def test_a_senseless_value_is_named(change: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        parse_spec(LLAMA | change)


def test_origin_is_no_part_of_the_canonical_config():
    renamed = LLAMA | {"_name_or_path": "/elsewhere", "transformers_version": "9"}
    reordered = dict(reversed(renamed.items()))
    assert parse_spec(reordered).canonical == parse_spec(LLAMA).canonical
    assert parse_spec(LLAMA | {"rms_norm_eps": 1e-6}).canonical != parse_spec(LLAMA).canonical


def test_no_checkpoint_there(tmp_path: Path):
    with pytest.raises(ModelNotFound, match="nowhere"):
        load_spec(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load_spec(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}"])
def test_a_file_that_is_no_json_object(content: bytes, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_spec(tmp_path)
