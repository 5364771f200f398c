"""The fields of a GGUF file, and the config of Hugging Face that they mean."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.errors import CorruptWeights, UnsupportedModel, shown

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""The architectures that are read, by the names that GGUF has for them. Mistral and Mixtral are a "llama" there."""
_GEMMA_3_27B = 62
"""Its number of layers. llama.cpp knows by it, too, that scores are not divided by the root of a head's size."""
_KINDS: Mapping[str, tuple[type, type | None]] = {
    "general.architecture": (str, None),
    "tokenizer.ggml.model": (str, None),
    "tokenizer.ggml.pre": (str, None),
    "tokenizer.chat_template": (str, None),
    "tokenizer.ggml.tokens": (list, str),
    "tokenizer.ggml.merges": (list, str),
    "tokenizer.ggml.token_type": (list, int),
    "tokenizer.ggml.scores": (list, float),
}
"""Types of fields, and of the members of lists."""
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


class Fields(dict[str, Any]):
    """The fields of a file, by name. One that is not there, or that makes no sense, raises CorruptWeights."""

    def __init__(self, source: Path, values: Mapping[str, Any]) -> None:
        """Raises CorruptWeights for a field of the tokenizer that is of another type than all files have it."""
        super().__init__(values)
        self.source = source
        for name, value in values.items():
            kind, each = (int, None) if name.endswith("_token_id") else _KINDS.get(name, (object, None))
            if not isinstance(value, kind) or (each and not all(isinstance(one, each) for one in value)):
                raise CorruptWeights(
                    f"{source}: {name} is {shown(repr(value))}, which makes no sense there; fetch it again"
                )

    def __missing__(self, name: str) -> Any:
        raise CorruptWeights(f"{self.source} has no field {name}; fetch the file again, or convert the model again")

    @property
    def architecture(self) -> str:
        """Raises UnsupportedModel for one that is not read."""
        name = self["general.architecture"]
        if name not in CLASSES:
            raise UnsupportedModel(f"{self.source} is of the architecture {name!r}; known: {', '.join(CLASSES)}")
        return name

    def of_architecture(self, name: str, default: Any = None) -> Any:
        """A setting of the model."""
        key = f"{self.architecture}.{name}"
        return self[key] if default is None else self.get(key, default)

    def number(self, name: str, default: float | None = None) -> Any:
        """A setting that is one number. A float32 is the shortest number that means it: 1e-05 and not
        9.999999747378752e-06."""
        value = self.of_architecture(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModel(f"{self.source}: {self.architecture}.{name} is {value!r}; a number is read there")
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def token(self, kind: str) -> int | None:
        """The number of a token by what it is for; None where the file does not say."""
        number, count = self.get(f"tokenizer.ggml.{kind}_token_id"), len(self["tokenizer.ggml.tokens"])
        if number is not None and not 0 <= number < count:
            raise CorruptWeights(f"{self.source}: the {kind} token is {number}, and there are {count}; fetch it again")
        return number


def config(fields: Fields, tied: bool, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return config.json. `tied`: whether there is no head but the embedding. `factors` stretch the waves, by the names
    that they have in configs, or "". Raises CorruptWeights, and UnsupportedModel for what the engine can't honour."""
    heads, hidden = fields.number("attention.head_count"), fields.number("embedding_length")
    if not hidden or not heads:
        raise CorruptWeights(f"{fields.source} says {heads} heads of {hidden} numbers; fetch it again")
    head_dim = fields.number("attention.key_length", hidden // heads)
    settings = {
        "architectures": [CLASSES[fields.architecture]],
        "model_type": fields.architecture,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields.number("feed_forward_length"),
        "num_hidden_layers": fields.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.number("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    settings |= {name: number for name, kind in _IDS.items() if (number := fields.token(kind)) is not None}
    return settings | _rotation(fields, head_dim, factors) | _of_family(fields, head_dim, hidden // heads)


def _rotation(fields: Fields, head_dim: int, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    rotated = fields.number("rope.dimension_count", head_dim)
    if rotated != head_dim:
        if fields.architecture == "llama":  # whose rows llama.cpp has in another order
            raise UnsupportedModel(f"{fields.source} rotates {rotated} of {head_dim} elements, which is not read")
        settings["partial_rotary_factor"] = rotated / head_dim
    kind = fields.of_architecture("rope.scaling.type", "none")
    if "" in factors:
        both = {"long_factor": factors[""], "short_factor": factors[""]}
        return settings | {"rope_scaling": {"rope_type": "longrope", **both, "attention_factor": 1.0}}
    if factors:
        scaling: dict[str, Any] = {"rope_type": "longrope", **factors}
        if attention := fields.number("rope.scaling.attn_factor", 0.0):
            scaling["attention_factor"] = attention
        original = fields.number("rope.scaling.original_context_length")
        return settings | {"rope_scaling": scaling, "original_max_position_embeddings": original}
    match kind:
        case "none":
            return settings
        case "linear":
            scaling = {"rope_type": "linear", "factor": float(fields.number("rope.scaling.factor"))}
            return settings | {"rope_scaling": scaling}
        case "yarn":
            return settings | {"rope_scaling": _yarn(fields)}
        case _:
            raise UnsupportedModel(f"{fields.source}: rotary embedding scaled as {kind!r} is not read from GGUF")


def _yarn(fields: Fields) -> dict[str, Any]:
    """YaRN as llama.cpp computes it: a factor of the attention is one more beside that which follows from the waves."""
    for name, usual in (("ext_factor", 1.0), ("attn_factor", 1.0), ("log_multiplier", 0.1)):
        if (number := fields.number(f"rope.scaling.yarn_{name}", usual)) != usual:
            raise UnsupportedModel(f"{fields.source}: rope.scaling.yarn_{name} {number} is not read from GGUF")
    factor = float(fields.number("rope.scaling.factor"))
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.number("rope.scaling.original_context_length"),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if (attention := fields.number("rope.scaling.attn_factor", 1.0)) != 1.0:
        scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    return scaling


def _of_family(fields: Fields, head_dim: int, share: int) -> dict[str, Any]:
    """What the configs of one family have. `share`: the numbers of the hidden state for each head."""
    window = fields.number("attention.sliding_window", 0) or None
    match fields.architecture:
        case "llama" if experts := fields.number("expert_count", 0):
            names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": window}
            return names | {"num_local_experts": experts, "num_experts_per_tok": fields.number("expert_used_count")}
        case "qwen3moe":
            return {
                "model_type": "qwen3_moe",
                "num_experts": fields.number("expert_count"),
                "num_experts_per_tok": fields.number("expert_used_count"),
                "moe_intermediate_size": fields.number("expert_feed_forward_length"),
                "norm_topk_prob": True,
            }
        case "llama" if window is not None:
            return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        case "phi3":
            return {"sliding_window": window}
        case "gemma3":
            layers = fields.number("block_count")
            pattern: Any = fields.of_architecture("attention.sliding_window_pattern", 6)
            if not isinstance(pattern, list):
                pattern = [not pattern or (layer + 1) % pattern for layer in range(layers)]
            return {
                "model_type": "gemma3_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": share if layers == _GEMMA_3_27B else head_dim,
                "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
                "sliding_window": window,
                "layer_types": ["sliding_attention" if window and slides else "full_attention" for slides in pattern],
                "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0) or None,
            }
        case _:
            return {}
