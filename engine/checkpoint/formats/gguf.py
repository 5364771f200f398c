"""Tensors of a GGUF file: blocks of 32 or 256 inputs, each with its scales. `quant_method` "gguf", which
`baton.checkpoints.from_gguf` writes.

A block of 256 has scales of groups of 32 (Q4_K, Q5_K, IQ4_XS) or 16 (Q2_K, Q3_K, Q6_K), which have a scale together.
The product of both is exact in float32. Codes of 2 and 3 bits are held in 4, and those of 5 and 6 bits in 8.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from msgspec import Struct, convert

from engine.checkpoint.formats.affine_groups import AffineGroups, checked_scale
from engine.checkpoint.formats.format import Shape, Take
from engine.spec import WeightSpec

_Kind = Literal[
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
]  # fmt: skip
_BLOCK: Mapping[str, tuple[int, int]] = {
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}  # fmt: skip
"""Inputs and bytes of a block."""
IN_FOUR_BITS = ("Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K")
_HEAD = "lm_head"


class _Settings(Struct):
    types: dict[str, _Kind]


def describe(settings: Mapping[str, Any]) -> WeightSpec:
    """Read a `quantization_config`. Raises ValidationError for another form."""
    types: Mapping[str, str] = convert(settings, _Settings).types
    head = types.get(_HEAD)
    spec = WeightSpec("gguf", "/".join(sorted(set(types.values()))), 0, types=tuple(types.items()))
    return spec if head is None else WeightSpec(spec.method, spec.layout, 0, types=spec.types, head=spec)


def type_name(name: str) -> str:
    """Return the name under which a matrix has its type: all experts of a layer are of one."""
    return re.sub(r"\.experts\.\d+\.", ".experts.{}.", name)


class Gguf:
    """Matrices in the blocks of a GGUF file."""

    def __init__(self, spec: WeightSpec) -> None:
        self._types = dict(spec.types)

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        inputs, size = _BLOCK[self._types[type_name(name)]]
        return {f"{name}.weight": (shape[0], shape[1] // inputs * size)}

    def read_matrix(self, name: str, shape: Shape, take: Take) -> AffineGroups:
        kind = self._types[type_name(name)]
        place, stored = next(iter(self.stored(name, shape).items()))
        blocks = take(place, stored, (torch.uint8,)).unflatten(1, (-1, _BLOCK[kind][1]))  # [rows, blocks, bytes]
        codes, scale, minimum = _READERS[kind](blocks)
        rows = shape[0]
        return AffineGroups(
            codes.reshape(rows, -1),
            checked_scale(place, scale.reshape(rows, -1)),
            None if minimum is None else checked_scale(place, minimum.reshape(rows, -1)),
            4 if kind in IN_FOUR_BITS else 8,
        )


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """A float16 of every block, [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _parts(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The lowest bits of all bytes, then the next ones: [..., 8 / bits, bytes]."""
    return torch.stack([packed >> place & (1 << bits) - 1 for place in range(0, 8, bits)], -2)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The lower halves of the bytes, then the upper ones."""
    return _parts(packed, 4).flatten(-2)


def _in_turn(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """All that the first byte has, then that of the next one."""
    return _parts(packed, bits).mT.flatten(-2)


def _scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of a block of Q4_K or Q5_K."""
    low, middle, mixed = blocks[..., 4:16].split(4, -1)
    scales = torch.cat((low & 63, mixed & 15 | low >> 2 & 48), -1).float()
    minimums = torch.cat((middle & 63, mixed >> 4 | middle >> 2 & 48), -1).float()
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums)


def _levels(codes: torch.Tensor) -> torch.Tensor:
    """The numbers that the codes of IQ4_NL and IQ4_XS stand for."""
    from gguf.quants import IQ4_NL

    return torch.tensor(IQ4_NL.kvalues, dtype=torch.int8, device=codes.device)[codes.int()]


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[..., 2:].view(torch.int8), _half(blocks, 0), None


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return (_nibbles(blocks[..., 2:]).view(torch.int8) - 8), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 6:]) | _in_turn(blocks[..., 2:6], 1) << 4
    return codes.view(torch.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[..., 8:]) | _in_turn(blocks[..., 4:8], 1) << 4, _half(blocks, 0), _half(blocks, 2)


def _q2_k(blocks: torch.Tensor) -> _Parts:
    scales, minimums = (blocks[..., :16] & 15).float(), (blocks[..., :16] >> 4).float()
    codes = _parts(blocks[..., 16:80].unflatten(-1, (2, 32)), 2)
    return codes, _half(blocks, 80) * scales, -(_half(blocks, 82) * minimums)


def _q3_k(blocks: torch.Tensor) -> _Parts:
    low = _parts(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3, -2)
    scales = _nibbles(blocks[..., 96:104]) | _parts(blocks[..., 104:108], 2).flatten(-2) << 4
    codes = (low | _parts(blocks[..., :32], 1) << 2).view(torch.int8) - 4
    return codes, _half(blocks, 108) * (scales.float() - 32), None


def _q4_k(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))), *_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> _Parts:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return low | _parts(blocks[..., 16:48], 1) << 4, *_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> _Parts:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    upper = _parts(blocks[..., 128:192].unflatten(-1, (2, 32)), 2)
    codes = (low | upper << 4).view(torch.int8) - 32
    return codes, _half(blocks, 208) * blocks[..., 192:208].view(torch.int8).float(), None


def _iq4_nl(blocks: torch.Tensor) -> _Parts:
    return _levels(_nibbles(blocks[..., 2:])), _half(blocks, 0), None


def _iq4_xs(blocks: torch.Tensor) -> _Parts:
    scales = _in_turn(blocks[..., 4:8], 4) | _in_turn(blocks[..., 2:4], 2) << 4
    codes = _levels(_nibbles(blocks[..., 8:].unflatten(-1, (8, 16))))
    return codes, _half(blocks, 0) * (scales.float() - 32), None


_READERS: Mapping[str, Callable[[torch.Tensor], _Parts]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
