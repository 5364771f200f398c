"""The normal form of weights in 8 and 4 bits: integers or FP8, a scale and perhaps a minimum for each group of inputs.

All such formats become this form when they are loaded, so there is one kernel and one oracle for them: `dense`.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.errors import CorruptWeights


@dataclass(frozen=True)
class AffineGroups:
    """A matrix [out, in] of the elements `code * scale + minimum`.

    Scale and minimum are those of the element's row and of its input's group. Groups are equally large and follow one
    another, or `group_of` says which group an input is of.
    """

    codes: torch.Tensor  # [out, in], int8, uint8 or float8_e4m3fn
    scale: torch.Tensor  # [out, groups], float32
    minimum: torch.Tensor | None  # likewise
    bits: int  # of a code: 4 or 8
    group_of: torch.Tensor | None = None  # [in]

    @classmethod
    def from_zeros(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zeros: torch.Tensor | None,
        bits: int,
        group_of: torch.Tensor | None = None,
    ) -> AffineGroups:
        """Return the matrix of `(code - zero) * scale`, of codes from 0 on. Without `zeros`, [out, groups], they are
        all in the middle."""
        scale = scale.float()
        if zeros is None:
            signed = (codes.to(torch.int16) - (1 << bits - 1)).to(torch.int8)
            return cls(signed, scale, None, bits, group_of)
        return cls(codes.to(torch.uint8), scale, -zeros.float() * scale, bits, group_of)

    @property
    def floats(self) -> bool:
        """Whether codes are numbers of E4M3."""
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def group(self) -> int:
        """The inputs of a group, where all have as many."""
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, rows: slice | torch.Tensor) -> AffineGroups:
        minimum = None if self.minimum is None else self.minimum[rows]
        return AffineGroups(self.codes[rows], self.scale[rows], minimum, self.bits, self.group_of)

    def in_turn(self) -> tuple[AffineGroups, torch.Tensor | None]:
        """Return the matrix with its inputs sorted by group, and which input each of these is; None: they were."""
        if self.group_of is None:
            return self, None
        order = self.group_of.argsort(stable=True)
        return AffineGroups(self.codes[:, order], self.scale, self.minimum, self.bits), order

    def dense(self) -> torch.Tensor:
        """Return the matrix in float32. It is exact if scales have no more than 16 bits."""
        weight = self.codes.float() * self._spread(self.scale)
        return weight if self.minimum is None else weight + self._spread(self.minimum)

    def _spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        if self.group_of is None:
            return of_groups.repeat_interleave(self.group, 1)
        return of_groups[:, self.group_of]


def stacked(parts: Sequence[AffineGroups]) -> AffineGroups | None:
    """Return matrices of the same inputs as one: their rows follow one another. None if their groups differ."""
    first, *others = parts
    for one in others:
        alike = (one.bits, one.codes.dtype, one.scale.shape[1], one.minimum is None)
        if alike != (first.bits, first.codes.dtype, first.scale.shape[1], first.minimum is None):
            return None
        if not _same(one.group_of, first.group_of):
            return None
    codes, scale = torch.cat([one.codes for one in parts]), torch.cat([one.scale for one in parts])
    minimums = [one.minimum for one in parts if one.minimum is not None]
    return AffineGroups(codes, scale, torch.cat(minimums) if minimums else None, first.bits, first.group_of)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def group_count(inputs: int, group: int) -> int:
    """Return how many groups there are. `group` 0 is one for all inputs."""
    return -(-inputs // group) if group else 1


def regular(inputs: int, group: int) -> torch.Tensor | None:
    """Return `group_of` for groups that follow one another; None if all are equally large."""
    return torch.arange(inputs) // group if group and inputs % group else None


def unpacked(packed: torch.Tensor, bits: int, dim: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Return the codes, uint8, that lie side by side along `dim` in int32, the lowest bits first. `order` says for each
    of them at which place it lies."""
    places = order or range(32 // bits)
    parts = [(packed >> (bits * place) & (1 << bits) - 1).to(torch.uint8) for place in places]
    return torch.stack(parts, dim % packed.dim() + 1).flatten(dim % packed.dim(), dim % packed.dim() + 1)


def checked_groups(name: str, group_of: torch.Tensor, groups: int, group: int) -> torch.Tensor | None:
    """Return which group each input is of; None if they follow one another. Raises CorruptWeights, naming the tensor,
    for a group that does not exist or that more inputs have than `group`."""
    if group_of.is_meta:
        return None
    group_of = group_of.long()
    if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        raise CorruptWeights(f"{name} names a group beyond the {groups} that there are; fetch the checkpoint again")
    most = group or len(group_of)
    if int(group_of.bincount().max()) > most:
        raise CorruptWeights(f"{name} puts more than {most} inputs into a group; fetch the checkpoint again")
    follow = torch.arange(len(group_of)) // most
    return regular(len(group_of), group) if torch.equal(group_of, follow) else group_of


def checked_floats(name: str, codes: torch.Tensor) -> torch.Tensor:
    """Return codes of E4M3. Raises CorruptWeights, naming the tensor, if one is no number."""
    if not codes.is_meta and bool((codes.view(torch.int8) & 127 == 127).any()):
        raise CorruptWeights(f"{name} has codes that are no numbers; fetch the checkpoint again")
    return codes


def checked_scale(name: str, scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32. Raises CorruptWeights, naming the tensor, if one is no finite number."""
    if not scale.is_meta and not bool(scale.isfinite().all()):
        raise CorruptWeights(f"{name} has scales that are no finite numbers; fetch the checkpoint again")
    return scale.float()
