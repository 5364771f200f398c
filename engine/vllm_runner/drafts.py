"""vLLM's own drafts: which of them run here, and what they add to a page. Pure: from settings and configs alone.

A draft model, EAGLE's layers and a model's own MTP layer keep K and V of their own, in vLLM's blocks beside those of
the model. So pages have these layers too, on workers of both roles: after a hand-off the draft knows the prompt.
Medusa's heads keep nothing.
"""

# pyright: strict

from collections.abc import Mapping
from typing import Any

from baton.config import MTP_METHODS, ModelConfig, SpeculativeConfig
from engine.models.config_file import ConfigFile
from engine.vllm_runner.layers import of_config
from engine.vllm_runner.pages import latent_width

_MTP_COUNT = "num_nextn_predict_layers"
MTP: Mapping[str, str] = {
    "DeepseekV3ForCausalLM": "model.layers.{layers}.eh_proj.weight",
    "Glm4MoeForCausalLM": "model.layers.{layers}.eh_proj.weight",
    "MiMoForCausalLM": "model.mtp_layers.0.input_proj.weight",
}
"""Architectures whose MTP layer was tried, each with a weight that only this layer has."""


def layers(method: str, draft: Mapping[str, Any]) -> int:
    """Return how many layers a draft with this config adds to pages. MTP layers are in the model's own config. Raises
    ModelError for a size that is none."""
    if method == "medusa":
        return 0
    return ConfigFile(draft).count(_MTP_COUNT if method in MTP_METHODS else "num_hidden_layers")


def weight(settings: SpeculativeConfig, text: Mapping[str, Any]) -> str:
    """Return the name of a tensor that the checkpoint of a model with this config has if it brings the MTP layer that
    is asked for; "" for other drafts. Raises ModelError for a size that is none."""
    count = ConfigFile(text).count("num_hidden_layers")
    return "" if settings.model else MTP[text["architectures"][0]].format(layers=count)


def settings_lack(model: ModelConfig, ranks: int) -> str:
    """Return why a model with these settings has no draft of vLLM's; "" if it may."""
    if model.lora_modules or model.max_loras:
        return "with LoRA adapters vLLM's drafts were not tried"
    if ranks > 1:
        return f"on {ranks} ranks vLLM's drafts were not tried"
    return ""


def lack(settings: SpeculativeConfig, text: Mapping[str, Any], draft: Mapping[str, Any]) -> str:
    """Return why a draft with this config proposes no tokens for a model with that one; "" if it may. Raises ModelError
    for sizes that are none."""
    own, other, count = ConfigFile(text), ConfigFile(draft), settings.num_speculative_tokens
    if settings.method in MTP_METHODS:
        return _mtp_lack(own)
    if latent_width(text):
        return f"with latents (MLA) only {MTP_METHODS[0]} was tried"
    if settings.method == "medusa":
        if (size := other.count("hidden_size")) != own.count("hidden_size"):
            return f"it is for a hidden size of {size}, and the model has {own.count('hidden_size')}"
        heads = other.count("num_heads", other.count("medusa_num_heads", 5))
        return f"it has {heads} heads, and num_speculative_tokens is {count}: lower that" if heads < count else ""
    if (words := other.count("vocab_size")) != own.count("vocab_size"):
        return f"it has {words} tokens and the model's vocabulary {own.count('vocab_size')}"
    if of_config(draft, 1)[1].count:
        return "its layers form groups, and vLLM keeps all layers of a draft in one"
    if settings.method == "draft_model" and of_config(text, 1)[1].count:
        return "the model's layers form groups, and vLLM has a draft model write to pages of the first one"
    (heads, width), (own_heads, own_width) = _kv_shape(other), _kv_shape(own)
    if (heads, width) != (own_heads, own_width):
        return (
            f"its layers keep {heads} KV heads of {width} elements and the model's {own_heads} of {own_width}: pages "
            "have layers of one kind"
        )
    return ""


def _mtp_lack(own: ConfigFile) -> str:
    if (name := next(iter(own.raw.get("architectures") or ()), "")) not in MTP:
        return f"MTP layers were tried of {', '.join(MTP)}, and the model is {name}"
    if not own.raw.get(_MTP_COUNT):
        return f"its config.json names no MTP layer ({_MTP_COUNT})"
    if (count := own.count(_MTP_COUNT)) != 1:
        return f"it has {count} MTP layers, and vLLM's first model runner asks the first one alone"
    return ""


def _kv_shape(config: ConfigFile) -> tuple[int, int]:
    """KV heads and the elements of each."""
    return config.count("num_key_value_heads", config.count("num_attention_heads")), config.head_dim()
