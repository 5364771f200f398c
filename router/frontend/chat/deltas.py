"""What a chat's output consists of, piece by piece: content, reasoning, and tool calls with their arguments."""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct


class Content(Struct, frozen=True):
    """More of the visible answer."""

    text: str


class Reasoning(Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class CallBegin(Struct, frozen=True):
    """A tool call begins. Calls are numbered from 0."""

    index: int
    id: str
    name: str
    takes_text: bool = False  # its arguments are a text


class CallArguments(Struct, frozen=True):
    """More of a call's arguments, which are JSON when they are complete, or a text."""

    index: int
    text: str


ChatDelta: TypeAlias = Content | Reasoning | CallBegin | CallArguments
MakeId: TypeAlias = Callable[[], str]


class ToolCall(Struct):
    """One call, as far as it has come."""

    id: str
    name: str
    takes_text: bool = False
    parts: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class Text(Struct):
    """A run of content, or of reasoning, as far as it has come."""

    kind: type[Content] | type[Reasoning]
    parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.parts)


Item: TypeAlias = Text | ToolCall


class ChatOutput(Struct):
    """All deltas added up, in their order."""

    items: list[Item] = []
    calls: list[ToolCall] = []

    def add_delta(self, delta: ChatDelta) -> Item:
        """Add a delta. Returns the item that it belongs to: the last one."""
        match delta:
            case Content() | Reasoning():
                last = self.items[-1] if self.items else None
                if not isinstance(last, Text) or last.kind is not type(delta):
                    last = Text(type(delta))
                    self.items.append(last)
                last.parts.append(delta.text)
                return last
            case CallBegin(_, id_, name, takes_text):
                self.calls.append(ToolCall(id_, name, takes_text))
                self.items.append(self.calls[-1])
            case CallArguments(index, text):
                self.calls[index].parts.append(text)
        return self.calls[-1]

    @property
    def content(self) -> str:
        return self._of(Content)

    @property
    def reasoning(self) -> str:
        return self._of(Reasoning)

    def _of(self, kind: type[Content] | type[Reasoning]) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Text) and item.kind is kind)


class ItemBegins(Struct, frozen=True):
    """A new item, which is empty."""

    number: int
    item: Item


class ItemGrows(Struct, frozen=True):
    """More text of the item that began last."""

    number: int
    item: Item
    text: str


class ItemEnds(Struct, frozen=True):
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
        for delta in deltas:
            item = self._output.add_delta(delta)
            if item is not self._open:
                yield from self.end()
                self._open, self._number = item, len(self._output.items) - 1
                yield ItemBegins(self._number, item)
            if not isinstance(delta, CallBegin):
                yield ItemGrows(self._number, item, delta.text)

    def end(self) -> Iterator[ItemStep]:
        if self._open is not None:
            yield ItemEnds(self._number, self._open)
            self._open = None
