"""Products on a CPU whose weights stay in 8 or 4 bits: packed as the kernels of `forward.cpp` read them.

A tile of 64 outputs has for each group of inputs 64 scales, 64 minimums if there are any, and for every two inputs
their codes. In 8 bits these are [2][64] bytes. In 4 bits they are 16 words. Word i has the codes of the outputs i,
i + 16, i + 32 and i + 48. Those for the first input are in its lower half, the lowest bits first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from engine.checkpoint.formats.affine_groups import AffineGroups
from engine.cpu import huge_pages
from kvstore.layout import FP8

TILE = 64
"""Outputs whose weights stand together."""
_PART = 256  # what numbers of E4M3 are divided by, so that they are made by moving bits
_GROUPS = (128, 64, 32, 16)
"""Sizes of groups that the kernels know."""


class PackedGroups:
    """A product whose weight is in groups."""

    def __init__(self, groups: AffineGroups, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """On the device "meta" it is as large as it would be on a CPU."""
        self.bias, self.dtype = bias, dtype
        self.out_size, self.in_size = groups.codes.shape
        self.bits, self.form = groups.bits, FP8 if groups.floats else f"int{groups.bits}"
        self._groups: AffineGroups | None = groups
        in_turn, order = groups.in_turn()
        self.order = None if order is None else order.int()
        """Which input each column of the tiles is for; None: they follow one another."""
        split = split_groups(in_turn)
        if groups.floats:
            split = replace(split, codes=split.codes.view(torch.int8), scale=split.scale * _PART)
        self.group = split.group
        self.has_minimums = split.minimum is not None
        meta = split.scale.is_meta
        self.wide = not meta and not torch.equal(split.scale, split.scale.half().float())
        self._tiles = _tiled(split, self.wide)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out], without kernels; not after `keep_tiles`."""
        assert self._groups is not None
        return functional.linear(x, self._groups.dense().to(x.dtype), self.bias)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._tiles, self.bias, self.order) if part is not None)

    def tiles(self) -> torch.Tensor:
        return self._tiles

    def keep_tiles(self) -> None:
        """Forget the weight in any other form, since from now on only native kernels read it."""
        self._groups = None
        huge_pages.collapse(self._tiles.data_ptr(), self._tiles.nbytes)


def knows(groups: AffineGroups) -> bool:
    of = groups.group_of
    return _size(groups) is not None and (of is None or bool((of.bincount() == groups.group).all()))


def split_groups(groups: AffineGroups) -> AffineGroups:
    """Return the same matrix with signed codes, and groups of a size that the kernels know."""
    size = _size(groups)
    assert size is not None
    codes, scale, minimum, parts = groups.codes, groups.scale, groups.minimum, groups.group // size
    if codes.dtype == torch.uint8:
        half = 1 << groups.bits - 1
        codes = (codes.to(torch.int16) - half).to(torch.int8)
        minimum = scale * half + (0 if minimum is None else minimum)
    scale = scale.repeat_interleave(parts, 1)
    minimum = None if minimum is None else minimum.repeat_interleave(parts, 1)
    return AffineGroups(codes, scale, minimum, groups.bits)


def _size(groups: AffineGroups) -> int | None:
    return next((size for size in _GROUPS if groups.group % size == 0), None)


def _tiled(groups: AffineGroups, wide: bool) -> torch.Tensor:
    """Return all tiles as bytes. Outputs are padded with zeros to whole tiles."""
    missing = -len(groups.codes) % TILE
    codes = functional.pad(groups.codes, (0, 0, 0, missing))
    of_groups: Sequence[torch.Tensor] = [groups.scale if wide else groups.scale.half()]
    of_groups += [] if groups.minimum is None else [groups.minimum]
    heads = [
        functional.pad(part, (0, 0, 0, missing)).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()
        for part in of_groups
    ]
    # [tiles, vectors, outputs, groups, pairs, two inputs]
    codes = codes.unflatten(1, (-1, groups.group // 2, 2)).unflatten(0, (-1, 4, TILE // 4))
    if groups.bits == 8:
        packed = codes.permute(0, 3, 4, 5, 1, 2).flatten(2)
    else:
        words = torch.zeros(codes[:, 0, ..., 0].shape, dtype=torch.int32, device=codes.device)
        for vector in range(4):
            for place in range(2):
                words |= (codes[:, vector, ..., place].to(torch.int32) + 8 & 15) << 4 * vector + 16 * place
        packed = words.permute(0, 2, 3, 1).flatten(2)
    parts = [part.contiguous().view(torch.uint8) for part in (*heads, packed)]
    return torch.cat(parts, 2).flatten()
