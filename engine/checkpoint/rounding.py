"""Round a matrix to integers of few bits: each number to the nearest, with the scale that loses least.

A group's scale is not simply that of its largest number: a smaller one clips that, and is finer for the others. So some
are tried, and the one of the least squared error is taken.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from baton.errors import CorruptWeights
from engine.checkpoint.formats.affine_groups import AffineGroups

_TRIED = {4: [1.06 - 0.04 * step for step in range(13)], 8: [1.0, 0.98, 0.95]}
"""Parts of the largest number that a scale may just reach, by bits."""
_ELEMENTS = 2**18  # that are rounded together; with 2**22, 4 bits take twice as long: they leave the cache
GROUP = 128  # inputs that share a scale, where nothing else is asked for


class Rounded(NamedTuple):
    """A matrix in groups, and its error: the root of the mean square, over that of the matrix."""

    groups: AffineGroups
    error: float


def rounded(weight: torch.Tensor, bits: int, group: int, name: str = "a matrix") -> Rounded:
    """Round a matrix as `grouped` does, and say what was lost."""
    rows = max(1, _ELEMENTS // weight.shape[1])
    groups = grouped(weight, bits, group, name)
    lost = sum(
        float((groups[i : i + rows].dense() - weight[i : i + rows].float()).square().sum())
        for i in range(0, len(weight), rows)
    )
    whole = sum(float(part.float().square().sum()) for part in weight.split(rows))
    return Rounded(groups, (lost / whole) ** 0.5 if whole else 0.0)


def grouped(weight: torch.Tensor, bits: int, group: int, name: str = "a matrix") -> AffineGroups:
    """Round a matrix [out, in]. Scales are of its dtype; `in` is a multiple of `group`. Of one on the device "meta"
    return the shape. Raises CorruptWeights, with the matrix's name."""
    if weight.is_meta:
        scale = torch.empty((len(weight), weight.shape[1] // group), device="meta")
        return AffineGroups(torch.empty_like(weight, dtype=torch.int8), scale, None, bits)
    if not bool(weight.isfinite().all()):
        raise CorruptWeights(f"{name} has numbers that are not finite; fetch the checkpoint again")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two share an operation in 0.6 of its time, and beside other work in 10 to 25 times
    try:
        rows = max(1, _ELEMENTS // weight.shape[1])
        parts = [_rounded(part, bits, group) for part in weight.split(rows)]
    finally:
        torch.set_num_threads(threads)
    codes, scale = (torch.cat([part[place] for part in parts]) for place in (0, 1))
    return AffineGroups(codes, scale, None, bits)


def stored(name: str, matrix: AffineGroups, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of compressed-tensors ("pack-quantized"), with scales in `dtype`."""
    per_word = 32 // matrix.bits
    unsigned = (matrix.codes.to(torch.int32) + (1 << matrix.bits - 1)).unflatten(1, (-1, per_word))
    packed = torch.zeros(unsigned.shape[:2], dtype=torch.int32)
    for place in range(per_word):
        packed |= unsigned[..., place] << matrix.bits * place
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": matrix.scale.to(dtype),
        f"{name}.weight_shape": torch.tensor(matrix.shape),
    }


def settings(bits: int, group: int, head_bits: int | None, plain: list[str]) -> Mapping[str, Any]:
    """Return the `quantization_config` of such a checkpoint. `plain` are the products that it does not round."""

    def described(number: int, target: str) -> Mapping[str, Any]:
        numbers = {"num_bits": number, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
        return {"targets": [target], "weights": numbers | {"dynamic": False}, "input_activations": None}

    groups = {"group_0": described(bits, "Linear")}
    if head_bits is not None:
        groups["group_1"] = described(head_bits, "re:.*lm_head$")
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*(["lm_head"] if head_bits is None else []), *plain],
    }


def _rounded(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1
    numbers = weight.float().unflatten(1, (-1, group))
    largest = numbers.abs().amax(2, keepdim=True)
    best_scale = torch.zeros_like(largest)
    best_lost = torch.full_like(largest, torch.inf)
    codes = torch.empty_like(numbers)

    def round_to(scale: torch.Tensor) -> torch.Tensor:
        # in place, since fresh memory for each operation takes longer than the operation
        return torch.div(numbers, torch.where(scale == 0, 1, scale), out=codes).round_().clamp_(least, most)

    for part in _TRIED[bits]:
        scale = (largest * (part / most)).to(weight.dtype).float()
        lost = round_to(scale).mul_(scale).sub_(numbers).square_().sum(2, keepdim=True)
        better = lost < best_lost
        best_lost = torch.where(better, lost, best_lost)
        best_scale = torch.where(better, scale, best_scale)
    return round_to(best_scale).flatten(1).to(torch.int8), best_scale.squeeze(2)
