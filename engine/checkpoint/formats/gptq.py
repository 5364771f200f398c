"""GPTQ (Frantar et al., 2023), as AutoGPTQ, GPTQModel and transformers write it: `quant_method` "gptq".

Codes are packed along the inputs, and zeros along the outputs, one less than they are (`gptq_v2`: as they are). With
act-order, `g_idx` says which group an input is of.
"""

# pyright: strict

from collections.abc import Mapping
from typing import Any, Literal

import torch
from msgspec import Struct, convert

from baton.errors import UnsupportedModel
from engine.checkpoint.formats.affine_groups import AffineGroups, checked_groups, checked_scale, group_count, unpacked
from engine.checkpoint.formats.format import FLOATS, Shape, Take
from engine.spec import WeightSpec

_ZEROS_AS_THEY_ARE = "gptq_v2"


class _Settings(Struct):
    bits: Literal[4, 8]
    group_size: int
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    dynamic: dict[str, Any] | None = None
    modules_in_block_to_quantize: list[Any] | None = None


def describe(settings: Mapping[str, Any]) -> WeightSpec:
    """Read a `quantization_config`. Raises UnsupportedModel, and ValidationError for another form."""
    read = convert(settings, _Settings)
    if not (read.group_size == -1 or read.group_size >= 16):
        raise UnsupportedModel(f"gptq with group_size {read.group_size} is not supported; -1 and 16 or more are")
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if getattr(read, key):
            raise UnsupportedModel(f"gptq with {key} is not supported; all products must be of one form")
    layout = read.checkpoint_format if read.checkpoint_format == _ZEROS_AS_THEY_ARE else ""
    return WeightSpec("gptq", layout, read.bits, max(read.group_size, 0), read.sym, read.desc_act)


class Gptq:
    """Matrices as GPTQ writes them."""

    def __init__(self, spec: WeightSpec) -> None:
        self._spec = spec

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        rows, columns = shape
        bits, groups = self._spec.bits, group_count(columns, self._spec.group)
        return {
            f"{name}.qweight": (columns * bits // 32, rows),
            f"{name}.qzeros": (groups, rows * bits // 32),
            f"{name}.scales": (groups, rows),
            f"{name}.g_idx": (columns,),
        }

    def read_matrix(self, name: str, shape: Shape, take: Take) -> AffineGroups:
        weight, zeros, scale, of = self.stored(name, shape).items()
        bits, half = self._spec.bits, 1 << self._spec.bits - 1
        codes = unpacked(take(*weight, (torch.int32,)).T, bits, 1)
        zero = unpacked(take(*zeros, (torch.int32,)), bits, 1).T
        if self._spec.layout != _ZEROS_AS_THEY_ARE:
            zero = zero + 1 & 2 * half - 1
        groups = scale[1][0]
        group_of = checked_groups(of[0], take(*of, (torch.int32,)), groups, self._spec.group)
        scales = checked_scale(scale[0], take(*scale, FLOATS)).T
        central = self._spec.symmetric and (zero.is_meta or bool((zero == half).all()))
        return AffineGroups.from_zeros(codes, scales, None if central else zero, bits, group_of)
