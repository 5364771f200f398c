"""Steps on a CPU, all layers in one call to `forward.cpp`: from a batch to hidden states, logits and likeliest tokens.
And single products, for models whose other work is torch's.

Owns the memory that a step works in. The weights, and the pages that it writes and attends to, are the engine's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.cpu import features
from engine.cpu.build import Library
from engine.cpu.packed_groups import PackedGroups
from engine.cpu.packed_linear import PackedLinear, packed, tiled
from engine.cpu.thread_pool import ThreadPool
from engine.models import rotary
from engine.models.linear import Linear
from engine.models.weights import (
    ExpertsWeights,
    KeyValueWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    StackedExperts,
)
from engine.spec import ModelSpec
from engine.step.batch import Batch, Floats
from kvstore.layout import FP8, PageLayout

MOST_THREADS = 256
MOST_HEAD_DIM = 256
_KEPT_ROWS = 64  # of logits
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ALIGNMENT = 128

_Pointer = ctypes.c_void_p
_Count = ctypes.c_int64
_Double = ctypes.c_double


class _Weight(ctypes.Structure):
    _fields_ = [
        ("tiles", _Pointer), ("bits", _Count), ("floats", _Count), ("group", _Count), ("wide", _Count),
        ("minimums", _Count), ("order", _Pointer),
    ]  # fmt: skip


class _Expert(ctypes.Structure):
    _fields_ = [("gate_up", _Weight), ("down", _Weight)]  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _Pointer), ("qkv", _Weight), ("qkv_bias", _Pointer), ("qk_norm", _Pointer),
        ("output", _Weight), ("output_bias", _Pointer), ("output_norm", _Pointer), ("mlp_norm", _Pointer),
        ("gate_up", _Weight), ("gate_up_bias", _Pointer), ("down", _Weight), ("down_bias", _Pointer),
        ("down_norm", _Pointer), ("window", _Count), ("rope", _Count), ("router", _Weight), ("experts", _Pointer),
        ("expert_count", _Count), ("top_k", _Count), ("renormalise", _Count),
    ]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [
        ("dtype", _Count), ("hidden", _Count), ("inner", _Count), ("heads", _Count), ("kv_heads", _Count),
        ("head_dim", _Count), ("layers", _Count), ("vocab", _Count), ("page_size", _Count), ("gelu", _Count),
        ("ropes", _Count), ("half", _Count), ("most_experts", _Count), ("most_top_k", _Count),
        ("expert_inner", _Count), ("norm_eps", _Double), ("embedding_scale", _Double),
        ("attention_scale", _Double), ("embedding", _Pointer), ("frequencies", _Pointer), ("rope_factors", _Pointer),
        ("norm", _Pointer), ("head", _Weight), ("layer", _Pointer), ("pool", _Pointer),
        ("element", _Count), ("fp8", _Count), ("ordered", _Count),
    ]  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [
        ("rows", _Count), ("sample_count", _Count), ("begun_count", _Count), ("ints", _Pointer), ("hidden", _Pointer),
        ("logits", _Pointer), ("best", _Pointer), ("moved", _Count), ("observed_count", _Count), ("weights", _Pointer),
        ("weights_stride", _Count), ("ring", _Pointer),
    ]  # fmt: skip


class Ring(ctypes.Structure):
    """A chunk's part in a ring, as `engine.step.ring.RingChunk` says."""

    _fields_ = [
        ("marks", _Pointer), ("slots", _Pointer), ("name", _Count), ("place", _Count), ("number", _Count),
        ("awaits", _Count), ("patience", _Count), ("give_count", _Count), ("take_count", _Count),
        ("copies", _Pointer), ("broken", _Count),
    ]  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """Of some rows: their logits, which last until the next step, and the likeliest tokens."""

    logits: torch.Tensor  # [rows, vocab] float32
    best: Sequence[int]  # of equal logits the lowest id


class Memory:
    """What kernels work in."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._at = self._size = 0

    def lend(self, function: Callable[..., int], *arguments: object) -> None:
        """Call a kernel, with more memory where it needs more."""
        while (needed := function(*arguments, self._at, self._size)) > self._size:
            self._size = needed + needed // 4
            self._bytes = torch.empty(self._size + _ALIGNMENT, dtype=torch.uint8)
            self._at = self._bytes.data_ptr() + -self._bytes.data_ptr() % _ALIGNMENT


class Product:
    """A product by itself, with the bits that it has within a step."""

    def __init__(self, library: Library, threads: ThreadPool, memory: Memory, linear: PackedLinear) -> None:
        """`linear`, with no bias and even `in`, is kept in tiles from now on. One thread at a time calls those that
        share `memory`."""
        linear.keep_tiles()
        self._threads, self._memory, self._linear, self._layer = threads, memory, linear, _Layer()
        self._model = _Model(
            dtype=_DTYPES[linear.dtype], hidden=linear.in_size, vocab=linear.out_size, ordered=linear.in_size, heads=1,
            kv_heads=1, head_dim=1, page_size=1, head=_Weight(linear.tiles().data_ptr()),
            layer=ctypes.addressof(self._layer),
        )  # fmt: skip
        self._model_at = ctypes.byref(self._model)
        self._function: Callable[..., int] = library.baton_product
        self._function.argtypes = [_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Count]
        self._function.restype = _Count

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, in] → [rows, out], of one dtype, as `bias` is: [out]."""
        rows, result = x.contiguous(), x.new_empty(len(x), self._linear.out_size)
        added = None if bias is None else bias.float().contiguous()
        batch = _Batch(0, len(rows), 0, None, rows.data_ptr(), result.data_ptr(), None)
        bias_at = None if added is None else added.data_ptr()
        self._memory.lend(self._function, self._model_at, ctypes.byref(batch), bias_at, self._threads.handle)
        return result


