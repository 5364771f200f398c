"""Qwen3-MoE: Qwen3 with many small experts, in all layers or in some."""

from dataclasses import replace
from typing import Any

from baton.errors import ModelError
from engine.models.config_file import ConfigFile
from engine.models.families.family import Family, TensorNames
from engine.spec import ExpertsSpec, ModelSpec


def read_model(config: ConfigFile) -> ModelSpec:
    config.require("hidden_act", "silu", "silu")
    head_dim = config.head_dim()
    experts = ExpertsSpec(
        count=config.count("num_experts", config.count("num_local_experts", 128)),
        top_k=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("moe_intermediate_size", 768),
        renormalise=config.flag("norm_topk_prob"),
    )
    # Its window, unlike Qwen3's, is for all layers, and stands only where it is used.
    used = config.flag("use_sliding_window")
    layers = config.layers(config.rope(head_dim), config.window_everywhere() if used else None, experts)
    step, dense = config.count("decoder_sparse_step", 1), _dense_layers(config)
    bias = config.flag("attention_bias")
    return config.model(
        "qwen3_moe",
        tuple(
            replace(layer, experts=None) if number in dense or (number + 1) % step else layer
            for number, layer in enumerate(layers)
        ),
        head_dim=head_dim,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _dense_layers(config: ConfigFile) -> list[int]:
    named: Any = config.raw.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(layer, int) for layer in named):
        raise ModelError(f"config.json: mlp_only_layers is {named!r}, not a list of layers; fetch the checkpoint again")
    return named


QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", read_model, TensorNames(router="mlp.gate", experts="mlp.experts.{}")
)
