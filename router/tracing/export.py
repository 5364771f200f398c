"""OpenTelemetry's side: spans become those of its SDK, and leave in batches from the SDK's own thread.

The SDK reads its `OTEL_*` variables itself: exporter, sampler, batches, resource, propagators, limits. A collector that
is dead or slow costs spans, which are counted, and nothing else: a whole tree is dropped when the queue has no room.
Imported only where tracing is on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from urllib.parse import urlsplit

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.environment_variables import OTEL_TRACES_EXPORTER
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import baton
from baton.clock import Clock
from baton.config import TracingConfig
from baton.errors import StartupError
from router.tracing.origin import Origin
from router.tracing.span import RequestSpan, Span

log = logging.getLogger(__name__)

_QUEUE = 2_048  # spans, OpenTelemetry's own default
_BATCH = 64  # spans: encoding them delays the event loop by 0.8 ms; 128 do by 2.4 ms, and the SDK's own 512 by 30 ms
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_SWITCH = 0.0005  # seconds that the exporting thread may keep the event loop waiting for Python's lock; 5 ms otherwise
_CLOSE = 1.0  # seconds that the last spans get when the router ends


class SpanTracer:
    """Exports the spans of one process. `emit` belongs to the event loop; `counts` may be read by any thread."""

    def __init__(
        self,
        exporter: SpanExporter,
        clock: Clock,
        resource: Mapping[str, str],
        *,
        queue: int = _QUEUE,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        """`queue`: spans that may wait for the collector. `wall` tells nanoseconds since 1970. Raises ValueError for
        `OTEL_*` values that the SDK can't use."""
        self._clock, self._wall, self._room = clock, wall, queue
        self._emitted = 0
        self._dropped = 0
        self._exporter = _CountingExporter(exporter)
        batch = None if OTEL_BSP_MAX_EXPORT_BATCH_SIZE in os.environ else min(_BATCH, queue)
        self._processor = BatchSpanProcessor(self._exporter, queue, max_export_batch_size=batch)
        merged = Resource.create().merge(Resource(dict(resource))).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=merged, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._ids = provider.id_generator
        self._tracer = provider.get_tracer("baton.router", baton.__version__)

    @property
    def counts(self) -> dict[tuple[str, ...], float]:
        """Spans so far, by what became of them."""
        exporter = self._exporter
        return {("exported",): exporter.exported, ("failed",): exporter.failed, ("dropped",): self._dropped}

    def emit(self, origin: Origin, start: float, build: Callable[[], RequestSpan]) -> None:
        """Export a tree, unless the sampler is against it or too many spans wait. Never raises."""
        try:
            self._emit(origin, start, build)
        except Exception:
            log.exception("the spans of a request could not be made")

    def flush(self) -> None:
        """Export what waits, and return once that has come to an end."""
        self._processor.force_flush()

    async def close(self) -> None:
        """Export what waits, as far as that takes a second."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        ending = threading.Thread(target=self._processor.shutdown, name="spans-end", daemon=True)
        ending.start()
        ending.join(_CLOSE)
        if ending.is_alive():
            self._exporter.shutdown()  # ends its waits between two tries
            log.warning("some spans have not been exported: the collector does not answer in time")

    def _emit(self, origin: Origin, start: float, build: Callable[[], RequestSpan]) -> None:
        offset = self._wall() - _nanoseconds(self._clock.now())  # of the clocks to each other; one for the whole tree
        parent = propagate.extract(origin.headers, context=Context())
        began = offset + _nanoseconds(start)
        root = self._tracer.start_span("llm_request", parent, trace.SpanKind.SERVER, start_time=began)
        if not isinstance(root, SdkSpan) or not root.is_recording():
            return
        tree = build()
        size = tree.size
        if self._emitted - self._exporter.handled + size > self._room:
            self._dropped += size
            return
        self._emitted += size
        self._export_children(tree, root, root.get_span_context(), offset)
        root.set_attributes(tree.attributes)
        for event in tree.events:
            root.add_event(event.name, event.attributes, offset + _nanoseconds(event.at))
        if tree.error is not None:
            root.set_status(trace.Status(trace.StatusCode.ERROR, tree.error))
        root.end(offset + _nanoseconds(tree.end))

    def _export_children(self, span: Span, root: SdkSpan, context: trace.SpanContext, offset: int) -> None:
        """Export what is below a span. Such spans begin and end at once and are sampled as the root is, so they need
        none of the SDK's locks and checks, which take 15 µs a span."""
        for child in span.children:
            own = trace.SpanContext(
                context.trace_id, self._ids.generate_span_id(), False, context.trace_flags, context.trace_state
            )
            self._export_children(child, root, own, offset)
            readable = ReadableSpan(
                child.name,
                own,
                context,
                root.resource,
                child.attributes,
                start_time=offset + _nanoseconds(child.start),
                end_time=offset + _nanoseconds(child.end),
                instrumentation_scope=root.instrumentation_scope,
            )
            self._processor.on_end(readable)


class _CountingExporter(SpanExporter):
    """Counts what becomes of spans. One thread exports at a time."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.handled = 0  # out of the queue
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.handled += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def start(config: TracingConfig, clock: Clock, resource: Mapping[str, str]) -> SpanTracer:
    """Return what exports spans as `OTEL_*` and the configuration say. Raises StartupError.

    From then on Python switches between the process's threads every half millisecond.
    """
    sys.setswitchinterval(_SWITCH)
    try:
        queue = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, _QUEUE))
        return SpanTracer(_exporter(config.endpoint), clock, resource, queue=queue)
    except ValueError as error:
        raise StartupError(f"the settings of OpenTelemetry (OTEL_*) can't be used: {error}") from None


def _exporter(endpoint: str) -> SpanExporter:
    """The exporter that `OTEL_TRACES_EXPORTER` names. Raises StartupError."""
    name = os.environ.get(OTEL_TRACES_EXPORTER) or "otlp"
    options: dict[str, str] = {}
    if name == "otlp":
        setting = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL)
        protocol = setting or "http/protobuf"
        if protocol not in _PROTOCOLS:
            raise StartupError(
                f"{OTEL_EXPORTER_OTLP_PROTOCOL} is {protocol!r}; spans can be sent by {' or '.join(_PROTOCOLS)}"
            )
        name = _PROTOCOLS[protocol]
        if endpoint:
            bare = name == "otlp_proto_http" and urlsplit(endpoint).path in ("", "/")
            options["endpoint"] = f"{endpoint.rstrip('/')}/v1/traces" if bare else endpoint
    entry = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
    if entry is None:
        raise StartupError(f"no installed package exports spans as {name!r}: pip install 'baton[otel]'")
    return entry.load()(**options)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1_000_000_000)