class NativeForward:
    """Runs batches of any size. One thread calls it at a time."""

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
        self._hidden_size, self._vocab_size = config.hidden_size, config.vocab_size
        self._dtype = weights.embedding.dtype
        self._has_head = weights.head is not None
        self.forms = set[str]()  # of products that are not dense
        self._ordered = 0  # the most inputs of a product that has them in another order
        self._references: list[object] = [weights, pool]  # whatever C++ has pointers to
        self._model = self._describe(config, weights, layout, pool)
        self._model_at = ctypes.byref(self._model)
        self._memory = Memory()
        logits = torch.empty((_KEPT_ROWS, config.vocab_size if self._has_head else 0), dtype=torch.float32)
        self._logits = [logits[:rows] for rows in range(_KEPT_ROWS + 1)]  # a slice costs more than the rest of a call
        self._best = np.empty(_KEPT_ROWS, dtype=np.int64)
        self._few_hidden = torch.zeros((_KEPT_ROWS, config.hidden_size), dtype=self._dtype)
        self.hidden = self._few_hidden  # of the sample rows of the last step, normed: [sample_rows or more, hidden]
        self._addresses = (self._few_hidden.data_ptr(), logits.data_ptr(), self._best.__array_interface__["data"][0])
        self._forward: Callable[..., int] = library.baton_forward
        self._head: Callable[..., int] = library.baton_head
        for function in (library.baton_forward, library.baton_head):
            function.argtypes = [_Pointer, _Pointer, _Pointer, _Pointer, _Count]
            function.restype = _Count

    def run(self, batch: Batch, weights: Floats | None = None, ring: Ring | None = None) -> Scores | None:
        """Compute the batch's K and V into their pages, and logits of its `sample_rows`, if there are any and there is
        a head. `weights`, [num_observed, pages of the longest context], zeros: is told how much these rows attend to
        each page. `ring`: the part that its only chunk has in one, and is told whether that was broken."""
        count = batch.num_samples if self._has_head else 0
        if count <= _KEPT_ROWS:
            logits, best, addresses, self.hidden = self._logits[count], self._best, self._addresses, self._few_hidden
        else:
            logits, best = torch.empty((count, self._vocab_size)), np.empty(count, dtype=np.int64)
            self.hidden = torch.empty((count, self._hidden_size), dtype=self._dtype)
            addresses = (self.hidden.data_ptr(), logits.data_ptr(), best.__array_interface__["data"][0])
        described = self._described(batch, addresses, weights)
        described.ring = None if ring is None else ctypes.addressof(ring)
        self._call(self._forward, described)
        return Scores(logits, best[:count].tolist()) if count else None

    def forward(self, batch: Batch, weights: Floats | None = None) -> torch.Tensor | None:
        """As `run`; hidden states, normed, of the sample rows: [sample_rows, hidden]."""
        count = batch.num_samples if self._has_head else 0
        hidden = torch.empty((count, self._hidden_size), dtype=self._dtype)
        self._call(self._forward, self._described(batch, (hidden.data_ptr(), None, None), weights))
        return hidden if count else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        assert self._has_head
        logits, best = torch.empty((len(hidden), self._vocab_size)), np.empty(len(hidden), dtype=np.int64)
        address = best.__array_interface__["data"][0]
        rows = hidden.contiguous()
        self._call(self._head, _Batch(0, len(rows), 0, None, rows.data_ptr(), logits.data_ptr(), address))
        return logits

    @staticmethod
    def _described(
        batch: Batch, addresses: tuple[int | None, int | None, int | None], weights: Floats | None
    ) -> _Batch:
        ints = batch.ints.__array_interface__["data"][0]
        described = _Batch(batch.num_tokens, batch.num_samples, batch.num_fresh_pages, ints, *addresses, batch.moved)
        if weights is not None:
            described.observed_count, described.weights_stride = weights.shape
            described.weights = weights.__array_interface__["data"][0]
        return described

    def _call(self, function: Callable[..., int], batch: _Batch) -> None:
        self._memory.lend(function, self._model_at, ctypes.byref(batch), self._threads.handle)

    def _describe(self, config: ModelSpec, weights: ModelWeights, layout: PageLayout, pool: torch.Tensor) -> _Model:
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        layers = (_Layer * config.num_layers)()
        for i, layer in enumerate(weights.layers):
            layers[i] = self._describe_layer(layer)
        if weights.last_kv is not None:
            layers[config.num_layers - 1] = self._describe_last(weights.last_kv, config)
        for described, spec in zip(layers, config.layers, strict=True):
            described.window, described.rope = spec.window or 0, ropes.index(spec.rope)
            if (experts := spec.experts) is not None:
                described.expert_count, described.top_k = experts.count, experts.top_k
                described.renormalise = experts.renormalise
        self._references.append(layers)
        experts = [layer.experts for layer in config.layers if layer.experts is not None]
        head = _Weight() if weights.head is None else self._product(weights.head)[0]
        frequencies = torch.stack([rotary.inverse_frequencies(rope, config.head_dim) for rope in ropes])
        return _Model(
            _DTYPES[self._dtype], config.hidden_size, _inner_size(weights), config.num_heads, config.num_kv_heads,
            config.head_dim, config.num_layers, config.vocab_size, layout.page_size, config.activation == "gelu_tanh",
            *frequencies.shape, max((one.count for one in experts), default=0),
            max((one.top_k for one in experts), default=0), _expert_inner(weights), config.norm_eps,
            float(torch.tensor(config.embedding_scale, dtype=self._dtype)), config.attention_scale,
            self._keep(weights.embedding), self._keep(frequencies),
            self._keep(torch.tensor([rope.attention_factor for rope in ropes])), self._float(weights.norm), head,
            ctypes.addressof(layers), self._keep(pool), pool.element_size(), layout.dtype == FP8, self._ordered,
        )  # fmt: skip

    def _describe_layer(self, layer: LayerWeights) -> _Layer:
        described = _Layer(
            self._float(layer.input_norm), *self._product(layer.qkv), self._float(layer.qk_norm),
            *self._product(layer.output), self._float(layer.attention_output_norm), self._float(layer.mlp_norm),
        )  # fmt: skip
        described.down_norm = self._float(layer.mlp_output_norm)
        if isinstance(layer.mlp, MlpWeights):
            described.gate_up, described.gate_up_bias = self._product(layer.mlp.gate_up)
            described.down, described.down_bias = self._product(layer.mlp.down)
        else:
            each = _host_experts(layer.mlp)
            experts = (_Expert * len(each))()
            for described_one, one in zip(experts, each, strict=True):
                described_one.gate_up, described_one.down = self._product(one.gate_up)[0], self._product(one.down)[0]
            self._references.append(experts)
            described.experts, described.router.tiles = ctypes.addressof(experts), self._keep(tiled(layer.mlp.router))
        return described

    def _describe_last(self, last: KeyValueWeights, config: ModelSpec) -> _Layer:
        """Of K and V alone."""
        norm = None
        if last.k_norm is not None:
            norm = last.k_norm.float().expand(config.num_heads + config.num_kv_heads, -1)
        return _Layer(self._float(last.input_norm), *self._product(last.kv), self._float(norm))

    def _product(self, linear: Linear) -> tuple[_Weight, int | None]:
        """Its tiles, in which alone it is kept from now on, and its bias."""
        one = packed(linear)
        one.keep_tiles()
        weight = _Weight(self._keep(one.tiles()))
        if isinstance(one, PackedGroups):
            weight.bits, weight.floats, weight.group = one.bits, one.form == FP8, one.group
            weight.wide, weight.minimums = one.wide, one.has_minimums
            if one.order is not None:
                weight.order, self._ordered = self._keep(one.order), max(self._ordered, one.in_size)
            self.forms.add(one.form)
        return weight, self._float(linear.bias)

    def _float(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._keep(tensor.float())

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._references.append(tensor)
        return tensor.data_ptr()


def _host_experts(experts: ExpertsWeights) -> tuple[MlpWeights, ...]:
    """Those of a host, which are products of their own."""
    assert not isinstance(experts.experts, StackedExperts)
    return experts.experts


def _inner_size(weights: ModelWeights) -> int:
    """Of dense MLPs; 0 where there is none."""
    return max((layer.mlp.down.in_size for layer in weights.layers if isinstance(layer.mlp, MlpWeights)), default=0)


def _expert_inner(weights: ModelWeights) -> int:
    """The same of experts."""
    mixed = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, ExpertsWeights)]
    return max((_host_experts(one)[0].down.in_size for one in mixed), default=0)


def runs(config: ModelSpec, weights: ModelWeights, pool: torch.Tensor, threads: int) -> bool:
    """Whether there are kernels for such a model: in float32 or bfloat16, on a CPU, with pages in the same or
    in codes."""
    embedding = weights.embedding
    return (
        features.runs(config)
        and embedding.device.type == "cpu"
        and embedding.dtype in _DTYPES
        and pool.dtype in (embedding.dtype, torch.int8)
        and config.hidden_size % 2 == 0  # two inputs of bfloat16 make a word
        and config.head_dim <= MOST_HEAD_DIM
        and threads <= MOST_THREADS
    )
