"""The protocol of a weight format."""

# pyright: strict

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import torch

from engine.checkpoint.formats.affine_groups import AffineGroups

Shape: TypeAlias = tuple[int, ...]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of plain numbers that the engine loads."""

Take: TypeAlias = Callable[[str, Shape, tuple[torch.dtype, ...]], torch.Tensor]
"""Reads one tensor of the checkpoint, which must have the shape and one of the dtypes. Raises CorruptWeights."""

Matrix: TypeAlias = torch.Tensor | AffineGroups
"""[out, in] on the CPU: in a dtype of `FLOATS`, or in groups."""


class WeightFormat(Protocol):
    """One way to store a matrix [out, in]."""

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        """Return names and shapes of the tensors that hold the matrix `name`."""
        ...

    def read_matrix(self, name: str, shape: Shape, take: Take) -> Matrix:
        """Return the matrix. Raises CorruptWeights, naming a tensor, if its tensors contradict each other."""
        ...
