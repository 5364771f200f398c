"""FP8 with one scale for each block of 128 x 128, as DeepSeek and Qwen publish it.

A matrix is `name.weight` in float8_e4m3fn and `name.weight_scale_inv`, what each block is multiplied with. It is made
dense when it is loaded: that saves the disk and the network, and no memory.
"""

# pyright: strict

from collections.abc import Mapping

import torch

from engine.checkpoint.formats.format import FLOATS, Shape, Take

BLOCK = 128


class Fp8Block:
    """Matrices in FP8 blocks."""

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        return {f"{name}.weight": shape, f"{name}.weight_scale_inv": _blocks(shape)}

    def dense(self, name: str, shape: Shape, take: Take) -> torch.Tensor:
        rows, columns = shape
        weight = take(f"{name}.weight", shape, (torch.float8_e4m3fn,)).float()
        scales = take(f"{name}.weight_scale_inv", _blocks(shape), FLOATS).float()
        scales = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return weight * scales


def _blocks(shape: Shape) -> Shape:
    return tuple(-(-size // BLOCK) for size in shape)
