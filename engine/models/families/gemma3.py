"""Gemma 3's text models: norms before and after attention and MLP, most layers with a window and a rotation of their
own, GELU, and an embedding that is scaled up. Their images are not served."""

from typing import Any

from baton.errors import UnsupportedModel
from engine.models.config_file import ConfigFile
from engine.models.families.family import Family, TensorNames
from engine.spec import LayerSpec, ModelSpec, RopeSpec

_HEAD_DIM = 256
_QUERY_SCALAR = 256.0
_PATTERN = 6  # every sixth layer sees everything


def read_model(config: ConfigFile) -> ModelSpec:
    config.require("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    config.require("use_bidirectional_attention", False, False)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.require(key, None, None)
    head_dim = config.head_dim(_HEAD_DIM)
    pattern = config.count("sliding_window_pattern", config.count("_sliding_window_pattern", _PATTERN))
    window = config.count("sliding_window", 4_096)
    everything, local = _ropes(config, head_dim)
    bias = config.flag("attention_bias")
    return config.model(
        "gemma3_text",
        tuple(
            LayerSpec(window, local) if slides else LayerSpec(None, everything)
            for slides in config.layer_kinds(lambda layer: (layer + 1) % pattern != 0)
        ),
        head_dim=head_dim,
        tied=True,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        activation="gelu_tanh",
        norms_add_one=True,
        output_norms=True,
        embedding_scale=config.count("hidden_size") ** 0.5,
        query_scale=config.positive("query_pre_attn_scalar", _QUERY_SCALAR) ** -0.5,
    )


def _ropes(config: ConfigFile, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The rotations of layers that see everything and of those with a window. Since transformers 5 each kind of layer
    has a set of its own; before, the latter had `rope_local_base_freq` and no scaling."""
    parameters: Any = config.raw.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise UnsupportedModel(f"rope_parameters {parameters!r} are not supported; a set for each kind of layer is")
    if "full_attention" in parameters or "sliding_attention" in parameters:
        everything: Any = parameters.get("full_attention") or {}
        local: Any = parameters.get("sliding_attention") or {}
        if not (isinstance(everything, dict) and isinstance(local, dict)):
            raise UnsupportedModel(f"rope_parameters {parameters!r} are not supported; a set for each kind of layer is")
        return (
            config.rope_of(everything, head_dim, theta=1e6),
            config.rope_of({"rope_theta": 10_000.0, **local}, head_dim, theta=10_000.0),
        )
    return config.rope(head_dim, theta=1e6), RopeSpec(config.positive("rope_local_base_freq", 10_000.0))


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    read_model,
    TensorNames(
        norms={
            "input_norm": "input_layernorm",
            "attention_output_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
        }
    ),
)
