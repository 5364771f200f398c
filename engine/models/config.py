"""What a checkpoint's config.json says, read once into one frozen shape for all families.

Owns the decision whether this engine can run a checkpoint at all: whatever it does not know it refuses by name, since a
setting silently ignored is a model that answers wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ModelError, ModelNotFound, UnsupportedModel
from engine.layers.rotary import RopeConfig

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures this engine runs, and the `model_type` each is known by."""

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder-only transformer of the Llama family tree.

    `windows[i]` is the number of positions that layer i attends to, the token's own included; None means all of them.
    `dtype` is what the checkpoint was published in, or None where it does not say.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str | None
    eos_ids: tuple[int, ...]
    canonical: bytes
    """The config as canonical JSON, less what names its origin: the part of the fingerprint that is no weight."""

    @classmethod
    def from_directory(cls, path: Path) -> ModelSpec:
        """Read `config.json`, and `generation_config.json` where there is one.

        Raises ModelNotFound when there is no such directory or no config in it, UnsupportedModel for what the engine
        does not run, ModelError for a value that makes no sense.
        """
        if not path.is_dir():
            raise ModelNotFound(f"{path} is not a directory; give the directory of a checkpoint, or a hub id")
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} holds no config.json; is it the directory of a checkpoint?")
        raw = _read_object(path / "config.json")
        generation = path / "generation_config.json"
        return cls.from_dict(raw, _read_object(generation) if generation.is_file() else {})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
        """As `from_directory`, for parsed files."""
        family = _family(raw)
        if (quantization := raw.get("quantization_config")) is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise UnsupportedModel(f"quantization_config {method!r} is not supported; serve an unquantized checkpoint")
        activation = raw.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModel(f"hidden_act {activation!r} is not supported; only silu is")

        hidden_size = _count(raw, "hidden_size")
        num_layers = _count(raw, "num_hidden_layers")
        num_heads = _count(raw, "num_attention_heads")
        num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
        # Qwen3 alone has a default that does not follow from the other sizes.
        head_dim = _count(raw, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
        max_positions = _count(raw, "max_position_embeddings")
        if num_heads % num_kv_heads:
            raise ModelError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd; rotary embedding needs pairs")

        attention_bias = family in ("llama", "qwen3") and _flag(raw, "attention_bias")
        return cls(
            family=family,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
            rope=_rope(raw, max_positions),
            windows=_windows(raw, family, num_layers),
            tied_embeddings=_flag(raw, "tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=family == "llama" and _flag(raw, "mlp_bias"),
            qk_norm=family == "qwen3",
            dtype=_dtype(raw),
            eos_ids=_eos_ids(generation or {}) or _eos_ids(raw),
            canonical=_canonical(raw),
        )


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError when the file can't be read or holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}; fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, not an object; fetch the checkpoint again")
    return value


def _family(raw: Mapping[str, Any]) -> str:
    """The family by the checkpoint's architecture, or by its model_type where no architecture is named."""
    architectures = raw.get("architectures") or []
    known = ", ".join(ARCHITECTURES)
    if not isinstance(architectures, list):
        raise ModelError(f"architectures is {architectures!r}; it must be a list of names")
    for name in architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if architectures:
        raise UnsupportedModel(f"architecture {', '.join(map(str, architectures))} is not supported; known: {known}")
    model_type = raw.get("model_type")
    if model_type in ARCHITECTURES.values():
        return str(model_type)
    raise UnsupportedModel(f"model_type {model_type!r} is not supported; known: {known}")


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Rotary settings from either spelling: `rope_parameters` (since transformers 5), or theta and scaling apart."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedModel(f"rope parameters {scaling!r} are not supported; one plain set for all layers is")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial!r} is not supported; only whole heads are rotated")
    theta = _positive(scaling if "rope_theta" in scaling else raw, "rope_theta", 10_000.0)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=_positive(scaling, "factor"))
    if kind == "llama3":
        low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
        if low >= high:
            raise ModelError(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
        return RopeConfig(
            theta,
            "llama3",
            factor=_positive(scaling, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=_count(scaling, "original_max_position_embeddings", max_positions),
        )
    raise UnsupportedModel(f"rope type {kind!r} is not supported; known: default, linear, llama3")


def _windows(raw: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window. Llama has none, Mistral one for all layers, Qwen one for some."""
    everywhere: tuple[int | None, ...] = (None,) * num_layers
    if family == "llama" or raw.get("sliding_window") is None:
        return everywhere
    window = _count(raw, "sliding_window")
    if family == "mistral":
        if len(set(raw.get("layer_types") or [])) > 1:
            raise UnsupportedModel("a Mistral with layer_types of several kinds is not supported")
        return (window,) * num_layers
    if not _flag(raw, "use_sliding_window"):
        return everywhere
    kinds = raw.get("layer_types")
    if kinds is None:
        first = _get(raw, "max_window_layers", 28, "config.json", int)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"layer_types {kinds!r} does not name each of the {num_layers} layers")
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"layer type {unknown.pop()!r} is not supported; known: full_ and sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(raw: Mapping[str, Any]) -> str | None:
    name = raw.get("dtype", raw.get("torch_dtype"))
    if name is None or name in DTYPES:
        return name
    raise UnsupportedModel(f"dtype {name!r} is not supported; known: {', '.join(DTYPES)}")


def _eos_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    ids = raw.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in listed):
        raise ModelError(f"eos_token_id {ids!r} is neither a token id nor a list of them")
    return tuple(listed)


def _canonical(raw: Mapping[str, Any]) -> bytes:
    """Two copies of one model must agree whatever path they were loaded from and whichever release wrote them."""
    told = {key: value for key, value in raw.items() if key not in ("_name_or_path", "transformers_version")}
    return json.dumps(told, sort_keys=True, separators=(",", ":")).encode()


def _get(
    raw: Mapping[str, Any],
    key: str,
    default: Any,
    where: str,
    kind: type | tuple[type, ...],
    valid: Callable[[Any], bool] = lambda _: True,
) -> Any:
    """A typed value. Null counts as absent, as it does for transformers. Raises ModelError, naming the value."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{where} has no {key}; fetch the checkpoint again")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not valid(value):
        raise ModelError(f"{where}: {key} is {value!r}, which makes no sense there; fetch the checkpoint again")
    return value


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    return _get(raw, key, default, "config.json", int, lambda value: value > 0)


def _positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    return float(_get(raw, key, default, "config.json", (int, float), lambda value: 0 < value < float("inf")))


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    return _get(raw, key, False, "config.json", bool)
