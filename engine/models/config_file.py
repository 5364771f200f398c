"""Reading a checkpoint's config.json: values with types, and what several families write alike.

A value that makes no sense raises ModelError, a setting that this engine can't honour UnsupportedModel, both by name:
a setting silently ignored is a model that answers wrongly.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.checkpoint_files import canonical
from baton.errors import ModelError, UnsupportedModel
from engine.spec import ExpertsSpec, LayerSpec, ModelSpec, RopeSpec

DTYPES = ("float32", "bfloat16", "float16")
_MOST = 2**26  # of any count: two of them make a tensor
_PARTS = ("num_hidden_layers", "num_experts", "num_local_experts")
_MOST_PARTS = 10_000  # each has tensors of its own
_FINITE = 1e300  # a whole number may be larger than any float
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ConfigFile:
    """The parsed config.json. Null counts as absent, as it does for transformers."""

    raw: Mapping[str, Any]

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero."""
        most = _MOST_PARTS if key in _PARTS else _MOST
        return self._get(key, default, int, lambda value: 0 < value <= most)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        return float(self._get(key, default, (int, float), lambda value: 0 < value < _FINITE))

    def flag(self, key: str, default: bool = False) -> bool:
        return self._get(key, default, bool)

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def require(self, key: str, default: Any, supported: Any) -> None:
        """Raise UnsupportedModel unless the value is the one that this family is computed with."""
        value = self.raw.get(key)
        if (default if value is None else value) != supported:
            raise UnsupportedModel(f"{key} {value!r} is not supported; only {supported} is")

    def head_dim(self, default: int | None = None) -> int:
        head_dim = self.count("head_dim", default or self.count("hidden_size") // self.count("num_attention_heads"))
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
        return head_dim

    def layer_kinds(self, default: Callable[[int], bool]) -> list[bool]:
        """For each layer whether its attention slides: by `layer_types`, or by its number where there are none."""
        num_layers = self.count("num_hidden_layers")
        kinds: Any = self.raw.get("layer_types")
        if kinds is None:
            return [default(layer) for layer in range(num_layers)]
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelError(f"layer_types {kinds!r} does not name each of the {num_layers} layers")
        named = [str(kind) for kind in kinds]
        if unknown := set(named) - {_FULL, _SLIDING}:
            raise UnsupportedModel(f"layer type {unknown.pop()!r} is not supported; known: {_FULL}, {_SLIDING}")
        return [kind == _SLIDING for kind in named]

    def layers(
        self, rope: RopeSpec, windows: Sequence[int | None] | None = None, experts: ExpertsSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        """Layers that differ in their windows only; by default all of them see everything."""
        windows = windows or (None,) * self.count("num_hidden_layers")
        return tuple(LayerSpec(window, rope, experts) for window in windows)

    def qwen_windows(self) -> tuple[int | None, ...]:
        """Windows as the Qwen families write them: some layers have one, from a certain layer on or by `layer_types`,
        and only where `use_sliding_window` says so."""
        if not self.has("sliding_window") or not self.flag("use_sliding_window"):
            return (None,) * self.count("num_hidden_layers")
        window = self.count("sliding_window")
        first: int = self._get("max_window_layers", 28, int)
        return tuple(window if slides else None for slides in self.layer_kinds(lambda layer: layer >= first))

    def window_everywhere(self) -> tuple[int | None, ...]:
        """One window for all layers, as Mistral writes it."""
        window = self.count("sliding_window") if self.has("sliding_window") else None
        if window is not None and len(set(self.layer_kinds(lambda _: True))) > 1:
            raise UnsupportedModel("layer_types of several kinds are not supported for this family")
        return (window,) * self.count("num_hidden_layers")

    def rope(self, head_dim: int, *, theta: float = 10_000.0) -> RopeSpec:
        """One set of rotary settings for all layers, in either spelling: `rope_parameters` (since transformers 5), or
        theta and scaling apart."""
        parameters: Any = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedModel(f"rope parameters {parameters!r} are not supported; one plain set for all layers is")
        return self.rope_of(parameters, head_dim, theta=theta)

    def rope_of(self, parameters: Mapping[str, Any], head_dim: int, *, theta: float) -> RopeSpec:
        """The rotation that `parameters` describe, beside what stands at the top of the config."""
        own = ConfigFile(parameters)
        theta = (own if own.has("rope_theta") else self).positive("rope_theta", theta)
        share = self.positive("partial_rotary_factor", 1.0)
        rotated = int(head_dim * own.positive("partial_rotary_factor", share))
        if not 2 <= rotated <= head_dim or rotated % 2:
            raise ModelError(f"partial_rotary_factor turns {rotated} of {head_dim} elements; it must be pairs of them")
        rotated = 0 if rotated == head_dim else rotated
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        longest = self.count("max_position_embeddings")
        original = own.count("original_max_position_embeddings", longest)
        original = self.count("original_max_position_embeddings", original)
        match kind:
            case "default":
                return RopeSpec(theta, rotated=rotated)
            case "dynamic":
                # It changes wavelengths only for sequences longer than max_position_embeddings. There are none here.
                own.positive("factor")
                return RopeSpec(theta, rotated=rotated)
            case "linear":
                return RopeSpec(theta, "linear", own.positive("factor"), rotated=rotated)
            case "llama3":
                low, high = own.positive("low_freq_factor"), own.positive("high_freq_factor")
                if low >= high:
                    raise ModelError(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
                return RopeSpec(theta, "llama3", own.positive("factor"), low, high, original, rotated)
            case "yarn":
                return _yarn(own, theta, original, rotated, longest)
            case "longrope" | "su":
                return _longrope(own, theta, original, rotated, (rotated or head_dim) // 2, longest)
            case _:
                known = "default, dynamic, linear, llama3, longrope, yarn"
                raise UnsupportedModel(f"rope type {kind!r} is not supported; known: {known}")

    def model(
        self, family: str, layers: tuple[LayerSpec, ...], *, head_dim: int, tied: bool = False, **features: Any
    ) -> ModelSpec:
        """The spec, from the settings that all families write alike. `tied`: what the family's configs mean that don't
        say whether embedding and head are one; `features`: fields of ModelSpec in which the family differs."""
        num_heads = self.count("num_attention_heads")
        num_kv_heads = self.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        return ModelSpec(
            family=family,
            vocab_size=self.count("vocab_size"),
            hidden_size=self.count("hidden_size"),
            intermediate_size=self.count("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=self.count("max_position_embeddings"),
            norm_eps=self.positive("rms_norm_eps", 1e-6),
            layers=layers,
            tied_embeddings=self.flag("tie_word_embeddings", tied),
            dtype=self._dtype(),
            canonical=canonical(self.raw),
            **features,
        )

    def _dtype(self) -> str | None:
        name = self.raw.get("dtype", self.raw.get("torch_dtype"))
        if name is None or name in DTYPES:
            return name
        raise UnsupportedModel(f"dtype {name!r} is not supported; known: {', '.join(DTYPES)}")

    def _get(
        self, key: str, default: Any, kind: type | tuple[type, ...], valid: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json has no {key}; fetch the checkpoint again")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not valid(value):
            raise ModelError(f"config.json: {key} is {value!r}, which makes no sense there; fetch the checkpoint again")
        return value


def _yarn(own: ConfigFile, theta: float, original: int, rotated: int, max_positions: int) -> RopeSpec:
    """YaRN (Peng et al., 2023). Without a factor of the attention's own, it follows from how far waves are stretched;
    DeepSeek's `mscale` and `mscale_all_dim` weigh that."""
    factor = own.positive("factor", max_positions / original)

    def widened(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = own.has("mscale") and own.has("mscale_all_dim")
    derived = widened(own.positive("mscale")) / widened(own.positive("mscale_all_dim")) if both else widened(1.0)
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_max_positions=original,
        rotated=rotated,
        attention_factor=own.positive("attention_factor", derived),
        beta_fast=own.positive("beta_fast", 32.0),
        beta_slow=own.positive("beta_slow", 1.0),
        truncate=own.flag("truncate", True),
    )


def _longrope(own: ConfigFile, theta: float, original: int, rotated: int, pairs: int, max_positions: int) -> RopeSpec:
    """LongRoPE (Ding et al., 2024), with one list of factors for all sequences: the long one where the model takes more
    than its original context. transformers changes lists at that length, and would have to turn cached keys anew."""
    long = max_positions > original
    name = "long_factor" if long else "short_factor"
    factors = own.raw.get(name)
    if (
        not isinstance(factors, list)
        or len(factors) != pairs
        or not all(isinstance(each, (int, float)) and 0 < each < _FINITE for each in factors)
    ):
        raise ModelError(f"config.json: {name} must hold {pairs} numbers above zero; fetch the checkpoint again")
    factor = own.positive("factor", max_positions / original)
    derived = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeSpec(
        theta,
        "longrope",
        factor,
        original_max_positions=original,
        rotated=rotated,
        attention_factor=own.positive("attention_factor", derived),
        factors=tuple(float(each) for each in factors),
    )
