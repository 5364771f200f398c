"""The transformer: one code path for Llama, Mistral, Qwen2 and Qwen3, which differ in what weights there are.

Norms, rotary angles and the softmax are computed in float32 whatever the dtype, in the order transformers computes
them, so that float32 greedy tokens agree with it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.attention.torch_sdpa import AttentionBackend, AttentionStep
from engine.batch import Batch
from engine.layers import rotary
from engine.models.config import ModelSpec
from engine.models.weights import KeyValueWeights, LayerWeights, ModelWeights

NUMERICS_VERSION = 1
"""Raised whenever a change here makes K or V that differ by more than rounding; part of every page key's namespace."""

CosSin = tuple[torch.Tensor, torch.Tensor]


class LlamaModel:
    """A forward pass over a batch, writing K and V as it goes. Without a head it can do nothing but that."""

    def __init__(self, config: ModelSpec, weights: ModelWeights, attention: AttentionBackend) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._device = weights.embedding.device
        self._frequencies = rotary.inverse_frequencies(config.rope, config.head_dim).to(self._device)

    def forward(self, batch: Batch) -> torch.Tensor | None:
        """Hidden states, normed, of the sample rows: [sample_rows, hidden].

        None where no row is drawn from: then the last layer's K and V are all that was left to compute.
        """
        config, weights = self._config, self._weights
        step = self._attention.begin(batch)
        x = functional.embedding(self._tensor(batch.tokens), weights.embedding)
        turn = rotary.rotation(self._tensor(batch.positions), self._frequencies)
        for layer in range(config.num_layers - 1):
            x = self._layer(layer, weights.layers[layer], x, turn, step)

        last = config.num_layers - 1
        if weights.last_kv is not None:
            self._last_key_value(weights.last_kv, x, turn, step)
            return None
        if not len(batch.sample_rows):
            self._queries(last, weights.layers[last], x, turn, step)
            return None
        x = self._layer(last, weights.layers[last], x, turn, step)
        assert weights.norm is not None
        return self._norm(x[self._tensor(batch.sample_rows)], weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""
        assert self._weights.head is not None
        return self._weights.head(hidden)

    def _layer(self, layer: int, w: LayerWeights, x: torch.Tensor, turn: CosSin, step: AttentionStep) -> torch.Tensor:
        queries = self._queries(layer, w, x, turn, step)
        attended = step.attend(layer, queries, self._config.windows[layer])
        x = x + w.output(attended.flatten(1))
        gate, up = w.gate_up(self._norm(x, w.mlp_norm)).chunk(2, dim=-1)
        return x + w.down(functional.silu(gate) * up)

    def _queries(self, layer: int, w: LayerWeights, x: torch.Tensor, turn: CosSin, step: AttentionStep) -> torch.Tensor:
        """Write the layer's K and V; return its queries [tokens, heads, head_dim]."""
        heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        qkv = w.qkv(self._norm(x, w.input_norm)).view(len(x), -1, self._config.head_dim)
        qk, values = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if w.qk_norm is not None:
            qk = self._norm(qk, None) * w.qk_norm
        queries, keys = rotary.rotate(qk, turn).split((heads, kv_heads), dim=1)
        step.write(layer, keys, values)
        return queries

    def _last_key_value(self, w: KeyValueWeights, x: torch.Tensor, turn: CosSin, step: AttentionStep) -> None:
        """As `_queries`, without queries."""
        kv = w.kv(self._norm(x, w.input_norm)).view(len(x), -1, self._config.head_dim)
        keys, values = kv.chunk(2, dim=1)
        if w.k_norm is not None:
            keys = self._norm(keys, w.k_norm)
        step.write(self._config.num_layers - 1, rotary.rotate(keys, turn), values)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._config.norm_eps)

    def _tensor(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, device=self._device)
