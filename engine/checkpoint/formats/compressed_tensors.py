"""compressed-tensors, as LLM Compressor and `baton quantize` write it: `quant_method` "compressed-tensors".

Integers lie as int8 ("int-quantized"), or packed along the inputs ("pack-quantized"). FP8 ("float-quantized") has a
scale for each row, or for each block as `quant_method` "fp8" has. FP4 (E2M1) has a scale for each group: a power of two
("mxfp4-pack-quantized", OCP Microscaling Formats 1.0), or a number of E4M3 divided by one of the whole matrix
("nvfp4-pack-quantized"). Inputs of products that the format quantizes as well (W8A8, W4A4) are computed as they are,
which is nearer to the model.
"""

# pyright: strict

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from msgspec import Struct, convert

from baton.errors import CorruptWeights, UnsupportedModel
from engine.checkpoint.formats.affine_groups import (
    AffineGroups,
    checked_floats,
    checked_groups,
    checked_scale,
    group_count,
    regular,
    unpacked,
)
from engine.checkpoint.formats.format import FLOATS, Matrix, Shape, Take
from engine.checkpoint.formats.fp8_block import BLOCK, Fp8Block
from engine.spec import WeightSpec


class _Weights(Struct):
    type: Literal["int", "float"]
    num_bits: int
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"]
    group_size: int | None = None
    block_structure: tuple[int, ...] | None = None
    symmetric: bool = True
    actorder: str | bool | None = None


class _Group(Struct):
    targets: tuple[str]
    weights: _Weights
    format: str | None = None


class _Settings(Struct):
    config_groups: dict[str, _Group]
    format: str = ""
    ignore: tuple[str, ...] = ()


_BITS = {("int-quantized", "int"): (8,), ("pack-quantized", "int"): (4, 8), ("float-quantized", "float"): (8,)}
_FP4 = {"mxfp4-pack-quantized": ("group", 32), "nvfp4-pack-quantized": ("tensor_group", 16)}
_E2M1 = torch.tensor([sign * each for sign in (1, -1) for each in (0, 1, 2, 3, 4, 6, 8, 12)], dtype=torch.int8)
"""The numbers of E2M1 by their bits, times two."""
_HEADS = ("lm_head", "re:.*lm_head", "re:.*lm_head$", "re:lm_head")
"""How the output head is named."""


def describe(settings: Mapping[str, Any]) -> WeightSpec:
    """Read a `quantization_config`: one group for all layers, and perhaps one for the output head. Raises
    UnsupportedModel, and ValidationError for another form."""
    read = convert(settings, _Settings)
    groups = {group.targets[0]: _described(group, read) for group in read.config_groups.values()}
    layers, head = groups.pop("Linear", None), next((groups.pop(name) for name in _HEADS if name in groups), None)
    if layers is None or groups or len(read.config_groups) > 1 + (head is not None):
        targets = [group.targets[0] for group in read.config_groups.values()]
        raise UnsupportedModel(
            f"compressed-tensors with config_groups for {targets} is not supported; for Linear it is"
        )
    if head is None and not set(_HEADS) & set(read.ignore):
        head = layers
    return replace(layers, plain=read.ignore, head=head)


def _described(group: _Group, read: _Settings) -> WeightSpec:
    layout, weights = group.format or read.format, group.weights
    size = (weights.group_size or -1) if weights.strategy.endswith("group") else 0
    if weights.strategy == "block":
        blocks = ("float-quantized", "float", 8, (BLOCK, BLOCK))
        known, size = (layout, weights.type, weights.num_bits, weights.block_structure) == blocks, BLOCK
    elif layout in _FP4:
        known = (weights.type, weights.num_bits, weights.strategy, size) == ("float", 4, *_FP4[layout])
    else:
        known = weights.num_bits in _BITS.get((layout, weights.type), ()) and weights.strategy != "tensor_group"
        known = known and (size == 0 or (size > 0 and weights.type == "int"))
    if not known:
        raise UnsupportedModel(
            f"compressed-tensors in the format {layout!r} with {weights.num_bits} bits by {weights.strategy} is not "
            "supported; int8, packed int4, MXFP4, NVFP4, and FP8 by rows or blocks are"
        )
    return WeightSpec(
        "compressed-tensors",
        layout,
        weights.num_bits,
        size,
        symmetric=weights.symmetric,
        act_order=weights.actorder in ("group", True),
        by_tensor=weights.strategy == "tensor",
    )


