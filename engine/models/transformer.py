"""The transformer in torch: one code path for every ModelSpec, on any device, and the oracle of all kernels.

Norms, rotary angles, the router's probabilities and the softmax are computed in float32 whatever the dtype, in
transformers' order, so that float32 greedy tokens agree with it.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from engine.attention.torch_sdpa import AttentionBackend, AttentionStep
from engine.device.uploads import upload
from engine.models import mlp, rotary
from engine.models.weights import KeyValueWeights, LayerWeights, MlpWeights, ModelWeights
from engine.spec import ModelSpec, RopeSpec
from engine.step.batch import Batch, Ints

NUMERICS_VERSION = 1
"""Raised whenever a change here makes other bits of the same input; part of every page key's namespace."""

CosSin = tuple[torch.Tensor, torch.Tensor]
Turns = Mapping[RopeSpec, CosSin]
"""A step's rotations, for each kind of layer."""


class Transformer:
    """A forward pass over a batch, writing K and V as it goes. Without a head it can do nothing but that."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, attention: AttentionBackend) -> None:
        self._spec = spec
        self._weights = weights
        self._attention = attention
        self._device = weights.embedding.device
        self._frequencies = {
            layer.rope: rotary.inverse_frequencies(layer.rope, spec.head_dim).to(self._device) for layer in spec.layers
        }

    def forward(self, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor | None:
        """Hidden states, normed, of the sample rows: [sample_rows, hidden]. `tokens` [tokens], where they are given,
        stand for those of the batch.

        None where no row is drawn from: then the last layer's K and V are all that was left to compute.
        """
        spec, weights = self._spec, self._weights
        step = self._attention.begin(batch)
        x = functional.embedding(self._tensor(batch.tokens) if tokens is None else tokens, weights.embedding)
        if spec.embedding_scale != 1:
            x = x * torch.tensor(spec.embedding_scale, dtype=x.dtype)  # rounded to the model's dtype first
        positions = self._tensor(batch.positions)
        turns = {
            rope: rotary.rotation(positions, frequencies, rope.attention_factor)
            for rope, frequencies in self._frequencies.items()
        }
        for layer in range(spec.num_layers - 1):
            x = self._layer(layer, weights.layers[layer], x, turns, step)

        last = spec.num_layers - 1
        if weights.last_kv is not None:
            self._last_key_value(weights.last_kv, x, turns, step)
            return None
        if not len(batch.sample_rows):
            self._queries(last, weights.layers[last], x, turns, step)
            return None
        x = self._layer(last, weights.layers[last], x, turns, step)
        assert weights.norm is not None
        return self._norm(x[self._tensor(batch.sample_rows)], weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""
        assert self._weights.head is not None
        return self._weights.head(hidden)

    def _layer(self, layer: int, w: LayerWeights, x: torch.Tensor, turns: Turns, step: AttentionStep) -> torch.Tensor:
        queries = self._queries(layer, w, x, turns, step)
        attended = step.attend(layer, queries, self._spec.layers[layer].window)
        x = x + self._output_norm(w.output(attended.flatten(1)), w.attention_output_norm)
        normed = self._norm(x, w.mlp_norm)
        if isinstance(w.mlp, MlpWeights):
            added = mlp.dense(w.mlp, self._spec.activation, normed)
        else:
            experts = self._spec.layers[layer].experts
            assert experts is not None
            added = mlp.mixed(w.mlp, experts, self._spec.activation, normed)
        return x + self._output_norm(added, w.mlp_output_norm)

    def _queries(self, layer: int, w: LayerWeights, x: torch.Tensor, turns: Turns, step: AttentionStep) -> torch.Tensor:
        """Write the layer's K and V; return its queries [tokens, heads, head_dim]."""
        heads, kv_heads = self._spec.num_heads, self._spec.num_kv_heads
        qkv = w.qkv(self._norm(x, w.input_norm)).view(len(x), -1, self._spec.head_dim)
        qk, values = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if w.qk_norm is not None:
            qk = self._norm_heads(qk, w.qk_norm)
        queries, keys = rotary.rotate(qk, turns[self._spec.layers[layer].rope]).split((heads, kv_heads), dim=1)
        step.write(layer, keys, values)
        return queries

    def _last_key_value(self, w: KeyValueWeights, x: torch.Tensor, turns: Turns, step: AttentionStep) -> None:
        """As `_queries`, without queries."""
        kv = w.kv(self._norm(x, w.input_norm)).view(len(x), -1, self._spec.head_dim)
        keys, values = kv.chunk(2, dim=1)
        if w.k_norm is not None:
            keys = self._norm(keys, w.k_norm)
        last = self._spec.num_layers - 1
        step.write(last, rotary.rotate(keys, turns[self._spec.layers[last].rope]), values)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm, in the weight's dtype where that has more bits."""
        return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, self._spec.norm_eps).to(x.dtype)

    def _norm_heads(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """RMSNorm of every head, [tokens, heads, head_dim], with weights of its own."""
        normed = functional.rms_norm(x.to(weights.dtype), x.shape[-1:], None, self._spec.norm_eps)
        return (normed * weights).to(x.dtype)

    def _output_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._norm(x, weight)

    def _tensor(self, values: Ints) -> torch.Tensor:
        return upload(values, self._device)
