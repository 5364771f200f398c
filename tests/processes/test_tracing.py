"""From a client's `traceparent` to spans at a collector: over HTTP, and over gRPC."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.v1 import generation_pb2, generation_pb2_grpc
from deploy.local import LocalCluster
from tests.support import workload
from tests.support.eventually import DEADLINE, eventually
from tests.support.metrics_page import metric

PROMPT = list(range(5, 105))  # six full pages
TRACES = [f"{number:032x}" for number in (0xA1, 0xB2, 0xC3)]
PARENT = "00f067aa0ba902b7"


class Collector:
    """Takes spans over OTLP/HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/v1/traces"
                for part in body.resource_spans:
                    collector.resources.append(values(part.resource.attributes))
                    for scope in part.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def trace(self, name: str) -> list[Span]:
        """The spans of one trace, in order of their beginnings, the request's own first."""
        spans = [span for span in list(self.spans) if span.trace_id.hex() == name]
        return sorted(spans, key=lambda span: (span.start_time_unix_nano, span.name != "llm_request"))

    def close(self) -> None:
        """Answer nothing any more. May be called twice."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


def complete(spans: list[Span]) -> bool:
    return any(span.name == "llm_request" for span in spans)


def test_spans_of_clients_requests_reach_a_collector_and_its_death_hurts_no_request(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with collecting() as collector:
        settings = workload.settings(path, **{"tracing.enabled": True, "tracing.endpoint": collector.url})
        with LocalCluster(settings, tmp_path) as cluster:
            complete_over_http(cluster.addresses.api, TRACES[0])
            eventually(lambda: complete(collector.trace(TRACES[0])), what="the spans of the request over HTTP")
            generate_over_grpc(cluster.address, TRACES[1])
            eventually(lambda: complete(collector.trace(TRACES[1])), what="the spans of the request over gRPC")
            check(collector)
            collector.close()
            for _ in range(3):
                complete_over_http(cluster.addresses.api, TRACES[2])
            failed = partial(metric, cluster, "router", "spans_total", outcome="failed")
            eventually(lambda: failed() >= 3, what="spans that failed")


def check(collector: Collector) -> None:
    root, *others = collector.trace(TRACES[0])
    assert (root.name, root.kind, root.parent_span_id.hex()) == ("llm_request", Span.SPAN_KIND_SERVER, PARENT)
    assert root.trace_state == "shop=7"
    assert {span.parent_span_id for span in others} == {root.span_id}
    assert [span.name for span in others[:3]] == ["intake", "queue", "accept"]
    assert {"prefill", "first_step", "decode"} <= {span.name for span in others}
    attributes = values(root.attributes)
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert (attributes["gen_ai.usage.prompt_tokens"], attributes["gen_ai.usage.completion_tokens"]) == (len(PROMPT), 8)
    assert attributes["baton.prefill.worker"] == "prefill-0"
    for span in others:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    seconds = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    assert attributes["gen_ai.latency.e2e"] == pytest.approx(seconds, abs=1e-4)
    assert collector.trace(TRACES[1])[0].parent_span_id.hex() == PARENT
    resource = collector.resources[0]
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("baton", "test")
    assert resource["service.instance.id"].startswith("router.")


def complete_over_http(address: str, trace: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json", "traceparent": f"00-{trace}-{PARENT}-01", "tracestate": "shop=7"}
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 8


def generate_over_grpc(address: str, trace: str) -> None:
    request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=PROMPT), max_tokens=4)
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        metadata = (("traceparent", f"00-{trace}-{PARENT}-01"),)
        *_, last = stub.Generate(request, metadata=metadata, timeout=DEADLINE)
        assert last.HasField("finished")
