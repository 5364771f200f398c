"""Steps with many rows, in kernels of `prefill.cpp`; on a CPU with a matrix unit, the products are oneDNN's.

A layer is run on a block of rows at a time. The output of one kernel is in the cache for the next. The results of the
products are small enough that the allocator hands out the same memory again instead of mapping new. A block attends to
the K and V of the blocks before it, which are in their pages by then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from baton.trace import Tracer
from engine.cpu import build, features
from engine.cpu.build import Library
from engine.cpu.decode import dense_mlp
from engine.cpu.packed_linear import packed
from engine.models import rotary
from engine.models.linear import Linear
from engine.models.weights import LayerWeights, ModelWeights
from engine.spec import ModelSpec
from engine.step.batch import Batch, Ints
from kvstore.layout import PageLayout

BLOCK_ROWS = 256
"""Rows that go through a layer together. With fewer, the weights are read more often from where they don't fit into the
L2 cache; with more, what one kernel has written does not. Between 192 and 512 the difference is lost in the noise."""
MOST_LANES, FEWEST_LANES = 192, 48
"""Queries that one thread attends for at a time: more share the work of reading K and V, fewer divide more evenly."""
UNITS_PER_THREAD = 4
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_MOST_HEAD_DIM = 256
_GATES = 32  # that one kernel computes together
_NEW, _SUM, _GATE = 0, 1, 2  # what becomes of a product: `Into` in prefill.cpp
_ALIGNMENT = 64

_Pointer, _Count = ctypes.c_void_p, ctypes.c_int64


class _Team(ctypes.Structure):
    _fields_ = [("parallel", _Pointer), ("threads", _Count)]


class _Shape(ctypes.Structure):
    _fields_ = [
        ("dtype", _Count), ("heads", _Count), ("kv_heads", _Count), ("head_dim", _Count), ("page_size", _Count),
        ("num_layers", _Count),
    ]  # fmt: skip


@dataclass(frozen=True)
class Pieces:
    """Rows of several sequences that attend in one call, those with most before them first."""

    table: Ints  # [pieces, 5]: row, rows, position of the first, address of the block table, first unit
    units: int
    lanes: int


@dataclass(frozen=True)
class _Block:
    """Rows `first` to `last` − 1 of the step, and what they attend to."""

    first: int
    last: int
    pieces: Pieces


@dataclass(frozen=True)
class _PrefillStep:
    """What all layers of a step share."""

    blocks: Sequence[_Block]
    samples: Sequence[_Block]  # the same of the rows that a token is drawn from, as if there were no others
    cos: torch.Tensor  # [rows, 1, head_dim / 2] float32
    sin: torch.Tensor
    positions: Ints  # [rows]
    tables: Ints  # [rows]: addresses of block tables


class NativePrefill:
    """A forward pass as `engine.models.transformer` makes it, for batches of any size. One thread calls it at a
    time."""

    def __init__(
        self,
        library: Library,
        threads: int,
        config: ModelSpec,
        weights: ModelWeights,
        layout: PageLayout,
        pool: torch.Tensor,
        tracer: Tracer | None = None,
    ) -> None:
        """`weights` and `pool` are such as `runs` says; `threads` as many as torch has."""
        assert runs(config, weights, pool)
        self._span = (tracer or Tracer()).span
        self._config, self._weights, self._layout, self._pool = config, weights, layout, pool
        self._kernels = Kernels(library, threads, config, layout, pool)
        self._products: Products = OneDnnProducts(self._kernels)
        if own_products(weights):
            self._products = OwnProducts(self._kernels, linears_of(weights))
        last = weights.last_kv
        self._last_norm = None
        if last is not None and last.k_norm is not None:
            self._last_norm = last.k_norm.expand(config.num_kv_heads, -1).contiguous()
        assert config.rope is not None
        self._rope_factor = config.rope.attention_factor
        self._frequencies = rotary.inverse_frequencies(config.rope, config.head_dim)
        self._x = self._normed = torch.empty((0, config.hidden_size), dtype=pool.dtype)

    def forward(self, batch: Batch) -> torch.Tensor | None:
        """Hidden states, normed, of the sample rows: [sample_rows, hidden]; None for no rows."""
        config, weights = self._config, self._weights
        step, (x, normed) = self._begin(batch), self._buffers(len(batch.tokens))
        torch.index_select(weights.embedding, 0, torch.from_numpy(batch.tokens), out=x)
        norms = [layer.input_norm for layer in weights.layers]
        if weights.last_kv is not None:
            norms.append(weights.last_kv.input_norm)
        self._kernels.norm(x, None, norms[0], normed)
        for layer in range(config.num_layers - 1):
            for block in step.blocks:
                rows = slice(block.first, block.last)
                attended = self._attend(layer, weights.layers[layer], normed[rows], step, block)
                self._finish(weights.layers[layer], x[rows], attended, norms[layer + 1], normed[rows])
        if weights.last_kv is not None:
            self._last_key_value(normed, step)
            return None
        return self._last(batch, x, normed, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""
        assert self._weights.head is not None
        return self._products.plain(self._weights.head, hidden)

    def _last(self, batch: Batch, x: torch.Tensor, normed: torch.Tensor, step: _PrefillStep) -> torch.Tensor | None:
        """The last layer: K and V of all rows, and the rest of it for those that a token is drawn from."""
        weights, last = self._weights.layers[-1], self._config.num_layers - 1
        queries: list[torch.Tensor] = []
        for block in step.blocks:
            qkv = self._write(last, weights, normed[block.first : block.last], step, block)
            begin, end = np.searchsorted(batch.sample_rows, (block.first, block.last))
            queries.append(qkv[torch.from_numpy(batch.sample_rows[begin:end] - block.first)])
        if not len(batch.sample_rows):
            return None
        assert self._weights.norm is not None
        sampled, x = torch.cat(queries), x[torch.from_numpy(batch.sample_rows)]
        hidden = torch.empty_like(x)
        for block in step.samples:
            rows = slice(block.first, block.last)
            with self._span("attention", "engine"):
                window = self._config.windows[last]
                attended = self._kernels.attend(last, sampled[rows], block.pieces, window)
            self._finish(weights, x[rows], attended, self._weights.norm, hidden[rows])
        return hidden

    def _last_key_value(self, normed: torch.Tensor, step: _PrefillStep) -> None:
        w, last = self._weights.last_kv, self._config.num_layers - 1
        assert w is not None
        for block in step.blocks:
            rows = slice(block.first, block.last)
            kv = self._products.plain(w.kv, normed[rows])
            turn = (step.cos[rows], step.sin[rows])
            self._kernels.write(last, kv, 0, *turn, self._last_norm, step.positions[rows], step.tables[rows])

    def _attend(
        self, layer: int, w: LayerWeights, normed: torch.Tensor, step: _PrefillStep, block: _Block
    ) -> torch.Tensor:
        qkv = self._write(layer, w, normed, step, block)
        with self._span("attention", "engine"):
            return self._kernels.attend(layer, qkv, block.pieces, self._config.windows[layer])

    def _write(
        self, layer: int, w: LayerWeights, normed: torch.Tensor, step: _PrefillStep, block: _Block
    ) -> torch.Tensor:
        """Write K and V; return [rows, (heads + 2 · kv_heads) · head_dim], of which the queries are rotated."""
        with self._span("products", "engine"):
            rows, qkv = slice(block.first, block.last), self._products.plain(w.qkv, normed)
        heads = self._config.num_heads
        with self._span("K and V", "engine"):
            turn = (step.cos[rows], step.sin[rows])
            self._kernels.write(layer, qkv, heads, *turn, w.qk_norm, step.positions[rows], step.tables[rows])
        return qkv

    def _finish(
        self, w: LayerWeights, x: torch.Tensor, attended: torch.Tensor, next_norm: torch.Tensor, normed: torch.Tensor
    ) -> None:
        """The layer from its output product on: into `x`, and normed for whatever is next into `normed`."""
        mlp = dense_mlp(w)
        with self._span("products", "engine"):
            self._products.add(w.output, attended, x, w.mlp_norm, normed)
            self._products.add(mlp.down, self._products.gated(mlp.gate_up, normed), x, next_norm, normed)

    def _begin(self, batch: Batch) -> _PrefillStep:
        # What is left of the page's last owner is never attended to here, but behind a mask in torch: see TorchStep.
        if len(batch.fresh_pages):
            self._pool[torch.from_numpy(batch.fresh_pages)] = 0
        cos, sin = rotary.rotation(torch.from_numpy(batch.positions), self._frequencies, self._rope_factor)
        spans = np.array([(span.first, len(span), span.start) for span in batch.spans], dtype=np.int64)
        rows = np.column_stack((spans, batch.tables[spans[:, 0]]))
        blocks = list(self._blocks(rows))
        all_sampled = batch.num_samples == batch.num_tokens
        return _PrefillStep(
            blocks=blocks,
            samples=blocks if all_sampled else list(self._blocks(_sampled_rows(batch, rows))),
            cos=cos,
            sin=sin,
            positions=batch.positions,
            tables=batch.tables,
        )

    def _blocks(self, pieces: Ints) -> Iterator[_Block]:
        """`pieces`: [pieces, 4] as `Kernels.pieces` takes them, in the order of their rows."""
        firsts, lasts = pieces[:, 0], pieces[:, 0] + pieces[:, 1]
        for first, last in cut(int(lasts[-1]) if len(lasts) else 0):
            within = pieces[np.searchsorted(lasts, first, "right") : np.searchsorted(firsts, last, "left")].copy()
            begins = np.maximum(within[:, 0], first)
            within[:, 1] = np.minimum(within[:, 0] + within[:, 1], last) - begins
            within[:, 2] += begins - within[:, 0]
            within[:, 0] = begins - first
            yield _Block(first, last, self._kernels.pieces(within))

    def _buffers(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the residual stream and for its norms, kept for the next step: mapping it anew is slow."""
        if len(self._x) < rows:
            self._x = torch.empty((rows, self._config.hidden_size), dtype=self._pool.dtype)
            self._normed = torch.empty_like(self._x)
        return self._x[:rows], self._normed[:rows]


