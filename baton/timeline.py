"""The named instants of a request. Every latency we report is the difference of two of them.

    received → queued → placed → accepted ─┬→ prefill_sent → prefilled ─┬→ started → first_token → ended
                                           └────── (no prefill) ────────┘

TTFT = first_token − received; TPOT = (ended − first_token) / (n − 1). A later attempt overwrites the instants between
`placed` and `started`; the outer ones belong to the request.
"""

from dataclasses import dataclass

_HOPS = ("placed", "accepted", "prefill_sent", "prefilled", "started", "first_token", "ended")


@dataclass
class Timeline:
    """Seconds on the router's clock; none until it happened."""

    received: float
    placed: float | None = None
    accepted: float | None = None
    prefill_sent: float | None = None
    prefilled: float | None = None
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None

    def between(self, earlier: str, later: str) -> float | None:
        """Seconds from one instant to another, or none while either is missing."""
        start: float | None = getattr(self, earlier)
        end: float | None = getattr(self, later)
        return None if start is None or end is None else end - start

    def hops(self) -> dict[str, float]:
        """Seconds from receipt to each later instant that was reached."""
        spans = {hop: self.between("received", hop) for hop in _HOPS}
        return {hop: seconds for hop, seconds in spans.items() if seconds is not None}

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds."""
        return self.between("received", "first_token")

    def tpot(self, tokens: int) -> float | None:
        """Time per output token after the first, seconds; none for fewer than two tokens."""
        span = self.between("first_token", "ended")
        return None if span is None or tokens < 2 else span / (tokens - 1)
