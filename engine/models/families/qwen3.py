"""Qwen3: Llama with norms of queries and keys, heads of 128 whatever the other sizes, and windows for some layers."""

from engine.models.config_file import ConfigFile
from engine.models.families.family import Family
from engine.spec import ModelSpec


def read_model(config: ConfigFile) -> ModelSpec:
    config.require("hidden_act", "silu", "silu")
    head_dim = config.head_dim(128)
    layers = config.layers(config.rope(head_dim), config.qwen_windows())
    bias = config.flag("attention_bias")
    return config.model("qwen3", layers, head_dim=head_dim, qk_norm=True, qkv_bias=bias, output_bias=bias)


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", read_model)
