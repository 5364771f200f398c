"""Llama 2 and 3, and what was published in their shape: no windows, biases where the config says so."""

from engine.models.config_file import ConfigFile
from engine.models.families.family import Family
from engine.spec import ModelSpec


def read_model(config: ConfigFile) -> ModelSpec:
    config.require("hidden_act", "silu", "silu")
    head_dim = config.head_dim()
    bias = config.flag("attention_bias")
    return config.model(
        "llama",
        config.layers(config.rope(head_dim)),
        head_dim=head_dim,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
    )


LLAMA = Family("llama", "LlamaForCausalLM", read_model)
