"""How a request came in: what its span continues, and what kind of call it was.

A door sets `origin` before any handler runs. It costs a door less than a microsecond, with tracing or without.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Origin:
    """One call."""

    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # or gRPC metadata; names in lower case
    operation: str = "text_completion"  # as `gen_ai.operation.name` has it


origin: ContextVar[Origin] = ContextVar("origin", default=Origin())  # noqa: B039 - frozen
"""The call that this task serves."""