class Products(Protocol):
    """What a layer multiplies; `x` is [rows, in]."""

    def plain(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """[rows, out]."""
        ...

    def gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up, the halves of the product: [rows, out / 2]."""
        ...

    def add(self, linear: Linear, x: torch.Tensor, to: torch.Tensor, norm: torch.Tensor, normed: torch.Tensor) -> None:
        """to += product; normed = RMSNorm(to) · norm."""
        ...


class OneDnnProducts:
    """Products by oneDNN."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def plain(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x)

    def gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.gate(linear(x))

    def add(self, linear: Linear, x: torch.Tensor, to: torch.Tensor, norm: torch.Tensor, normed: torch.Tensor) -> None:
        self._kernels.norm(to, linear(x), norm, normed)


class OwnProducts:
    """Products by `prefill.cpp`, which alone and `decode.cpp` read the weights from then on."""

    def __init__(self, kernels: Kernels, linears: Sequence[Linear]) -> None:
        self._kernels = kernels
        for linear in linears:
            packed(linear).keep_tiles()

    def plain(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(x), linear.out_size), dtype=x.dtype)
        self._kernels.product(linear, x, out, _NEW)
        return out

    def gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        if linear.out_size // 2 % _GATES:
            return self._kernels.gate(self.plain(linear, x))
        out = torch.empty((len(x), linear.out_size // 2), dtype=x.dtype)
        self._kernels.product(linear, x, out, _GATE)
        return out

    def add(self, linear: Linear, x: torch.Tensor, to: torch.Tensor, norm: torch.Tensor, normed: torch.Tensor) -> None:
        self._kernels.product(linear, x, to, _SUM)
        self._kernels.norm(to, None, norm, normed)


class Kernels:
    """The functions of `prefill.cpp`, for one model and pool, on tensors and arrays; all contiguous."""

    def __init__(
        self, library: Library, threads: int, config: ModelSpec, layout: PageLayout, pool: torch.Tensor
    ) -> None:
        parallel = parallel_function()
        assert parallel is not None
        self._eps = config.norm_eps
        self._scale = config.head_dim**-0.5
        self._dtype = _DTYPES[pool.dtype]
        self._pool = pool
        self._shape = _Shape(
            self._dtype, config.num_heads, config.num_kv_heads, config.head_dim, layout.page_size, config.num_layers
        )
        self._team = _Team(parallel, threads)
        self._team_at, self._shape_at = ctypes.addressof(self._team), ctypes.addressof(self._shape)
        p, n, f = _Pointer, _Count, ctypes.c_float
        self._norm = _function(library.baton_prefill_norm, p, n, p, p, p, p, n, n, f)
        self._gate = _function(library.baton_prefill_gate, p, n, p, p, n, n)
        self._product = _function(library.baton_prefill_product, p, n, n, p, p, p, p, n, n, n)
        self._write = _function(library.baton_prefill_write, p, p, n, n, p, p, p, p, p, p, p, n, f)
        self._attend = _function(library.baton_prefill_attend, p, p, n, p, n, p, p, p, n, n, n, n, f, p)
        library.baton_prefill_scratch.restype = _Count
        scratch = library.baton_prefill_scratch() * self._team.threads
        self._scratch = torch.empty(scratch + _ALIGNMENT, dtype=torch.uint8)
        self._scratch_at = self._scratch.data_ptr() + -self._scratch.data_ptr() % _ALIGNMENT

    def norm(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor) -> None:
        """x += delta; out = RMSNorm(x) · weight."""
        added = None if delta is None else delta.data_ptr()
        self._norm(
            self._team_at, self._dtype, x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), *x.shape, self._eps
        )

    def product(self, linear: Linear, x: torch.Tensor, out: torch.Tensor, into: int) -> None:
        bias = None if linear.bias is None else linear.bias.data_ptr()
        self._product(
            self._team_at, self._dtype, into, x.data_ptr(), packed(linear).tiles().data_ptr(), bias, out.data_ptr(),
            len(x), linear.in_size, linear.out_size,
        )  # fmt: skip

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 · inner] → silu(gate) · up, [rows, inner]."""
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        self._gate(self._team_at, self._dtype, gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def write(
        self,
        layer: int,
        qkv: torch.Tensor,
        heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norm: torch.Tensor | None,
        positions: Ints,
        tables: Ints,
    ) -> None:
        """Rotate the queries of `qkv` in place; write its keys, rotated, and values into their pages.

        `norm` is [heads + kv_heads, head_dim]; `positions` and `tables`, addresses of block tables, are [rows].
        """
        weight = None if norm is None else norm.data_ptr()
        self._write(
            self._team_at, self._shape_at, heads, layer, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), weight,
            _address(positions), _address(tables), self._pool.data_ptr(), len(positions), self._eps,
        )  # fmt: skip

    def attend(self, layer: int, queries: torch.Tensor, pieces: Pieces, window: int | None) -> torch.Tensor:
        """[rows, heads · head_dim or more, of which those first are queries] → [rows, heads · head_dim]."""
        out = torch.empty((len(queries), self._shape.heads * self._shape.head_dim), dtype=queries.dtype)
        self._attend(
            self._team_at, self._shape_at, layer, queries.data_ptr(), queries.shape[1], out.data_ptr(),
            self._pool.data_ptr(), _address(pieces.table), len(pieces.table), pieces.units, pieces.lanes, window or 0,
            self._scale, self._scratch_at,
        )  # fmt: skip
        return out

    def pieces(self, rows: Ints) -> Pieces:
        """Divide pieces into units for the threads. `rows` is [pieces, 4]: row, number of rows, position of the first,
        and address of the block table."""
        table = np.zeros((len(rows), 5), dtype=np.int64)
        table[:, :4] = rows[np.argsort(-rows[:, 1] - rows[:, 2], kind="stable")]
        queries = table[:, 1] * (self._shape.heads // self._shape.kv_heads)
        lanes = MOST_LANES
        while True:
            units = self._shape.kv_heads * -(-queries // lanes)
            if lanes == FEWEST_LANES or units.sum() >= UNITS_PER_THREAD * self._team.threads:
                break
            lanes //= 2
        table[1:, 4] = np.cumsum(units)[:-1]
        return Pieces(table, int(units.sum()), lanes)


def runs(config: ModelSpec, weights: ModelWeights, pool: torch.Tensor) -> bool:
    """Whether there are kernels for such a model, in float32 or bfloat16 as its pages, on a CPU, and threads to run
    them on."""
    embedding = weights.embedding
    return (
        features.runs(config)
        and embedding.device.type == "cpu"
        and embedding.dtype in _DTYPES
        and pool.dtype == embedding.dtype
        and config.head_dim % 8 == 0
        and config.head_dim <= _MOST_HEAD_DIM
        and parallel_function() is not None
    )


def own_products(weights: ModelWeights) -> bool:
    """Whether our own products are the faster ones. oneDNN uses a matrix unit where there is one; we don't."""
    if weights.embedding.dtype == torch.float32:
        return True
    whole_cells = all(linear.in_size % 2 == 0 for linear in linears_of(weights))
    return whole_cells and "amx_bf16" not in build.cpu_description().split()


