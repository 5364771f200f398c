"""The spans of one request to the workers: where its time went, hop by hop and attempt by attempt. Pure.

    queue → accept → prefill → handoff → first_step → decode      with a prefill worker
    queue → accept → load → first_step → decode                   without one

Every instant is one of the router's own clock, when it heard of it: clocks of other hosts have no part in it. Workers
tell durations, which are attributes. An attempt that no worker accepted has no spans, and is an event of the request.
"""

# pyright: strict

from __future__ import annotations

from baton.timeline import Timeline
from router.events import Cancelled, Failed, Finished, RequestEnded, RequestOutcome
from router.requests.explain import AttemptAccount, RequestRecord
from router.tracing.span import Span, SpanEvent, Value


def hops(end: RequestEnded, record: RequestRecord | None) -> list[Span]:
    """The hops of a request that has ended. `record`: what is remembered of its attempts; none: only the last is told
    of, as far as its summary goes."""
    summary = end.summary
    ended = summary.timeline.ended or summary.submitted
    if record is None or not record.attempts:
        served = summary.served
        decode = served.decode_workers[-1] if served.decode_workers else ""
        first = summary.timeline.first_token
        return _attempt(
            summary.timeline, served.attempts, decode, served.prefill_worker, summary.submitted, first, ended
        )
    spans: list[Span] = []
    since = summary.submitted
    for account in record.attempts:
        if account.timeline.accepted is None and account.first_token is None and account.end_reason:
            continue
        over = ended if account.ended is None else account.ended
        attempts = _attempt(
            account.timeline, account.number, account.decode, account.prefill, since, account.first_token, over
        )
        spans += [_explained(span, account, end) for span in attempts]
        since = over
    if since < ended and record.attempts[-1].end_reason:  # it waited for another attempt, which did not come
        spans.append(Span("queue", since, ended))
    return spans


def events(end: RequestEnded, record: RequestRecord | None) -> list[SpanEvent]:
    """What happened to the request as a whole: attempts that failed or were refused, and why it was cancelled."""
    marks: list[SpanEvent] = []
    for account in record.attempts if record else ():
        if not account.end_reason or account.ended is None:
            continue
        attributes: dict[str, Value] = {
            "baton.attempt": account.number,
            "baton.decode.worker": account.decode,
            "baton.reason": account.end_reason,
        }
        if account.prefill:
            attributes["baton.prefill.worker"] = account.prefill
        marks.append(SpanEvent("attempt ended", account.ended, attributes))
    if isinstance(end.outcome, Cancelled):
        at = end.summary.timeline.ended or end.summary.submitted
        marks.append(SpanEvent("cancelled", at, {"baton.reason": end.outcome.why}))
    return marks


def finish_reason(outcome: RequestOutcome) -> str:
    """The end in vLLM's words."""
    match outcome:
        case Finished(reason=reason):
            return reason
        case Failed():
            return "error"
        case Cancelled():
            return "abort"


def _attempt(
    line: Timeline, number: int, decode: str, prefill: str, since: float, first: float | None, ended: float
) -> list[Span]:
    """The hops of one attempt. `since`: when the request began to wait for it. `first`: when its first token came."""
    spans: list[Span] = []

    def hop(name: str, start: float | None, end: float | None, worker: str = "") -> None:
        """Add a hop that has begun. One without an end lasts as long as the attempt."""
        if start is None or start > ended:
            return
        attributes: dict[str, Value] = {"baton.attempt": number} if number else {}
        if worker:
            attributes["baton.worker"] = worker
        spans.append(Span(name, start, max(start, ended if end is None else min(end, ended)), attributes))

    hop("queue", since, line.placed)
    hop("accept", line.placed, line.accepted or line.started, decode)
    if line.prefill_sent is not None:
        hop("prefill", line.prefill_sent, line.prefilled, prefill)
        if line.prefilled is not None and (line.started is None or line.prefilled < line.started):
            hop("handoff", line.prefilled, line.started, decode)
    elif line.accepted is not None and line.accepted != line.started:
        hop("load", line.accepted, line.started, decode)
    hop("first_step", line.started, first, decode)
    hop("decode", first, None, decode)
    return spans


def _explained(span: Span, account: AttemptAccount, end: RequestEnded) -> Span:
    """A hop with what the workers told of it."""
    served, last = end.summary.served, account.ended is None or not account.end_reason
    attributes = dict(span.attributes)
    if span.name == "prefill":
        attributes["baton.tokens.computed"] = account.prefill_computed
        if last and served.prefill_compute_ms is not None:
            attributes["baton.prefill.queue_ms"] = served.prefill_queue_ms or 0
            attributes["baton.prefill.compute_ms"] = served.prefill_compute_ms
    elif span.name == "first_step" and account.decode_computed is not None:
        attributes["baton.tokens.computed"] = account.decode_computed
    elif span.name in ("handoff", "load") and last:
        attributes["baton.pages.fetched"] = served.pages_fetched
        attributes["baton.pages.on_device"] = served.pages_on_device
    elif span.name == "decode" and last:
        attributes["gen_ai.usage.completion_tokens"] = end.summary.usage.completion
    else:
        return span
    return Span(span.name, span.start, span.end, attributes)
