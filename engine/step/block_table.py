"""The device pages of one sequence, kept from step to step where kernels read them. No torch here."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

_FEWEST = 8  # entries for which there is room at first


class BlockTable(Sequence[int]):
    """Pages in the order of a sequence's positions, in one array of int64.

    Pages are appended, and an entry may be exchanged for a page of the same contents. So an array that follows this one
    on a device need only be sent the entries from the lowest changed one on. The array grows by moving. A step that has
    been given the old array may go on with it, since nothing is taken out of it.

    Where all layers of a model attend to a window, pages before it are given back. Where one sequence has a window,
    some of them stay, the anchors (`kvstore.kv_window`). The entries stay in any case, so that an index is always a
    position divided by the size of a page, and no step reads them.
    """

    __slots__ = ("__weakref__", "_checked", "_count", "_limit", "address", "anchors", "array", "exchanges", "first")

    array: Ints
    """Its first `len(self)` entries are the pages. Never changed from outside, and replaced when the table grows."""
    address: int
    """Where the array begins in this process's memory, which lasts as long as the array."""
    first: int
    """The entries before this one were given back, but for the anchors."""
    anchors: tuple[int, ...]
    """Their indices, in order."""
    exchanges: int
    """How many entries were exchanged so far: as long as it stays, the first n entries are what they were."""

    def __init__(self, pages: Iterable[int] = (), first: int = 0) -> None:
        """`first` entries before `pages` were never held."""
        self._count = self._checked = self._limit = self.exchanges = 0
        self._move(np.empty(_FEWEST, np.int64))
        self.extend([0] * first)
        self.extend(pages)
        self.first, self.anchors = first, ()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self.array[: self._count].tolist())

    def __reversed__(self) -> Iterator[int]:
        return reversed(self.array[: self._count].tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.array[: self._count][index].tolist()

    @property
    def held(self) -> list[int]:
        """The pages that were not given back."""
        return [self[index] for index in self.anchors] + self[self.first :]

    @property
    def num_held(self) -> int:
        return self._count - self.first + len(self.anchors)

    def give_back(self, first: int, anchors: tuple[int, ...] = ()) -> list[int]:
        """No step reads the entries before `first` any more, but for the anchors. Return those that were
        held until now."""
        if first <= self.first:
            return []
        first = min(first, self._count)
        pages = [self[index] for index in (*self.anchors, *range(self.first, first)) if index not in anchors]
        self.first = first
        self.anchors = tuple(index for index in anchors if index < self.first)
        return pages

    def extend(self, pages: Iterable[int]) -> None:
        """Append pages. O(pages) amortized."""
        new = pages if isinstance(pages, Sequence) else list(pages)
        end = self._count + len(new)
        if end > len(self.array):
            self._move(np.concatenate((self.array[: self._count], np.empty(end, np.int64))))
        self.array[self._count : end] = new
        self._count = end

    def exchange(self, index: int, page: int) -> None:
        """Put a page of the same contents in the place of another."""
        assert 0 <= index < self._count
        self.array[index] = page
        self._checked = min(self._checked, index)
        self.exchanges += 1

    def check(self, num_pages: int) -> None:
        """Raise ValueError if a page is not in a pool of that size. O(entries that are new since the last call)."""
        first = self._checked if self._limit == num_pages else 0
        if first == self._count:
            return
        new = self.array[first : self._count]
        low, high = int(new.min()), int(new.max())
        if low < 0 or high >= num_pages:
            raise ValueError(f"page {low if low < 0 else high} is not in 0 to {num_pages - 1}")
        self._checked, self._limit = self._count, num_pages

    def _move(self, array: Ints) -> None:
        self.array = array
        self.address = array.__array_interface__["data"][0]
