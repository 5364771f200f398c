"""Plain numbers: one tensor, `name.weight`."""

# pyright: strict

from collections.abc import Mapping

import torch

from engine.checkpoint.formats.format import FLOATS, Shape, Take
from engine.spec import WeightSpec


class Plain:
    """Matrices as they are."""

    def __init__(self, spec: WeightSpec) -> None:
        pass

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        return {f"{name}.weight": shape}

    def read_matrix(self, name: str, shape: Shape, take: Take) -> torch.Tensor:
        return take(f"{name}.weight", shape, FLOATS)
