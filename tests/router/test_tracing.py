"""Spans of requests: which there are, how they hang together, and that no request is hurt by them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from baton.config import TracingConfig
from baton.errors import InvalidRequest, StartupError
from baton.messages import Accepted, Refused, TokenLogprob
from baton.timeline import Timeline
from baton.v1 import generation_pb2 as pb
from router.events import Finished, RequestEnded, ServingAccount, Shutdown, Summary, Usage
from router.tracing import export
from router.tracing.export import SpanTracer
from router.tracing.hop_spans import hops
from router.tracing.origin import Origin, origin
from router.tracing.span import RequestSpan, Span
from tests.router.driven import Bench, driven, read_end
from tests.support.eventually import eventually, eventually_async
from tests.support.virtual_clock import VirtualClock

WALL = 1_700_000_000_000_000_000  # nanoseconds, when the clock of `Bench` says 100 s
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Traced:
    """A bench whose spans stay in memory."""

    def __init__(self, bench: Bench) -> None:
        self.memory = InMemorySpanExporter()
        self.bench = bench
        self.tracer = SpanTracer(self.memory, bench, {"service.name": "baton"}, wall=self._wall)
        bench.service.tracer = self.tracer

    def _wall(self) -> int:
        return WALL + round((self.bench.now() - 100.0) * 1e9)

    def spans(self) -> Sequence[ReadableSpan]:
        """All that has been exported, in order of time."""
        self.tracer.flush()
        return sorted(self.memory.get_finished_spans(), key=lambda span: (span.start_time, span.name != "llm_request"))

    def root(self) -> ReadableSpan:
        (root,) = [span for span in self.spans() if span.name == "llm_request"]
        return root

    def names(self) -> list[str]:
        return [span.name for span in self.spans()]


@asynccontextmanager
async def traced(workers: int = 2) -> AsyncIterator[tuple[Bench, Traced]]:
    async with driven(workers) as bench:
        spans = Traced(bench)
        try:
            yield bench, spans
        finally:
            await spans.tracer.close()


@contextmanager
def called(call: Origin) -> Iterator[None]:
    """What a door does before any handler runs."""
    token = origin.set(call)
    try:
        yield
    finally:
        origin.reset(token)


def milliseconds(span: ReadableSpan) -> tuple[float, float]:
    """Beginning and end, counted from the clock's 100 s."""
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.start_time - WALL) / 1e6, 3), round((span.end_time - WALL) / 1e6, 3)


