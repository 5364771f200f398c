"""Tensors of a GGUF file: blocks of 32 or 256 inputs, each with its scales. `quant_method` "gguf", which
`baton.checkpoints.from_gguf` writes.

A block of 256 has scales of groups of 32 (Q4_K) or 16 (Q6_K), which have a scale together. The product of both is exact
in float32.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from msgspec import Struct, convert

from engine.checkpoint.formats.affine_groups import AffineGroups, checked_scale
from engine.checkpoint.formats.format import Shape, Take
from engine.spec import WeightSpec

_Kind = Literal["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
_BLOCK: Mapping[str, tuple[int, int]] = {
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q6_K": (256, 210),
}  # fmt: skip
"""Inputs and bytes of a block."""
_HEAD = "lm_head"


class _Settings(Struct):
    types: dict[str, _Kind]


def describe(settings: Mapping[str, Any]) -> WeightSpec:
    """Read a `quantization_config`. Raises ValidationError for another form."""
    types: Mapping[str, str] = convert(settings, _Settings).types
    head = types.get(_HEAD)
    spec = WeightSpec("gguf", "/".join(sorted(set(types.values()))), 0, types=tuple(types.items()))
    return spec if head is None else WeightSpec(spec.method, spec.layout, 0, types=spec.types, head=spec)


class Gguf:
    """Matrices in the blocks of a GGUF file."""

    def __init__(self, spec: WeightSpec) -> None:
        self._types = dict(spec.types)

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        inputs, size = _BLOCK[self._types[name]]
        return {f"{name}.weight": (shape[0], shape[1] // inputs * size)}

    def read(self, name: str, shape: Shape, take: Take) -> AffineGroups:
        kind = self._types[name]
        place, stored = next(iter(self.stored(name, shape).items()))
        blocks = take(place, stored, (torch.uint8,)).unflatten(1, (-1, _BLOCK[kind][1]))  # [rows, blocks, bytes]
        codes, scale, minimum = _READERS[kind](blocks)
        rows = shape[0]
        return AffineGroups(
            codes.reshape(rows, -1),
            checked_scale(place, scale.reshape(rows, -1)),
            None if minimum is None else checked_scale(place, minimum.reshape(rows, -1)),
            8 if kind in ("Q8_0", "Q6_K") else 4,
        )


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """A float16 of every block, [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The lower halves of the bytes, then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[..., 2:].view(torch.int8), _half(blocks, 0), None


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return (_nibbles(blocks[..., 2:]).view(torch.int8) - 8), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> _Parts:
    low, middle, mixed = blocks[..., 4:16].split(4, -1)
    scales = torch.cat((low & 63, mixed & 15 | low >> 2 & 48), -1).float()
    minimums = torch.cat((middle & 63, mixed >> 4 | middle >> 2 & 48), -1).float()
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return codes, _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums)


def _q6_k(blocks: torch.Tensor) -> _Parts:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    upper = torch.stack([high >> 2 * place & 3 for place in range(4)], -2)
    codes = (low | upper << 4).view(torch.int8) - 32
    return codes, _half(blocks, 208) * blocks[..., 192:208].view(torch.int8).float(), None


_READERS: Mapping[str, Callable[[torch.Tensor], _Parts]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q6_K": _q6_k,
}  # fmt: skip
