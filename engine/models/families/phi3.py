"""Phi-3, Phi-3.5 and Phi-4: Llama with q, k and v in one tensor, gate and up in another, and LongRoPE for the long
ones. Their configs have called LongRoPE "su" and "yarn", too."""

from dataclasses import replace

from engine.models.config_file import ConfigFile
from engine.models.families.family import Family, TensorNames
from engine.spec import ModelSpec


def read_model(config: ConfigFile) -> ModelSpec:
    config.require("hidden_act", "silu", "silu")
    head_dim = config.head_dim()
    layers = config.layers(_long(config).rope(head_dim), config.window_everywhere())
    return config.model("phi3", layers, head_dim=head_dim)


def _long(config: ConfigFile) -> ConfigFile:
    parameters = config.raw.get("rope_scaling")
    if not isinstance(parameters, dict) or parameters.get("type") != "yarn":
        return config
    return replace(config, raw={**config.raw, "rope_scaling": {**parameters, "type": "longrope"}})


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    read_model,
    TensorNames(
        {
            ("q", "k", "v"): "self_attn.qkv_proj",
            ("output",): "self_attn.o_proj",
            ("gate", "up"): "mlp.gate_up_proj",
            ("down",): "mlp.down_proj",
        }
    ),
)
