"""The protocol of a weight format."""

# pyright: strict

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import torch

Shape: TypeAlias = tuple[int, ...]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of plain numbers that the engine loads."""

Take: TypeAlias = Callable[[str, Shape, tuple[torch.dtype, ...]], torch.Tensor]
"""Reads one tensor of the checkpoint, which must have the shape and one of the dtypes. Raises CorruptWeights."""


class WeightFormat(Protocol):
    """One way to store a matrix [out, in]."""

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        """Return names and shapes of the tensors that hold the matrix `name`."""
        ...

    def dense(self, name: str, shape: Shape, take: Take) -> torch.Tensor:
        """Return the matrix, [out, in], in a dtype of `FLOATS`, on the CPU."""
        ...
