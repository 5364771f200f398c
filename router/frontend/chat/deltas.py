"""What a chat's output consists of, piece by piece: content, reasoning, and tool calls with their arguments."""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Content:
    """More of the visible answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins. Calls are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, which are JSON when they are complete."""

    index: int
    text: str


ChatDelta: TypeAlias = Content | Reasoning | CallBegin | CallArguments
MakeId: TypeAlias = Callable[[], str]


@dataclass
class ToolCall:
    """One call, as far as it has come."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list[str])

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


@dataclass
class Text:
    """A run of content, or of reasoning, as far as it has come."""

    kind: type[Content] | type[Reasoning]
    parts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self.parts)


Item: TypeAlias = Text | ToolCall


@dataclass
class ChatOutput:
    """All deltas added up, in their order."""

    items: list[Item] = field(default_factory=list[Item])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def take(self, delta: ChatDelta) -> Item:
        """Add a delta. Returns the item that it belongs to: the last one."""
        match delta:
            case Content(text) | Reasoning(text):
                last = self.items[-1] if self.items else None
                if not isinstance(last, Text) or last.kind is not type(delta):
                    last = Text(type(delta))
                    self.items.append(last)
                last.parts.append(text)
                return last
            case CallBegin(_, id_, name):
                self.calls.append(ToolCall(id_, name))
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
