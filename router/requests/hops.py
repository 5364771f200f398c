"""The parts of a request's time to first token. They follow each other and add up to it. Pure.

    received ─intake→ submitted ─queue→ placed ─accept→ accepted ─┬ dispatch, prefill_queue, prefill_compute → prefilled
                                                                  └ (no prefill worker) load → started
    prefilled ─handoff→ started ─first_step→ first token

- `intake`: the request is read, validated and tokenized.
- `queue`: it waits in the router, attempts that failed included.
- `accept`: the order reaches the decode worker, which reserves device pages.
- `prefill_queue`, `prefill_compute`: at the prefill worker, as that tells. `dispatch` is the rest until the router has
  its answer: both ways, and writing pages to the store.
- `handoff`: pages that the decode worker still lacked once the prompt was computed.
- `load`: cached pages come to a decode worker that computes the rest of the prompt itself.
- `first_step`: the decode worker's batch queue and first step. The rest of the prompt is part of it.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping

from router.events import Summary

HOPS = (
    "intake", "queue", "accept", "dispatch", "prefill_queue", "prefill_compute", "handoff", "load", "first_step",
)  # fmt: skip


def ttft_hops(summary: Summary) -> Mapping[str, float] | None:
    """Return the seconds of each hop that the request passed. None: there was no first token, or a later attempt has
    overwritten the instants that led to it."""
    line = summary.timeline
    if line.first_token is None or line.placed is None or line.placed > line.first_token:
        return None
    # An instant may be missing, or be told late: no hop is negative, and their sum stays the time to first token.
    submitted = _within(line.received, summary.submitted, line.placed)
    started = _within(line.placed, line.started, line.first_token)
    accepted = _within(line.placed, line.accepted, started) if line.accepted is not None else line.placed
    hops = {
        "intake": submitted - line.received,
        "queue": line.placed - submitted,
        "accept": accepted - line.placed,
        "first_step": line.first_token - started,
    }
    if line.prefill_sent is None:
        return hops | {"load": started - accepted}
    prefilled = _within(accepted, line.prefilled, started)
    left = prefilled - accepted
    queue = min(left, (summary.served.prefill_queue_ms or 0) / 1_000)
    compute = min(left - queue, (summary.served.prefill_compute_ms or 0) / 1_000)
    return hops | {
        "prefill_queue": queue,
        "prefill_compute": compute,
        "dispatch": left - queue - compute,
        "handoff": started - prefilled,
    }


def _within(first: float, instant: float | None, last: float) -> float:
    """The instant, moved between two others where it lies outside; the last one where it is missing."""
    return last if instant is None else min(last, max(first, instant))