async def test_a_request_continues_its_clients_trace_and_its_hops_tile_its_time() -> None:
    async with traced() as (bench, spans):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "shop=7", "x-other": "no"}
        with called(Origin(headers, "chat")):
            await bench.start(temperature=0.5, top_p=0.9, n=1)
        (order,) = bench.orders
        bench.now_ += 0.01
        bench.say(order[0], Accepted(order[1].request, 1))
        bench.now_ += 0.03
        bench.answer(order, 9)
        bench.now_ += 0.1
        bench.answer(order, 9, 10, 11, finish="length")
        root = spans.root()
        assert root.kind is SpanKind.SERVER
        assert (format_trace_id(root.parent.trace_id), format_span_id(root.parent.span_id)) == (TRACE, PARENT)
        assert root.context.trace_state.get("shop") == "7"
        children = [span for span in spans.spans() if span is not root]
        assert {format_trace_id(span.context.trace_id) for span in children} == {TRACE}
        assert {span.parent.span_id for span in children if span.parent} == {root.context.span_id}
        assert [(span.name, *milliseconds(span)) for span in children] == [
            ("intake", 0, 0), ("queue", 0, 0), ("accept", 0, 10), ("load", 10, 40), ("first_step", 40, 40),
            ("decode", 40, 140),
        ]  # fmt: skip
        assert milliseconds(root) == (0, 140)
        assert root.resource.attributes["service.name"] == "baton"
        tags = dict(root.attributes or {})
        latencies = {name.rpartition(".")[2]: round(tags.pop(name), 4) for name in list(tags) if "latency" in name}
        assert latencies == {
            "e2e": 0.14, "time_to_first_token": 0.04, "time_in_queue": 0.0, "time_in_model_prefill": 0.04,
            "time_in_model_decode": 0.1, "time_in_model_inference": 0.14,
        }  # fmt: skip
        assert tags.pop("baton.predicted.time_to_first_token") > 0
        assert tags.pop("baton.decode.worker") in ("decode-0", "decode-1")
        assert tags == {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "baton", "gen_ai.request.id": "r",
            "gen_ai.response.model": "m", "gen_ai.request.temperature": 0.5, "gen_ai.request.n": 1,
            "gen_ai.request.top_p": pytest.approx(0.9), "gen_ai.request.max_tokens": 4, "baton.priority": 0,
            "gen_ai.usage.num_sequences": 1, "gen_ai.usage.prompt_tokens": 40, "gen_ai.usage.input_tokens": 40,
            "gen_ai.usage.completion_tokens": 3, "gen_ai.usage.output_tokens": 3,
            "gen_ai.usage.cache_read.input_tokens": 40, "gen_ai.response.finish_reasons": ("length",),
            "baton.attempts": 1,
        }  # fmt: skip
        assert root.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("header", ["", "00-zz-1-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 60_000])
async def test_a_header_that_names_no_trace_begins_a_new_one(header: str) -> None:
    async with traced() as (bench, spans):
        with called(Origin({"traceparent": header, "tracestate": header})):
            await bench.start()
        bench.answer(bench.orders[0], 9, finish="stop")
        assert spans.root().parent is None


async def test_an_attempt_that_is_lost_is_an_event_and_both_attempts_have_their_hops() -> None:
    async with traced() as (bench, spans):
        await bench.start()
        bench.answer(bench.orders[0], 9)
        bench.now_ += 2.0
        lost = bench.orders[0][0]
        other = next(name for name in ("decode-0", "decode-1") if not lost.startswith(name))
        bench.beat(other)
        bench.tick()
        (_, second) = bench.orders
        assert second[0].startswith(other)
        bench.answer(second, 10, finish="stop", at=41)
        root = spans.root()
        (event,) = root.events
        assert event.name == "attempt ended"
        assert event.attributes["baton.attempt"] == 1
        assert event.attributes["baton.decode.worker"] == lost.partition(".")[0]
        assert "silent" in str(event.attributes["baton.reason"])
        attempts = [(span.name, (span.attributes or {}).get("baton.attempt")) for span in spans.spans()]
        assert [number for name, number in attempts if name == "decode"] == [1, 2]
        assert (root.attributes or {})["baton.attempts"] == 2


async def test_a_worker_without_room_costs_an_event_and_no_spans() -> None:
    async with traced() as (bench, spans):
        await bench.start()
        to, first = bench.orders[0]
        bench.now_ += 0.5
        bench.say(to, Refused(first.request, first.attempt, "busy"))
        bench.answer(bench.orders[1], 9, finish="stop")
        assert [event.name for event in spans.root().events] == ["attempt ended"]
        assert spans.names().count("queue") == 1
        (queue,) = [span for span in spans.spans() if span.name == "queue"]
        assert milliseconds(queue) == (0, 500)


async def test_an_abort_is_no_error() -> None:
    async with traced() as (bench, spans):
        (output,) = await bench.start()
        bench.answer(bench.orders[0], 9)
        output.close()
        root = spans.root()
        assert (root.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
        assert [event.name for event in root.events] == ["cancelled"]
        assert root.status.status_code is StatusCode.UNSET


async def test_a_failure_is_the_spans_status() -> None:
    async with traced() as (bench, spans):
        await bench.start()
        bench.driver.handle(Shutdown())
        root = spans.root()
        assert root.status.status_code is StatusCode.ERROR
        assert root.status.description == "this router is stopping"
        assert (root.attributes or {})["error.type"] == "unavailable"


async def test_a_request_that_is_refused_has_a_span_without_a_word_of_it() -> None:
    async with traced() as (bench, spans):
        with pytest.raises(InvalidRequest, match="a secret word"):
            await bench.start(cache_salt="a secret word/")
        (root,) = spans.spans()
        assert root.status.status_code is StatusCode.ERROR
        assert "secret" not in root.to_json()
        assert (root.attributes or {})["error.type"] == "invalid_request"


async def test_samples_hang_below_one_request_and_the_prompt_counts_once() -> None:
    async with traced() as (bench, spans):
        outputs = await bench.start(n=3)
        bench.answer(bench.orders[0], 9)
        await bench.settle()
        for order in bench.orders[1:]:
            bench.answer(order, 10, 3, finish="length")
        assert not spans.spans()
        bench.answer(bench.orders[0], 9, 12, finish="length")
        for output in outputs:
            await read_end(output)
        root = spans.root()
        samples = [span for span in spans.spans() if span.name == "sample"]
        assert len(samples) == 3
        assert all(span.parent and span.parent.span_id == root.context.span_id for span in samples)
        decodes = [span for span in spans.spans() if span.name == "decode"]
        assert {span.parent.span_id for span in decodes if span.parent} == {span.context.span_id for span in samples}
        attributes = root.attributes or {}
        assert (attributes["gen_ai.usage.prompt_tokens"], attributes["gen_ai.usage.completion_tokens"]) == (40, 6)
        assert attributes["gen_ai.usage.num_sequences"] == 3
        assert attributes["gen_ai.response.finish_reasons"] == ("length",) * 3


async def test_samples_that_never_began_are_not_told() -> None:
    async with traced() as (bench, spans):
        outputs = await bench.start(n=3)
        for output in reversed(outputs):
            output.close()
        assert (spans.root().attributes or {})["gen_ai.usage.num_sequences"] == 1
        await bench.start(n=3)
        bench.driver.handle(Shutdown())
        assert [span.name for span in spans.spans()].count("llm_request") == 2
        assert not bench.driver._spans


async def test_a_beam_search_is_one_span_with_the_hops_of_its_first_step() -> None:
    async with traced() as (bench, spans):
        (output,) = await bench.start(n=1, best_of=2, beam_search=pb.BeamSearch())
        await eventually_async(lambda: bench.orders)
        likeliest = tuple((token, -0.1 * token) for token in range(10, 18))
        bench.answer(bench.orders[0], 10, finish="length", logprobs=(TokenLogprob(10, -1.0, likeliest),))
        await eventually_async(lambda: len(bench.orders) == 3)  # two beams go on
        output.close()
        await eventually_async(lambda: "llm_request" in spans.names())
        assert spans.names().count("llm_request") == 1
        assert spans.names().count("decode") == 1
        assert (spans.root().attributes or {})["gen_ai.usage.num_sequences"] == 3


def ended(line: Timeline, prefill: str = "") -> RequestEnded:
    served = ServingAccount(attempts=1, decode_workers=("decode-0",), prefill_worker=prefill)
    return RequestEnded("r-1", Finished("stop"), Summary(line, 1.0, Usage(8, 0, 2), served))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            Timeline(0.5, 2, 3, 3, 7, 8, 9, 11),
            [
                ("queue", 1, 2), ("accept", 2, 3), ("prefill", 3, 7), ("handoff", 7, 8), ("first_step", 8, 9),
                ("decode", 9, 11),
            ],
        ),
        (  # the prefill worker's account came after the pages
            Timeline(0.5, 2, 3, 3, 8.5, 8, 9, 11),
            [("queue", 1, 2), ("accept", 2, 3), ("prefill", 3, 8.5), ("first_step", 8, 9), ("decode", 9, 11)],
        ),
        (Timeline(0.5, 2, 3, 3, ended=5), [("queue", 1, 2), ("accept", 2, 3), ("prefill", 3, 5)]),
        (Timeline(0.5, ended=5), [("queue", 1, 5)]),
        (Timeline(0.5, 2, ended=5), [("queue", 1, 2), ("accept", 2, 5)]),
    ],
)  # fmt: skip
def test_the_hops_of_a_summary(line: Timeline, expected: list[tuple[str, float, float]]) -> None:
    spans = hops(ended(line, "prefill-0"), None)
    assert [(span.name, span.start, span.end) for span in spans] == expected


