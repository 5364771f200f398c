"""What a chat's output consists of, piece by piece: content, reasoning, and tool calls with their arguments."""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Iterable
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
class ChatOutput:
    """All deltas added up."""

    _content: list[str] = field(default_factory=list[str])
    _reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def take(self, deltas: Iterable[ChatDelta]) -> None:
        for delta in deltas:
            match delta:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegin(_, id_, name):
                    self.calls.append(ToolCall(id_, name))
                case CallArguments(index, text):
                    self.calls[index].parts.append(text)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)
