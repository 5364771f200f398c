"""Matrix products with an optional bias, as the loader makes them and models use them.

How a weight lies in memory is a device's matter: a `LinearMaker` makes the products of one device. `PlainLinears` makes
those of any; on a CPU `engine.cpu.packed_linear` makes better ones.
"""

# pyright: strict

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch.nn import functional

from engine.checkpoint.formats import affine_groups
from engine.checkpoint.formats.affine_groups import AffineGroups


class Dense(NamedTuple):
    """A weight [out, in], and a bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def rows(self, which: slice | torch.Tensor) -> "Dense":
        """Return the product with some of the outputs."""
        return Dense(self.weight[which], None if self.bias is None else self.bias[which])


class Grouped(NamedTuple):
    """The same in 8 or 4 bits, for products in `dtype`."""

    weight: AffineGroups
    bias: torch.Tensor | None
    dtype: torch.dtype

    def dense(self) -> Dense:
        return Dense(self.weight.dense().to(self.dtype), self.bias)

    def rows(self, which: slice | torch.Tensor) -> "Grouped":
        """As `Dense.rows`."""
        return Grouped(self.weight[which], None if self.bias is None else self.bias[which], self.dtype)


Weight: TypeAlias = Dense | Grouped


class Linear(Protocol):
    """`x @ weight.T + bias`. Owns its weight, in whatever form."""

    out_size: int
    in_size: int
    dtype: torch.dtype
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out], in the weight's dtype."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that weight and bias take, as they are held."""
        ...


class LinearMaker(Protocol):
    """Makes the products of one kind of device."""

    @property
    def stacks_experts(self) -> bool:
        """Whether a layer's experts are held in one tensor, because the host is not to know which of them are used."""
        ...

    @property
    def bits(self) -> int:
        """What products are rounded to while they are loaded; 0: they stay as they are stored."""
        ...

    def copies(self, dtype: torch.dtype) -> bool:
        """Whether a product holds a copy of its weight. Else a head that is tied to the embedding shares its memory."""
        ...

    def keeps(self, groups: AffineGroups, dtype: torch.dtype) -> bool:
        """Whether it makes products of such groups. Else they are made dense when they are loaded."""
        ...

    def linear(self, weight: Weight) -> Linear: ...

    def mlp(self, gate: Weight, up: Weight, down: Weight) -> tuple[Linear, Linear]:
        """Return gate and up as one product, gate's outputs first, and down. The products may have more inner elements
        than were given, all of them zero."""
        ...


class PlainLinear:
    """A product by torch, for any device."""

    def __init__(self, dense: Dense) -> None:
        self._weight, self.bias = dense
        self.out_size, self.in_size = self._weight.shape
        self.dtype = self._weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self.bias)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class PlainLinears:
    """Makes products that torch computes with the weights as they are."""

    stacks_experts = True
    bits = 0

    def copies(self, dtype: torch.dtype) -> bool:
        return False

    def keeps(self, groups: AffineGroups, dtype: torch.dtype) -> bool:
        return False

    def linear(self, weight: Weight) -> Linear:
        return PlainLinear(densified(weight))

    def mlp(self, gate: Weight, up: Weight, down: Weight) -> tuple[Linear, Linear]:
        return self.linear(stacked([gate, up])), self.linear(down)


def densified(weight: Weight) -> Dense:
    return weight.dense() if isinstance(weight, Grouped) else weight


def stacked(parts: Sequence[Weight]) -> Weight:
    """Several products of one input as one: the outputs stand side by side in the order given. All or none of them have
    a bias. They stay in groups if all have the same."""
    if len(parts) == 1:
        return parts[0]
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    groups = [part.weight for part in parts if isinstance(part, Grouped)]
    if len(groups) == len(parts) and (one := affine_groups.stacked(groups)) is not None:
        assert isinstance(parts[0], Grouped)
        return Grouped(one, bias, parts[0].dtype)
    return Dense(torch.cat([densified(part).weight for part in parts]), bias)
