"""One matrix product with an optional bias, with its weight packed the way the processor likes it best.

On CPU, oneDNN computes from a weight that it has reordered into its own tiles once; measured on two cores with a model
of 100 M parameters, that takes less than half the time of `functional.linear` for one token in bfloat16, and for 512 in
float32. The native kernels for few rows read tiles too, and in the order that oneDNN is known to choose, so that one
copy of the weight serves both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.nn import functional

from engine import huge_pages

TILE = 64
"""Outputs whose weights stand together."""


class Linear:
    """`x @ weight.T + bias`. Owns its weight, which may be in a form that only oneDNN and native kernels can read."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`weight` is [out, in], `bias` [out]."""
        self.bias = bias
        self.out_size, self.in_size = weight.shape
        self.dtype = weight.dtype
        self._packed = _packs(weight)
        self._weight: torch.Tensor | None = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._tiles: torch.Tensor | None = None
        self._copied = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out], in the weight's dtype; not after `keep_tiles`."""
        assert self._weight is not None
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return functional.linear(x, self._weight, self.bias)

    def tiles(self) -> torch.Tensor:
        """The weight as `tiled` orders it, on a CPU: oneDNN's own memory where that is its order too, or a copy. Valid
        while this object lives."""
        if self._tiles is None:
            assert self._weight is not None
            wanted = tiled(self._weight.to_dense() if self._packed else self._weight)
            shared = _memory(self._weight, wanted) if self._packed else None
            self._copied = shared is None
            self._tiles = wanted if shared is None else shared
            huge_pages.collapse(self._tiles.data_ptr(), self._tiles.nbytes)
        return self._tiles

    def keep_tiles(self) -> None:
        """Forget the weight in any other form, since from now on only native kernels read it."""
        self.tiles()
        if self._copied:
            self._weight = None


def tiled(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] → flat [out / 64, in / n, 64, n], outputs padded with zeros to whole tiles; n inputs fill four bytes.

    `in` must be a multiple of n, which is 1 for float32 and 2 for bfloat16.
    """
    out_size, in_size = weight.shape
    word = 4 // weight.element_size()
    padded = functional.pad(weight, (0, 0, 0, -out_size % TILE))
    return padded.view(-1, TILE, in_size // word, word).permute(0, 2, 1, 3).reshape(-1)


def _memory(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """The memory of a weight packed by oneDNN as a tensor like `like`; None where it is not equal to that."""
    size = torch.ops.mkldnn._nbytes(packed)
    if size != like.nbytes:
        return None
    memory = (ctypes.c_ubyte * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    found = torch.frombuffer(memory, dtype=like.dtype)
    return found if torch.equal(found, like) else None


def _packs(weight: torch.Tensor) -> bool:
    """Whether oneDNN gains anything here. Of float16 it has no fast form on most processors."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def stacked(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> Linear:
    """Several products of one input as one: the outputs stand side by side in the order given."""
    bias = None
    if all(part is not None for part in biases):
        bias = torch.cat([part for part in biases if part is not None])
    return Linear(torch.cat(list(weights)), bias)
