"""An MLP speculator (Wertheimer et al., 2024): heads that take each other's states.

The first head takes the normed hidden state whose logits a token was drawn from, and that token. Each further head
takes the state of the one before and the token that was guessed there. None attends to anything, so there are no K and
V.

The checkpoint is that of `mlp_speculator` in vLLM: `config.json`, and safetensors with names below `speculator.`. Owns
the weights and their names. What is drawn from the logits is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch.nn import functional

from engine.checkpoint.safetensors_reader import TensorFiles
from engine.models.heads.seam import MOST, read_size
from engine.models.linear import Dense, Linear, LinearMaker, PlainLinear
from engine.step.batch import DrawnRows, HiddenRow

TYPE = "mlp_speculator"
_EPS = 1e-6


class MlpSpec(Struct, frozen=True):
    """The sizes of an MLP speculator."""

    vocab_size: int
    hidden_size: int
    inner_size: int
    count: int
    tied: bool = False  # all heads have the same weights, but for the product that the first one begins with
    scaled: bool = False  # the hidden state is normed once more

    def names(self, head: int) -> Mapping[str, str]:
        """The tensors of a head, by what they are for."""
        own = 0 if self.tied else head
        names = {"emb": f"emb.{own}.weight", "proj": f"proj.{min(head, 1) if self.tied else head}.weight"}
        names |= {"norm": f"ln.{own}.weight", "shift": f"ln.{own}.bias", "head": f"head.{own}.weight"}
        return {what: f"speculator.{name}" for what, name in names.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        wide, inner = (self.vocab_size, self.inner_size), (self.inner_size,)
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.count):
            proj = (self.inner_size, self.inner_size if head else self.hidden_size)
            each = {"emb": wide, "proj": proj, "norm": inner, "shift": inner, "head": wide}
            shapes |= {name: each[what] for what, name in self.names(head).items()}
        return shapes

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": TYPE,
            "vocab_size": self.vocab_size,
            "emb_dim": self.hidden_size,
            "inner_dim": self.inner_size,
            "n_predict": self.count,
            "top_k_tokens_per_head": [1] * self.count,
            "n_candidates": 1,
            "tie_weights": self.tied,
            "scale_input": self.scaled,
        }


def read_spec(path: Path, raw: Mapping[str, Any]) -> MlpSpec:
    """Read the sizes of the heads in the directory `path` from its config. Raises ModelError."""
    hidden = read_size(path, raw, "emb_dim")
    inner = read_size(path, raw, "inner_dim") if raw.get("inner_dim") else hidden
    tied, scaled = (bool(raw.get(name)) for name in ("tie_weights", "scale_input"))
    count = read_size(path, raw, "n_predict", MOST)
    return MlpSpec(read_size(path, raw, "vocab_size"), hidden, inner, count, tied, scaled)


class _Head(NamedTuple):
    """One head's weights, the scales of its parts included."""

    emb: torch.Tensor
    proj: Linear
    norm: torch.Tensor
    shift: torch.Tensor
    head: Linear


class MlpSpeculator:
    """The heads. `spec` has their sizes."""

    remembers = False

    def __init__(
        self,
        spec: MlpSpec,
        tensors: Mapping[str, torch.Tensor],
        linear: Callable[[Dense], Linear] = PlainLinear,
    ) -> None:
        """`tensors`: all of `spec.shapes()`, of one dtype. `linear` makes the products."""
        self.spec = spec
        keep = 0.5 ** (0.5 / spec.count)  # so much of the first state is in the last one as of all tokens
        add = math.sqrt((1 - keep**2) * spec.inner_size / 2)
        weights: dict[str, Any] = {}  # all heads that are tied have the same
        for name, tensor in tensors.items():
            match name.split("."):
                case _, "proj", _, _:
                    weights[name] = linear(Dense(tensor * keep, None))
                case _, "head", _, _:
                    weights[name] = linear(Dense(tensor, None))
                case _, "emb", _, _:
                    weights[name] = tensor * add
                case _:
                    weights[name] = tensor
        self._heads = [
            _Head(**{what: weights[name] for what, name in spec.names(head).items()}) for head in range(spec.count)
        ]

    @classmethod
    def load(cls, path: Path, spec: MlpSpec, dtype: torch.dtype, maker: LinearMaker) -> MlpSpeculator:
        """Load the checkpoint in the directory `path`. Raises ModelError."""
        with TensorFiles(path) as files:
            tensors = {name: files.read_tensor(name, shape).to(dtype) for name, shape in spec.shapes().items()}
        return cls(spec, tensors, maker.linear)

    def keep(self, hidden: torch.Tensor, drawn: Sequence[DrawnRows]) -> None:
        """Nothing is kept."""

    def first(self, hidden: torch.Tensor, rows: Sequence[HiddenRow] = ()) -> torch.Tensor:
        """The state that the first head takes, [rows, hidden], from normed hidden states."""
        return functional.rms_norm(hidden, hidden.shape[-1:], None, _EPS) / math.sqrt(2) if self.spec.scaled else hidden

    def advance(self, head: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The state [rows, inner] of a head, from that of the one before and the tokens [rows] before its own."""
        own = self._heads[head]
        mixed = own.proj(state) + functional.embedding(tokens, own.emb)
        return functional.gelu(functional.rms_norm(mixed, mixed.shape[-1:], own.norm, _EPS) + own.shift)

    def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """[rows, inner] → [rows, vocab]"""
        return self._heads[head].head(state)
