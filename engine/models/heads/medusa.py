"""Medusa (Cai et al., 2024): heads that each go on from the model's last hidden state alone, and guess a place each.

The checkpoint is that of `medusa` in vLLM. Guesses are one chain, not a tree: what a head guesses does not depend on
the tokens that those before it have guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch.nn import functional

from baton.errors import CorruptWeights
from engine.checkpoint.safetensors_reader import TensorFiles
from engine.models.heads.seam import MOST, read_size
from engine.models.linear import Dense, Linear, LinearMaker, PlainLinear
from engine.step.batch import DrawnRows, HiddenRow

TYPE = "medusa"
_MAP = "token_map"


class MedusaSpec(Struct, frozen=True):
    """The sizes of Medusa heads."""

    vocab_size: int
    hidden_size: int
    count: int
    layers: int = 1  # of each head
    bias: bool = False  # layers have one
    shared: bool = False  # all heads have one output embedding
    known: int = 0  # tokens that are guessed, if not all are: those of the tensor `token_map`

    def output(self, head: int) -> str:
        """The name of a head's output embedding."""
        return "lm_head.weight" if self.shared else f"lm_heads.{head}.weight"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        hidden, shapes = self.hidden_size, dict[str, tuple[int, ...]]()
        for head in range(self.count):
            for layer in range(self.layers):
                shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
                if self.bias:
                    shapes[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
            shapes[self.output(head)] = (self.known or self.vocab_size, hidden)
        return shapes

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": TYPE,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_heads": self.count,
            "num_hidden_layers": self.layers,
            "medusa_fc_bias": self.bias,
            "original_lm_head": self.shared,
            "truncated_vocab_size": self.known or self.vocab_size,
        }


def read_spec(path: Path, raw: Mapping[str, Any]) -> MedusaSpec:
    """Read the sizes of the heads in the directory `path` from its config. Raises ModelError."""
    vocab, hidden = read_size(path, raw, "vocab_size"), read_size(path, raw, "hidden_size")
    known = vocab if raw.get("truncated_vocab_size") is None else read_size(path, raw, "truncated_vocab_size", vocab)
    bias, shared = (bool(raw.get(name)) for name in ("medusa_fc_bias", "original_lm_head"))
    count, layers = read_size(path, raw, "num_heads", MOST), read_size(path, raw, "num_hidden_layers", MOST)
    return MedusaSpec(vocab, hidden, count, layers, bias, shared, known if known < vocab else 0)


class Medusa:
    """The heads. `spec` has their sizes."""

    remembers = False

    def __init__(
        self,
        spec: MedusaSpec,
        tensors: Mapping[str, torch.Tensor],
        linear: Callable[[Dense], Linear] = PlainLinear,
        known: torch.Tensor | None = None,
    ) -> None:
        """`tensors`: all of `spec.shapes()`, of one dtype. `linear` makes the products. `known`: the ids of the tokens
        that are guessed, if not all are."""
        self.spec, self._known = spec, known
        blocks = [[f"blocks.{head}.layers.{layer}" for layer in range(spec.layers)] for head in range(spec.count)]
        self._blocks = [
            [linear(Dense(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))) for name in names]
            for names in blocks
        ]
        names = [spec.output(head) for head in range(spec.count)]
        outputs = {name: linear(Dense(tensors[name], None)) for name in dict.fromkeys(names)}
        self._outputs = [outputs[name] for name in names]

    @classmethod
    def load(cls, path: Path, spec: MedusaSpec, dtype: torch.dtype, maker: LinearMaker) -> Medusa:
        """Load the checkpoint in the directory `path`. Raises ModelError.

        As with vLLM, an output embedding of all tokens may stand beside the map of those that are guessed, and that of
        the first head for one that all heads share.
        """
        tensors, known = dict[str, torch.Tensor](), None
        with TensorFiles(path) as files:
            if spec.known:
                known = files.read_tensor(_MAP, (spec.known,), (torch.int64, torch.int32)).long()
                if not 0 <= known.min() <= known.max() < spec.vocab_size:
                    raise CorruptWeights(f"{path}: {_MAP} names tokens that are not below {spec.vocab_size}")
            for name, shape in spec.shapes().items():
                stored = "lm_heads.0.weight" if name == "lm_head.weight" and name not in files.names else name
                whole = (spec.vocab_size, spec.hidden_size)
                if known is not None and "lm_head" in name and stored in files.names and files.shape(stored) == whole:
                    tensors[name] = files.read_tensor(stored, whole)[known].to(dtype)
                else:
                    tensors[name] = files.read_tensor(stored, shape).to(dtype)
        return cls(spec, tensors, maker.linear, known)

    def keep(self, hidden: torch.Tensor, drawn: Sequence[DrawnRows]) -> None:
        """Nothing is kept."""

    def first(self, hidden: torch.Tensor, rows: Sequence[HiddenRow] = ()) -> torch.Tensor:
        """The state of all heads, [rows, hidden]: the normed hidden states."""
        return hidden

    def advance(self, head: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return state

    def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]"""
        for layer in self._blocks[head]:
            state = state + functional.silu(layer(state))
        logits = self._outputs[head](state)
        if self._known is None:
            return logits
        return logits.new_full((len(logits), self.spec.vocab_size), -torch.inf).index_copy(1, self._known, logits)
