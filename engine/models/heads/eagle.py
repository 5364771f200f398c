"""EAGLE (Li et al., 2024): one decoder layer that guesses the model's next hidden state from its last one and a token.

The checkpoint is that of EAGLE-1 with vLLM: the config of a Llama or Qwen2 with one layer, `fc` and `layers.0`, whose
input is not normed. Embeddings are the model's own, whatever the checkpoint says.

The layer attends to the last `WINDOW` places from which this process has drawn a token, in steps that follow each
other. There are no hidden states of a prompt: its pages may come from elsewhere. So nothing outlives a worker, a step
without the sequence, or a weight, and memory is bounded. With one layer the places before the last need K and V
alone, and they are computed when they are first attended to. Those of guesses are never kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch.nn import functional

from baton.errors import UnsupportedModel
from engine.checkpoint.formats.format import Shape
from engine.checkpoint.safetensors_reader import TensorFiles
from engine.models import mlp, rotary, weights
from engine.models.config import parse_spec
from engine.models.heads.seam import Embeddings
from engine.models.linear import Dense, Linear, LinearMaker
from engine.models.transformer import CosSin
from engine.models.weights import LayerWeights, MlpWeights
from engine.spec import ModelSpec
from engine.step.batch import DrawnRows, HiddenRow

TYPES = ("llama", "qwen2")
WINDOW = 64
_COUNT = 5  # tokens that are guessed at most


class EagleSpec(Struct, frozen=True):
    """The sizes of an EAGLE layer."""

    layer: ModelSpec
    count: int = _COUNT

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size


def read_spec(path: Path, raw: Mapping[str, Any]) -> EagleSpec:
    """Read the sizes of the layer in the directory `path` from its config. Raises ModelError."""
    if any("eagle3" in str(name).lower() for name in raw.get("architectures") or ()):
        raise UnsupportedModel(f"{path} holds heads of EAGLE-3, and only those of EAGLE-1 run here: name other ones")
    spec = parse_spec({**raw, "architectures": []})  # vLLM has names of its own for them
    if spec.num_layers != 1:
        raise UnsupportedModel(f"{path} has {spec.num_layers} layers, and EAGLE's heads have one: it is a whole model")
    return EagleSpec(spec)


class _Row(NamedTuple):
    """A token, and the place before it: the model's normed hidden states, which row is that place's, and its
    position."""

    hidden: torch.Tensor
    row: int
    token: int
    position: int


class _Past:
    """What is kept of a sequence: K and V of the last places, and the rows of those that have none yet. The last row
    always is one of these."""

    def __init__(self, none: torch.Tensor) -> None:
        self.kv = none  # [places, 2 · kv_heads, head_dim]
        self.rows: list[_Row] = []

    def add_kv(self, kv: torch.Tensor) -> None:
        self.kv = torch.cat((self.kv, kv))[-WINDOW:]
        del self.rows[:-1]


class _State(NamedTuple):
    """Of each sequence: the hidden state before the next token; K and V [rows, places + count, 2 · kv_heads, head_dim]
    with room for those of guesses, and which there are; the turns of each guess."""

    hidden: torch.Tensor
    kv: torch.Tensor
    known: torch.Tensor
    turns: Sequence[CosSin]


class Eagle:
    """The layer, and what it attends to. `spec` has its sizes."""

    remembers = True

    def __init__(self, spec: EagleSpec, fc: Linear, layer: LayerWeights, model: Embeddings) -> None:
        self.spec, self._fc, self._layer, self._model = spec, fc, layer, model
        own = spec.layer
        self._frequencies = rotary.inverse_frequencies(own.layers[0].rope, own.head_dim)
        self._factor = own.layers[0].rope.attention_factor
        self._none = torch.empty((0, 2 * own.num_kv_heads, own.head_dim), dtype=fc.dtype)
        self._pasts: dict[Hashable, _Past] = {}

    @classmethod
    def load(cls, path: Path, spec: EagleSpec, dtype: torch.dtype, maker: LinearMaker, model: Embeddings) -> Eagle:
        """Load the checkpoint in the directory `path`. Raises ModelError."""
        with TensorFiles(path) as files:

            def take(name: str, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
                if name.endswith("input_layernorm.weight"):
                    return torch.ones(shape)  # there is none
                return files.read_tensor(name.removeprefix("model."), shape, dtypes)

            hidden = spec.hidden_size
            bias = files.read_tensor("fc.bias", (hidden,)).to(dtype) if "fc.bias" in files.names else None
            fc = maker.linear(Dense(files.read_tensor("fc.weight", (hidden, 2 * hidden)).to(dtype), bias))
            return cls(spec, fc, weights.read_layer(spec.layer, maker, take, dtype), model)

    def keep(self, hidden: torch.Tensor, drawn: Sequence[DrawnRows]) -> None:
        hidden = hidden[: max((each.row + len(each.tokens) for each in drawn), default=0)].clone()  # they are reused
        pasts: dict[Hashable, _Past] = {}
        for each in drawn:
            past = self._pasts.get(each.name)
            if past is None or past.rows[-1].position + 2 != each.position:
                past = _Past(self._none)
            for at, token in enumerate(each.tokens):
                past.rows.append(_Row(hidden, each.row + at, token, each.position + at - 1))
            del past.rows[: -WINDOW - 1]
            pasts[each.name] = past
        self._pasts = pasts

    def first(self, hidden: torch.Tensor, rows: Sequence[HiddenRow]) -> _State:
        pasts = [self._pasts.get(each.name) or _Past(self._none) for each in rows]
        if fresh := [row for past in pasts for row in past.rows[:-1]]:
            mixed = self._mixed(
                torch.tensor([row.token for row in fresh]), torch.stack([row.hidden[row.row] for row in fresh])
            )
            _, kv = self._projected(mixed, self._turns([row.position for row in fresh]))
            counts = [max(0, len(past.rows) - 1) for past in pasts]
            for past, end, count in zip(pasts, accumulate(counts), counts, strict=True):
                if count:
                    past.add_kv(kv[end - count : end])
        places, more = max(len(past.kv) for past in pasts), self.spec.count
        kv = self._none.new_zeros((len(rows), places + more, *self._none.shape[1:]))
        known = torch.zeros((len(rows), places + more), dtype=torch.bool)
        known[:, places:] = True
        for row, past in enumerate(pasts):
            kv[row, : len(past.kv)] = past.kv
            known[row, : len(past.kv)] = True
        cos, sin = self._turns([each.position - 2 + head for head in range(more) for each in rows])
        turns = [*zip(cos.split(len(rows)), sin.split(len(rows)), strict=True)]
        return _State(hidden, kv, known, turns)

    def advance(self, head: int, state: _State, tokens: torch.Tensor) -> _State:
        x = self._mixed(tokens, state.hidden)
        queries, new = self._projected(x, state.turns[head])
        end = state.kv.shape[1] - self.spec.count + head + 1
        state.kv[:, end - 1] = new
        keys, values = state.kv[:, :end].transpose(1, 2).chunk(2, dim=1)
        attended = functional.scaled_dot_product_attention(
            queries[:, :, None], keys, values, state.known[:, None, None, :end],
            scale=self.spec.layer.attention_scale, enable_gqa=True,
        )  # fmt: skip
        x = x + self._layer.output(attended.flatten(1))
        normed = functional.rms_norm(x, x.shape[-1:], self._layer.mlp_norm, self.spec.layer.norm_eps)
        assert isinstance(self._layer.mlp, MlpWeights)
        return state._replace(hidden=x + mlp.dense(self._layer.mlp, self.spec.layer.activation, normed))

    def logits(self, head: int, state: _State) -> torch.Tensor:
        return self._model.logits(state.hidden)

    def _mixed(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self._fc(torch.cat((self._model.embed(tokens), hidden), dim=-1))

    def _turns(self, positions: Sequence[int]) -> CosSin:
        return rotary.rotation(torch.tensor(positions), self._frequencies, self._factor)

    def _projected(self, x: torch.Tensor, turns: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [rows, heads, head_dim], and K and V [rows, 2 · kv_heads, head_dim]."""
        own = self.spec.layer
        qkv = self._layer.qkv(x).view(len(x), -1, own.head_dim)
        qk, values = qkv.split((own.num_heads + own.num_kv_heads, own.num_kv_heads), dim=1)
        queries, keys = rotary.rotate(qk, turns).split((own.num_heads, own.num_kv_heads), dim=1)
        return queries, torch.cat((keys, values), dim=1)
