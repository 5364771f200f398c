"""FP8 with one scale for each block of 128 x 128, as DeepSeek and Qwen publish it: `quant_method` "fp8".

A matrix is `name.weight` in float8_e4m3fn and `name.weight_scale_inv`, what each block is multiplied with.
"""

# pyright: strict

import math
from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct, convert

from baton.errors import UnsupportedModel
from engine.checkpoint.formats.affine_groups import AffineGroups, checked_floats, checked_scale
from engine.checkpoint.formats.format import FLOATS, Shape, Take
from engine.spec import WeightSpec

BLOCK = 128


class _Settings(Struct):
    weight_block_size: tuple[int, ...]
    modules_to_not_convert: tuple[str, ...] | None = None


def describe(settings: Mapping[str, Any]) -> WeightSpec:
    """Read a `quantization_config`. Raises UnsupportedModel, and ValidationError for another form."""
    read = convert(settings, _Settings)
    if read.weight_block_size != (BLOCK, BLOCK):
        raise UnsupportedModel(f"fp8 with blocks of {read.weight_block_size} is not supported; of 128 x 128 it is")
    return WeightSpec("fp8", bits=8, group=BLOCK, plain=read.modules_to_not_convert or ())


class Fp8Block:
    """Matrices in FP8 blocks. `scale` is what their scales are called."""

    def __init__(self, spec: WeightSpec, scale: str = "weight_scale_inv") -> None:
        self._scale = scale

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        return {f"{name}.weight": shape, f"{name}.{self._scale}": _blocks(shape)}

    def read_matrix(self, name: str, shape: Shape, take: Take) -> AffineGroups:
        rows, columns = shape
        codes = checked_floats(f"{name}.weight", take(f"{name}.weight", shape, (torch.float8_e4m3fn,)))
        group = math.gcd(columns, BLOCK)  # the last block of a row may have less inputs
        place = f"{name}.{self._scale}"
        scales = checked_scale(place, take(place, _blocks(shape), FLOATS))
        scales = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK // group, 1)[:, : columns // group]
        return AffineGroups(codes, scales, None, 8)


def _blocks(shape: Shape) -> Shape:
    return tuple(-(-size // BLOCK) for size in shape)
