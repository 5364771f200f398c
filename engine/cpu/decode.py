"""Steps with few rows, all layers in one call to `decode.cpp`: from a batch to logits and the likeliest tokens.

Owns the memory that such a step works in. The weights, and the pages that it writes and attends to, are the engine's,
which runs steps with more rows, or on other devices, through torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.cpu import features
from engine.cpu.build import Library
from engine.cpu.packed_linear import packed
from engine.cpu.thread_pool import ThreadPool
from engine.models import rotary
from engine.models.linear import Linear
from engine.models.weights import LayerWeights, MlpWeights, ModelWeights
from engine.spec import ModelSpec
from engine.step.batch import Batch
from kvstore.layout import PageLayout

MOST_ROWS = 64
"""Beyond, oneDNN's products are as fast."""
MOST_IN_RUNS = 49_152
"""Pairs of a new token and a position it attends to, in sequences with several new tokens. The kernels for many rows
attend with more of them at a time, which is worth their slower products beyond this."""
MOST_THREADS = 256
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ALIGNMENT = 128

_Pointer = ctypes.c_void_p
_Count = ctypes.c_int64


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _Pointer), ("qkv", _Pointer), ("qkv_bias", _Pointer), ("qk_norm", _Pointer),
        ("output", _Pointer), ("output_bias", _Pointer), ("mlp_norm", _Pointer), ("gate_up", _Pointer),
        ("gate_up_bias", _Pointer), ("down", _Pointer), ("down_bias", _Pointer), ("window", _Count),
    ]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [
        ("dtype", _Count), ("hidden", _Count), ("inner", _Count), ("heads", _Count), ("kv_heads", _Count),
        ("head_dim", _Count), ("layers", _Count), ("vocab", _Count), ("page_size", _Count),
        ("norm_eps", ctypes.c_double), ("rope_factor", ctypes.c_double), ("embedding", _Pointer),
        ("frequencies", _Pointer), ("norm", _Pointer), ("head", _Pointer), ("layer", _Pointer), ("pool", _Pointer),
    ]  # fmt: skip


class _DecodeStep(ctypes.Structure):
    _fields_ = [
        ("rows", _Count), ("sample_count", _Count), ("begun_count", _Count), ("ints", _Pointer),
        ("logits", _Pointer), ("best", _Pointer),
    ]  # fmt: skip


@dataclass(frozen=True)
class Decoded:
    """Of each row that a token is drawn from: its logits, which last until the next step, and the likeliest token."""

    logits: torch.Tensor  # [sample_rows, vocab] float32
    best: Sequence[int]  # of equal logits the lowest id


class NativeDecode:
    """Runs batches of up to `MOST_ROWS` rows. One thread calls it at a time."""

    def __init__(
        self,
        library: Library,
        threads: ThreadPool,
        config: ModelSpec,
        weights: ModelWeights,
        layout: PageLayout,
        pool: torch.Tensor,
    ) -> None:
        """`weights` and `pool` are such as `runs` says; both stay the caller's, and must stay."""
        assert runs(config, weights, pool, threads.threads)
        self._threads = threads
        self._kept: list[object] = [weights, pool]  # whatever C++ has pointers to
        self._model = self._describe(config, weights, layout, pool)
        work = library.baton_decode_memory
        work.argtypes, work.restype = [_Pointer, _Count, _Count], _Count
        size = work(ctypes.byref(self._model), MOST_ROWS, threads.threads)
        memory = torch.zeros(size + _ALIGNMENT, dtype=torch.uint8)
        self._kept.append(memory)
        self._memory = memory.data_ptr() + -memory.data_ptr() % _ALIGNMENT
        logits = torch.empty((MOST_ROWS, config.vocab_size), dtype=torch.float32)
        self._logits = [logits[:rows] for rows in range(MOST_ROWS + 1)]  # a slice costs more than the rest of a call
        self._best = np.empty(MOST_ROWS, dtype=np.int64)
        self._model_at, self._logits_at = ctypes.byref(self._model), logits.data_ptr()
        self._best_at: int = self._best.__array_interface__["data"][0]
        self._run: Callable[..., None] = library.baton_decode_step
        library.baton_decode_step.argtypes = [_Pointer, _Pointer, _Count, _Pointer, _Pointer]
        library.baton_decode_step.restype = None

    @staticmethod
    def takes(batch: Batch) -> bool:
        """Whether the batch is run faster here than as one with many rows."""
        if batch.num_tokens > MOST_ROWS:
            return False
        return sum(len(span) * span.end for span in batch.spans if len(span) > 1) <= MOST_IN_RUNS

    def run(self, batch: Batch) -> Decoded:
        """Compute the batch's K and V into their pages, and logits of its `sample_rows`."""
        assert batch.num_tokens <= MOST_ROWS
        ints = batch.ints.__array_interface__["data"][0]
        step = _DecodeStep(
            batch.num_tokens, batch.num_samples, batch.num_fresh_pages, ints, self._logits_at, self._best_at
        )
        self._run(self._model_at, ctypes.byref(step), MOST_ROWS, self._threads.handle, self._memory)
        return Decoded(self._logits[batch.num_samples], self._best[: batch.num_samples].tolist())

    def _describe(self, config: ModelSpec, weights: ModelWeights, layout: PageLayout, pool: torch.Tensor) -> _Model:
        assert weights.norm is not None
        assert weights.head is not None
        assert config.rope is not None
        layers = (_Layer * config.num_layers)()
        for i, layer in enumerate(weights.layers):
            layers[i] = self._describe_layer(layer, config.windows[i])
        self._kept.append(layers)
        return _Model(
            _DTYPES[pool.dtype], config.hidden_size, dense_mlp(weights.layers[0]).down.in_size, config.num_heads,
            config.num_kv_heads, config.head_dim, config.num_layers, config.vocab_size, layout.page_size,
            config.norm_eps, config.rope.attention_factor, self._keep(weights.embedding),
            self._keep(rotary.inverse_frequencies(config.rope, config.head_dim)), self._float(weights.norm),
            self._keep(packed(weights.head).tiles()), ctypes.addressof(layers), self._keep(pool),
        )  # fmt: skip

    def _describe_layer(self, layer: LayerWeights, window: int | None) -> _Layer:
        def product(linear: Linear) -> tuple[int, int | None]:
            return self._keep(packed(linear).tiles()), self._float(linear.bias)

        mlp = dense_mlp(layer)

        return _Layer(
            self._float(layer.input_norm), *product(layer.qkv), self._float(layer.qk_norm), *product(layer.output),
            self._float(layer.mlp_norm), *product(mlp.gate_up), *product(mlp.down), window or 0,
        )  # fmt: skip

    def _float(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._keep(tensor.float())

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def dense_mlp(layer: LayerWeights) -> MlpWeights:
    """The MLP of a layer without experts."""
    assert isinstance(layer.mlp, MlpWeights)
    return layer.mlp


def runs(config: ModelSpec, weights: ModelWeights, pool: torch.Tensor, threads: int) -> bool:
    """Whether there are kernels for such a model: with a head, in float32 or bfloat16 as its pages, on a CPU."""
    embedding = weights.embedding
    return (
        features.runs(config)
        and weights.head is not None
        and embedding.device.type == "cpu"
        and embedding.dtype in _DTYPES
        and pool.dtype == embedding.dtype
        and config.hidden_size % 2 == 0  # two inputs of bfloat16 make a word
        and threads <= MOST_THREADS
    )