def linears_of(weights: ModelWeights) -> list[Linear]:
    """All products of the model."""
    linears: list[Linear] = []
    for layer in weights.layers:
        mlp = dense_mlp(layer)
        linears += [layer.qkv, layer.output, mlp.gate_up, mlp.down]
    if weights.last_kv is not None:
        linears.append(weights.last_kv.kv)
    return linears if weights.head is None else [*linears, weights.head]


@cache
def parallel_function() -> int | None:
    """`GOMP_parallel` of the OpenMP that torch uses; None if torch uses none that has it.

    The one that was loaded for the whole process comes first: the user may have preloaded another.
    """
    for name in (None, *Path(torch.__file__).parent.glob("lib/libtorch_cpu.so")):
        try:
            found = ctypes.CDLL(None if name is None else str(name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(found, _Pointer).value
    return None


def _sampled_rows(batch: Batch, rows: Ints) -> Ints:
    """The pieces of the sample rows once these stand alone, end to end. Consecutive rows of a chunk stay together.
    `rows`: the pieces of the whole batch, one for each chunk."""
    sampled = batch.sample_rows
    chunk = np.searchsorted(rows[:, 0], sampled, "right") - 1
    begins = np.flatnonzero((np.diff(sampled, prepend=-2) != 1) | (np.diff(chunk, prepend=-1) != 0))
    own = rows[chunk[begins]]
    return np.column_stack(
        (begins, np.diff(begins, append=len(sampled)), own[:, 2] + sampled[begins] - own[:, 0], own[:, 3])
    )


def cut(rows: int) -> Iterator[tuple[int, int]]:
    """Blocks of `BLOCK_ROWS`; the last takes in a remainder too small to be worth reading all weights once more."""
    first = 0
    while first < rows:
        last = first + BLOCK_ROWS if rows - first >= BLOCK_ROWS * 5 // 4 else rows
        yield first, last
        first = last


def _function(function: Any, *types: type) -> Callable[..., None]:
    function.argtypes, function.restype = types, None
    return function


def _address(array: Ints) -> int:
    return array.__array_interface__["data"][0]
