"""A span as the router means it, before OpenTelemetry has it. Times are seconds of the router's clock."""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at one moment."""

    name: str
    at: float
    attributes: Attributes = field(default_factory=dict[str, Value])


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time, and the shorter ones within it."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict[str, Value])
    children: Sequence[Span] = ()

    @property
    def size(self) -> int:
        """Spans in the tree."""
        return 1 + sum(child.size for child in self.children)


@dataclass(frozen=True, slots=True)
class RequestSpan(Span):
    """The root of a tree: a client's request."""

    events: Sequence[SpanEvent] = ()
    error: str | None = None  # what the status says; none: it has not failed
