"""A model's shape and features as one frozen value: what loading, kernels, pages and sizes need to know of it.

No torch, and no family: a family's file (`engine.models.families`) reads a checkpoint's config into this. A kernel says
by these features whether it computes what a model needs.
"""

# pyright: strict

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh"]

QUANTIZED_AT_LOAD: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Values of `model.quantization` that our own engine has, and the bits of a weight."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: the wavelengths of the rotations, and how they are stretched for long contexts.

    Of each head's elements the first `rotated` turn; 0 means all. Cosine and sine are multiplied by `attention_factor`.
    The fields after it belong to single kinds.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_positions: int = 0  # llama3, yarn
    rotated: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()  # longrope: one for each rotated pair


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in the place of one MLP: each token goes through the `top_k` experts that its router likes
    best, and their outputs are weighted by the router's probabilities."""

    count: int
    top_k: int
    intermediate_size: int  # of one expert
    renormalise: bool  # the weights of the chosen ones add up to one


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer. `window` is the number of positions that a token attends to, its own
    included; None means all of them. Without `experts` the layer has one dense MLP."""

    window: int | None
    rope: RopeSpec
    experts: ExpertsSpec | None = None


@dataclass(frozen=True)
class WeightSpec:
    """How a checkpoint stores the matrices of its layers: one of `engine.checkpoint.formats`, and its settings."""

    method: str = "plain"
    layout: str = ""  # which one, of a method with several
    bits: int = 16
    group: int = 0  # inputs that share a scale; 0: all of them
    symmetric: bool = True  # codes have no zeros of their own
    act_order: bool = False  # the checkpoint says of each input which group it is of
    by_tensor: bool = False  # one scale for a whole matrix
    plain: tuple[str, ...] = ()  # matrices that are stored plain: names, or regular expressions after "re:"
    types: tuple[tuple[str, str], ...] = ()  # of each matrix, where they differ; others are stored plain
    head: "WeightSpec | None" = None  # that of the output head, where it is not plain

    def __str__(self) -> str:
        if self.method == "plain":
            return self.method
        bits = f", {self.bits} bits" if self.bits else ""
        groups = f" in groups of {self.group}" if self.group else ""
        return f"{self.method}{f' ({self.layout})' if self.layout else ''}{bits}{groups}"


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: attention with grouped heads, then an MLP, with RMSNorm before both.

    `dtype` is what the checkpoint was published in, or None where it does not say.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense MLP
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool
    dtype: str | None
    canonical: bytes
    """The config as canonical JSON, less what names its origin: the part of the fingerprint that is no weight."""
    stored: WeightSpec = WeightSpec()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each head of queries and keys, before they are rotated
    activation: Activation = "silu"
    norms_add_one: bool = False  # a norm multiplies by its weight plus one
    output_norms: bool = False  # what attention and MLP add to the residual stream is normed, too
    embedding_scale: float = 1.0
    query_scale: float | None = None  # of the scores; None: head_dim^-0.5

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window."""
        return tuple(layer.window for layer in self.layers)

    @property
    def widest_window(self) -> int | None:
        """The positions that no layer looks beyond, a token's own included. None: some layer attends to all."""
        widest = 0
        for window in self.windows:
            if window is None:
                return None
            widest = max(widest, window)
        return widest

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied with."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale
