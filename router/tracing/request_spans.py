"""One client's request on its way to a span: `llm_request`, with a child for each hop of the work behind it.

A request may need several requests to the workers: samples, or the steps of a beam search. The span is made when the
last of them has ended. Names are vLLM's, and where they differ also those of OpenTelemetry's GenAI conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import BatonError, InvalidRequest
from router.events import Cancelled, Failed, RequestEnded
from router.requests.explain import RequestRecord
from router.tracing.hop_spans import events, finish_reason, hops
from router.tracing.origin import Origin
from router.tracing.span import RequestSpan, Span, SpanEvent, Value

PROVIDER = "baton"
_MOST_EVENTS = 64  # of one request; a full cluster may refuse each of many samples many times


class SpanSink(Protocol):
    """Takes requests' spans."""

    @property
    def counts(self) -> dict[tuple[str, ...], float]:
        """Spans so far, by what became of them."""
        ...

    def emit(self, origin: Origin, start: float, build: Callable[[], RequestSpan]) -> None:
        """Export what `build` returns, unless the sampler is against it. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class _Ended:
    end: RequestEnded
    record: RequestRecord | None


@dataclass(slots=True)
class RequestSpans:
    """What is known of a request that is to be traced."""

    sink: SpanSink
    origin: Origin
    received: float  # by this router, seconds of its clock
    attributes: dict[str, Value]  # of its span
    shown: int = 1  # requests to the workers whose hops are shown, the first ones
    _open: int = 0
    _complete: bool = False
    _requests: int = 0
    _completion: int = 0  # tokens
    _last: float = 0.0  # when the last of them ended
    _failed: BatonError | None = None
    _cancelled: bool = False
    _ended: list[_Ended] = field(default_factory=list[_Ended])

    def add_attributes(self, attributes: Mapping[str, Value], shown: int) -> None:
        """The request has been checked: what it asks for, and how many requests to the workers are to be shown."""
        self.attributes |= attributes
        self.shown = shown

    def begun(self) -> None:
        """A request to the workers begins."""
        self._open += 1
        self._requests += 1

    def forgotten(self) -> None:
        """One that has begun is not needed, and no worker has seen it."""
        self._requests -= 1
        self._close_one()

    def request_ended(self, end: RequestEnded, record: RequestRecord | None) -> None:
        """A request to the workers has ended. `record`: what is remembered of it."""
        self._completion += end.summary.usage.completion
        self._last = max(self._last, end.summary.timeline.ended or self.received)
        if isinstance(end.outcome, Failed):
            self._failed = self._failed or end.outcome.error
        self._cancelled = self._cancelled or isinstance(end.outcome, Cancelled)
        if len(self._ended) < self.shown:
            self._ended.append(_Ended(end, record))
        self._close_one()

    def complete(self) -> None:
        """No more requests to the workers will begin."""
        if not self._complete:
            self._complete = True
            self._emit_if_over()

    def refused(self, error: BatonError, now: float) -> None:
        """The request ended in an error before any worker was asked."""
        if not self._complete:
            self._failed, self._last = error, now
            self.complete()

    def _close_one(self) -> None:
        self._open -= 1
        self._emit_if_over()

    def _emit_if_over(self) -> None:
        if self._complete and not self._open and (self._requests or self._failed):
            self.sink.emit(self.origin, self.received, self.span)

    def span(self) -> RequestSpan:
        end = max(self._last, self.received)
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": self.origin.operation,
            "gen_ai.provider.name": PROVIDER,
            **self.attributes,
            "gen_ai.latency.e2e": end - self.received,
        }
        children: list[Span] = []
        marks: list[SpanEvent] = []
        if self._ended:
            first = self._ended[0]
            attributes |= self._outcome(first)
            children.append(Span("intake", self.received, first.end.summary.submitted))
            for number, ended in enumerate(self._ended):
                attempts = hops(ended.end, ended.record)
                children += attempts if len(self._ended) == 1 else [_sample(number, ended, attempts)]
                marks += events(ended.end, ended.record)
        if self._failed is not None:
            attributes["error.type"] = self._failed.reason
        error = None if self._failed is None else _error_text(self._failed)
        return RequestSpan("llm_request", self.received, end, attributes, children, marks[:_MOST_EVENTS], error)

    def _outcome(self, first: _Ended) -> dict[str, Value]:
        """The attributes that tell what came of it."""
        summary, record = first.end.summary, first.record
        line, usage, served = summary.timeline, summary.usage, summary.served
        attributes: dict[str, Value] = {
            "gen_ai.usage.num_sequences": self._requests,
            "gen_ai.usage.prompt_tokens": usage.prompt,
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.completion_tokens": self._completion,
            "gen_ai.usage.output_tokens": self._completion,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
            "gen_ai.response.finish_reasons": [finish_reason(ended.end.outcome) for ended in self._ended],
            "baton.attempts": served.attempts,
        }
        if served.decode_workers:
            attributes["baton.decode.worker"] = served.decode_workers[-1]
        if served.prefill_worker:
            attributes["baton.prefill.worker"] = served.prefill_worker
        placed = line.placed
        if record is not None and record.attempts:
            account = record.attempts[0]
            placed = account.timeline.placed if account.number == 1 else placed
            if account.predicted_ttft is not None:
                attributes["baton.predicted.time_to_first_token"] = account.predicted_ttft
        seconds = {
            "time_to_first_token": _between(self.received, line.first_token),
            "time_in_queue": _between(line.received, placed),
            "time_in_model_prefill": _between(placed, line.first_token),
            "time_in_model_decode": _between(line.first_token, line.ended),
            "time_in_model_inference": _between(placed, line.ended),
        }
        return attributes | {f"gen_ai.latency.{name}": value for name, value in seconds.items() if value is not None}


def _sample(number: int, ended: _Ended, attempts: list[Span]) -> Span:
    """One of several outputs."""
    summary = ended.end.summary
    over = summary.timeline.ended or summary.submitted
    attributes: dict[str, Value] = {
        "baton.sample": number,
        "gen_ai.usage.completion_tokens": summary.usage.completion,
        "gen_ai.response.finish_reasons": [finish_reason(ended.end.outcome)],
    }
    return Span("sample", min(summary.submitted, over), over, attributes, attempts)


def _between(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else later - earlier


def _error_text(error: BatonError) -> str:
    """What a span's status says of an error. That of a request which can't be served quotes the request: its kind is
    told, and no word of it."""
    return error.reason if isinstance(error, InvalidRequest) else str(error)
