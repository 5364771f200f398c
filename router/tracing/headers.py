"""Which headers name a trace: W3C's, or those of the propagators that `OTEL_PROPAGATORS` names."""

from __future__ import annotations

from opentelemetry import propagate


def trace_headers() -> list[str]:
    """Names in lower case. Baggage is none of them: it holds what applications say to one another."""
    return sorted({name.lower() for name in propagate.get_global_textmap().fields} - {"baggage"})
