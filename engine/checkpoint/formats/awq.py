"""AWQ (Lin et al., 2023) in the form "gemm", as AutoAWQ and transformers write it: `quant_method` "awq".

Codes and zeros are packed along the outputs. Eight of them lie in an int32 in the order in which a kernel for GPUs
unpacks them two at a time.
"""

# pyright: strict

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from msgspec import Struct, convert

from baton.errors import UnsupportedModel
from engine.checkpoint.formats.affine_groups import AffineGroups, checked_scale, unpacked
from engine.checkpoint.formats.format import FLOATS, Shape, Take
from engine.spec import WeightSpec

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_BITS = 4


class _Settings(Struct):
    bits: Literal[4]
    group_size: int
    version: Literal["gemm", "GEMM"]
    modules_to_not_convert: list[str] | None = None


def describe(settings: Mapping[str, Any]) -> WeightSpec:
    """Read a `quantization_config`. Raises UnsupportedModel, and ValidationError for another form."""
    read = convert(settings, _Settings)
    if read.group_size < 16:
        raise UnsupportedModel(f"awq with group_size {read.group_size} is not supported; 16 or more are")
    plain = tuple(f"re:.*{re.escape(name)}" for name in read.modules_to_not_convert or ())
    return WeightSpec("awq", bits=_BITS, group=read.group_size, symmetric=False, plain=plain)


class Awq:
    """Matrices as AWQ writes them."""

    def __init__(self, spec: WeightSpec) -> None:
        self._spec = spec

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        rows, columns = shape
        groups = columns // self._spec.group
        return {
            f"{name}.qweight": (columns, rows // 8),
            f"{name}.qzeros": (groups, rows // 8),
            f"{name}.scales": (groups, rows),
        }

    def read_matrix(self, name: str, shape: Shape, take: Take) -> AffineGroups:
        weight, zeros, scale = self.stored(name, shape).items()
        codes, zero = (unpacked(take(*one, (torch.int32,)), _BITS, 1, _PLACES).T for one in (weight, zeros))
        return AffineGroups.from_zeros(codes, checked_scale(scale[0], take(*scale, FLOATS)).T, zero, _BITS)