class CompressedTensors:
    """Matrices as compressed-tensors writes them."""

    def __init__(self, spec: WeightSpec) -> None:
        self._spec = spec
        self._packed, self._float = spec.layout == "pack-quantized", spec.layout == "float-quantized"
        self._blocks = Fp8Block(spec, "weight_scale") if self._float and spec.group else None

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        (rows, columns), spec = shape, self._spec
        if self._blocks is not None:
            return self._blocks.stored(name, shape)
        groups = group_count(columns, spec.group)
        if spec.layout in _FP4:
            whole = {f"{name}.weight_global_scale": (1,)} if _FP4[spec.layout][0] == "tensor_group" else {}
            return {f"{name}.weight_packed": (rows, -(-columns // 2)), f"{name}.weight_scale": (rows, groups)} | whole
        scales = (1,) if spec.by_tensor else (rows, groups)
        per_word = 32 // spec.bits
        tensors: dict[str, Shape] = {f"{name}.weight_scale": scales}
        if self._packed:
            tensors |= {f"{name}.weight_packed": (rows, -(-columns // per_word)), f"{name}.weight_shape": (2,)}
        else:
            tensors[f"{name}.weight"] = shape
        if not spec.symmetric:
            packed = self._packed and not spec.by_tensor
            tensors[f"{name}.weight_zero_point"] = (-(-rows // per_word), groups) if packed else scales
        if spec.act_order:
            tensors[f"{name}.weight_g_idx"] = (columns,)
        return tensors

    def read_matrix(self, name: str, shape: Shape, take: Take) -> Matrix:
        spec, (rows, columns) = self._spec, shape
        if self._blocks is not None:
            return self._blocks.read_matrix(name, shape, take)
        tensors = self.stored(name, shape)

        def part(end: str, *dtypes: torch.dtype) -> torch.Tensor:
            return take(f"{name}.{end}", tensors[f"{name}.{end}"], dtypes)

        groups = group_count(columns, spec.group)
        if spec.layout in _FP4:
            packed = part("weight_packed", torch.uint8)
            codes = _E2M1.to(packed.device)[unpacked(packed, 4, 1, (0, 1)).int()][:, :columns]
            if f"{name}.weight_global_scale" in tensors:
                whole = part("weight_global_scale", torch.float32)
                checked_scale(f"{name}.weight_global_scale", whole / whole)  # NaN for zero and infinity, too
                scale = part("weight_scale", torch.float8_e4m3fn).float() / whole
            else:
                exponent = part("weight_scale", torch.uint8).double()
                scale = torch.where(exponent < 255, exponent - 127, torch.nan).exp2().float()
            scale = checked_scale(f"{name}.weight_scale", scale) / 2
            return AffineGroups(codes, scale, None, 8, regular(columns, spec.group))
        scale = checked_scale(f"{name}.weight_scale", part("weight_scale", *FLOATS)).expand(rows, groups)
        if self._float:
            return AffineGroups(checked_floats(f"{name}.weight", part("weight", torch.float8_e4m3fn)), scale, None, 8)
        group_of = regular(columns, spec.group)
        if spec.act_order:
            place = f"{name}.weight_g_idx"
            group_of = checked_groups(place, part("weight_g_idx", torch.int32, torch.int64), groups, spec.group)
        if self._packed:
            says = part("weight_shape", torch.int64, torch.int32)
            if not says.is_meta and (shown := [int(one) for one in says]) != [rows, columns]:
                raise CorruptWeights(
                    f"{name}.weight_shape says {shown}, the config {[rows, columns]}; fetch the checkpoint again"
                )
            codes = unpacked(part("weight_packed", torch.int32), spec.bits, 1)[:, :columns]
        else:
            codes = _from_zero(part("weight", torch.int8))
        zeros = None
        if not spec.symmetric and self._packed and not spec.by_tensor:
            zeros = unpacked(part("weight_zero_point", torch.int32), spec.bits, 0)[:rows]
        elif not spec.symmetric:
            zeros = _from_zero(part("weight_zero_point", torch.int8)).expand(rows, groups)
        return AffineGroups.from_zeros(codes, scale, zeros, spec.bits, group_of)


def _from_zero(signed: torch.Tensor) -> torch.Tensor:
    return (signed.to(torch.int16) + 128).to(torch.uint8)
