"""Mistral: Llama without biases, and with one sliding window for all layers where the config has one."""

from engine.models.config_file import ConfigFile
from engine.models.families.family import Family
from engine.spec import ModelSpec


def read_model(config: ConfigFile) -> ModelSpec:
    config.require("hidden_act", "silu", "silu")
    head_dim = config.head_dim()
    layers = config.layers(config.rope(head_dim), config.window_everywhere())
    return config.model("mistral", layers, head_dim=head_dim)


MISTRAL = Family("mistral", "MistralForCausalLM", read_model)
