"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows for some layers."""

from engine.models.config_file import ConfigFile
from engine.models.families.family import Family
from engine.spec import ModelSpec


def read_model(config: ConfigFile) -> ModelSpec:
    config.require("hidden_act", "silu", "silu")
    head_dim = config.head_dim()
    layers = config.layers(config.rope(head_dim), config.qwen_windows())
    return config.model("qwen2", layers, head_dim=head_dim, qkv_bias=True)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", read_model)
