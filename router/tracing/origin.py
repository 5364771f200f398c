"""How a request came in: what its span continues, and what kind of call it was.

A door sets `origin` before any handler runs. It costs a door less than a microsecond, with tracing or without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

ORIGIN = "baton-origin"
"""Metadata of a call from a front process: the operation, and when the front received the request, as JSON."""

_CHATS = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})
_MAX_VALUE = 1_024  # characters of a header that a front passes on; W3C asks for 512 of `tracestate`


@dataclass(frozen=True, slots=True)
class Origin:
    """One call."""

    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # or gRPC metadata; names in lower case
    operation: str = "text_completion"  # as `gen_ai.operation.name` has it
    received: float | None = None  # when its front process received it, seconds of the machine's clock; none: no front


class _Told(msgspec.Struct, frozen=True):
    """What a front tells its router."""

    operation: str
    received: Annotated[float, msgspec.Meta(ge=0)]


origin: ContextVar[Origin] = ContextVar("origin", default=Origin())  # noqa: B039 - frozen
"""The call that this task serves."""


def http_origin(path: str, headers: Mapping[str, str]) -> Origin:
    """A call of an HTTP API."""
    return Origin(headers, "chat" if path in _CHATS else "text_completion")


def front_origin(metadata: Mapping[str, str]) -> Origin:
    """A call that a front process has passed on. Raises one of `UNREADABLE` if no front of ours has written it."""
    if (said := metadata.get(ORIGIN)) is None:
        return Origin(metadata)
    told = msgspec.json.decode(said, type=_Told)
    return Origin(metadata, told.operation, told.received)


def passed_on(call: Origin, received: float, names: Iterable[str]) -> list[tuple[str, str]]:
    """The metadata by which a front passes a call on. `names`: headers that name a trace. A value that gRPC's metadata
    can't hold is left out."""
    entries = [(ORIGIN, msgspec.json.encode(_Told(call.operation, received)).decode())]
    for name in names:
        value = call.headers.get(name, "")
        if value and len(value) <= _MAX_VALUE and value.isascii() and value.isprintable():
            entries.append((name, value))
    return entries