class Collector(SpanExporter):
    """Answers when it is told to."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.exporting, self.answers = threading.Event(), threading.Event()
        self.result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.exporting.set()
        self.answers.wait(30)
        return self.result

    def shutdown(self) -> None:
        self.answers.set()


def tree(children: int) -> RequestSpan:
    return RequestSpan("llm_request", 0.0, 1.0, children=[Span("queue", 0.0, 1.0)] * children)


def test_a_collector_that_stands_still_costs_spans_that_are_counted_and_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector = Collector()
    tracer = SpanTracer(collector, VirtualClock(), {}, queue=12)
    tracer.emit(Origin(), 0.0, lambda: tree(3))
    assert collector.exporting.wait(30)  # the exporter's thread holds these four, and waits
    for _ in range(5):
        tracer.emit(Origin(), 0.0, lambda: tree(3))
    assert tracer.counts[("dropped",)] == 8  # three trees wait
    asyncio.run(tracer.close())  # answers at last
    eventually(lambda: tracer.counts[("exported",)] == 16, what="what waited is exported")


def test_what_a_collector_refuses_is_counted() -> None:
    collector = Collector(SpanExportResult.FAILURE)
    collector.answers.set()
    tracer = SpanTracer(collector, VirtualClock(), {})
    tracer.emit(Origin(), 0.0, lambda: tree(1))
    tracer.flush()
    assert tracer.counts == {("exported",): 0, ("failed",): 2, ("dropped",): 0}
    asyncio.run(tracer.close())


def test_a_mistake_in_spans_is_logged_and_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> RequestSpan:
        raise KeyError("no such hop")

    tracer = SpanTracer(InMemorySpanExporter(), VirtualClock(), {})
    tracer.emit(Origin(), 0.0, build)
    assert "could not be made" in caplog.text
    asyncio.run(tracer.close())


def test_a_request_that_is_not_sampled_costs_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> RequestSpan:
        raise AssertionError

    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    memory = InMemorySpanExporter()
    tracer = SpanTracer(memory, VirtualClock(), {})
    tracer.emit(Origin(), 0.0, build)
    tracer.flush()
    assert not memory.get_finished_spans()
    asyncio.run(tracer.close())


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier pigeon"}, "carrier pigeon"),
        ({"OTEL_TRACES_EXPORTER": "stone"}, "pip install"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "many"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "-3"}, "max_queue_size"),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4096"}, "max_export_batch_size"),
    ],
)
def test_settings_that_can_not_be_used_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], match: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=match):
        export.start(TracingConfig(enabled=True), VirtualClock(), {})
