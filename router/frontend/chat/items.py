"""When the items of a chat's output begin and end, for APIs whose streams say so: texts, reasoning, calls."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from router.frontend.chat.deltas import CallBegin, ChatDelta, ChatOutput, Item


@dataclass(frozen=True)
class ItemBegins:
    """A new item, which is empty."""

    number: int
    item: Item


@dataclass(frozen=True)
class ItemGrows:
    """More text of the item that began last."""

    number: int
    item: Item
    text: str


@dataclass(frozen=True)
class ItemEnds:
    """The item that began last has all its text."""

    number: int
    item: Item


ItemStep: TypeAlias = ItemBegins | ItemGrows | ItemEnds


class ItemStream:
    """Tells of items as deltas come."""

    def __init__(self) -> None:
        self._output = ChatOutput()
        self._open: Item | None = None
        self._number = -1  # of the open item

    def steps(self, deltas: Iterable[ChatDelta]) -> Iterator[ItemStep]:
        """Yield what more deltas do."""
        for delta in deltas:
            item = self._output.take(delta)
            if item is not self._open:
                yield from self.end()
                self._open, self._number = item, len(self._output.items) - 1
                yield ItemBegins(self._number, item)
            if not isinstance(delta, CallBegin):
                yield ItemGrows(self._number, item, delta.text)

    def end(self) -> Iterator[ItemStep]:
        """Yield the end of the item that is open, if any is."""
        if self._open is not None:
            yield ItemEnds(self._number, self._open)
            self._open = None
