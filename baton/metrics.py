"""Every metric of every process, one table; and the page that Prometheus reads.

Names are vLLM's where the meaning is the same, with `baton_` for `vllm:`; units are base units; labels are bounded and
never name a request. States know nothing of this: a process publishes what it read from `stats()` and Prometheus reads
the last published values. Only latencies and sizes are observed one by one. A process that hangs publishes nothing, so
the ages of its loop, and its memory, are read when a page is made: `read_at_scrape`. Families with `process_` for
`baton_` are those that Prometheus' clients of all languages have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.errors import PortInUse
from baton.hosts import bracketed
from baton.metrics_server import Answer, MetricsServer
from baton.ports import listen
from baton.samples import Sample


@dataclass(frozen=True)
class MetricSpec:
    """One row of the table. A counter's name gets `_total` from Prometheus.

    No label is called `role`, `node` or `name`: /discovery gives these to the process that tells the metric, and
    Prometheus would rename ours."""

    kind: Literal["gauge", "counter", "seconds", "sizes"]  # the last two are histograms
    help: str
    labels: tuple[str, ...] = ()


_gauge, _counter = partial(MetricSpec, "gauge"), partial(MetricSpec, "counter")
_seconds, _sizes = partial(MetricSpec, "seconds"), partial(MetricSpec, "sizes")

TABLE: Mapping[str, MetricSpec] = {
    # router
    "time_to_first_token_seconds": _seconds("Request received to first token sent."),
    "inter_token_latency_seconds": _seconds("Gap between two streamed tokens."),
    "request_time_per_output_token_seconds": _seconds("(end - first token) / (tokens - 1)."),
    "e2e_request_latency_seconds": _seconds("Request received to its end."),
    "request_queue_time_seconds": _seconds("Request received to placed on a worker."),
    "request_prefill_time_seconds": _seconds("Placed to the prompt covered."),
    "request_decode_time_seconds": _seconds("First token to the end."),
    "request_hop_seconds": _seconds(
        "Parts of the time to first token, which they add up to; see router/requests/hops.py.", ("hop",)
    ),
    "handoff_seconds": _seconds("Prompt computed by a prefill worker to its pages on the decode worker."),
    "handoff_bytes": _counter("Bytes of pages that decode workers fetched for split requests."),
    "slo_requests": _counter(
        "Requests that ended, by whether they met an objective; a request without that objective meets it if served.",
        ("priority", "objective", "met"),
    ),
    "request_success": _counter("Requests finished.", ("finished_reason",)),
    "request_errors": _counter("Requests failed or cancelled.", ("reason",)),
    "request_attempts": _counter("Attempts at requests; more than requests when something died."),
    "placements": _counter("Placements decided.", ("kind",)),
    "requests_waiting": _gauge("Requests in the router's queue, by level of priority.", ("priority",)),
    "requests_rejected": _counter("Requests turned away before a worker had begun them.", ("reason",)),
    "request_repairs": _counter("Requests that the HTTP APIs repaired.", ("kind",)),
    "cascade_requests": _counter("Requests of a cascade, by the model that answers.", ("model", "chosen", "reason")),
    "tenant_tokens": _counter("Tokens of requests that ended; late tenants are other.", ("tenant", "kind")),
    "prediction_error": _gauge("|ln(actual / predicted)| of the last predictions.", ("kind", "quantile")),
    "predicted_utilization": _gauge("Work lately over what the workers of a role can do.", ("peer_role",)),
    "role_advised": _gauge("1 where one worker of the other kind should have this role.", ("peer_role",)),
    "prompt_tokens": _counter("Prompt tokens of finished requests."),
    "generation_tokens": _counter("Tokens generated."),
    "prefix_cache_queries": _counter("Prompt tokens looked up."),
    "prefix_cache_hits": _counter("Prompt tokens that came from caches."),
    "prefix_cache_ceiling": _gauge(
        "Share of prompt tokens that a cache without bounds would have had, over a time.", ("window",)
    ),
    "tokenizer_cache_queries": _counter("Prompt tokens of texts."),
    "tokenizer_cache_hits": _counter("Prompt tokens of texts that were known without tokenizing."),
    "prompt_tokens_not_cached": _counter(
        "Prompt tokens of finished requests that were computed, by why they were not cached.", ("reason",)
    ),
    "prefix_map_pages": _gauge("Different pages that any process holds, as far as the router knows."),
    "prefix_map_repairs": _counter("Holders whose pages were found known wrongly and asked for.", ("found_by",)),
    "pins": _gauge("Prefixes that are kept pinned, or are on their way to it.", ("phase",)),
    "peers": _gauge("Live processes.", ("peer_role",)),
    "spans": _counter("OpenTelemetry spans, by what became of them.", ("outcome",)),
    "worker_slowdown": _gauge(
        "Times as long as it should that a decode worker takes for its steps; 1 where it is no outlier.", ("worker",)
    ),
    "attempts_yielded": _counter(
        "Attempts that gave their place to more urgent requests, or to those whose turn it was."
    ),
    "attempts_moved": _counter("Attempts that were moved away from a decode worker that is slow."),
    "prompts_moved": _counter("Prompts of which another prefill worker was given the rest."),
    "peers_lost": _counter("Processes that went, by why.", ("peer_role", "reason")),
    "heartbeat_age_seconds": _gauge("Age of the oldest last heartbeat of live processes.", ("peer_role",)),
    # every process
    "loop_age_seconds": _gauge("Since the main loop last turned; it grows while a step runs."),
    # workers and stores, about their KV events
    "kv_event_answers_dropped": _counter("Snapshots and replays that a follower asked for and did not take."),
    "kv_event_digests_corrected": _counter("Digests that were not those of what is held: a mistake of ours."),
    # router and workers
    "num_requests_running": _gauge("Requests in the running batch."),
    "num_requests_waiting": _gauge("Requests that wait."),
    "malformed_messages": _counter("Frames and requests dropped because they are no message of their link."),
    "connections_refused": _counter("Connections refused: without the cluster's keys, or of another user."),
    # workers and stores
    "kv_cache_usage_perc": _gauge("Share of the pages in use, 0 to 1.", ("tier",)),
    "kv_pages": _gauge("Pages by what they are.", ("tier", "state")),
    "pages_copied": _counter("Pages copied between device and arena.", ("direction",)),
    "bytes_copied": _counter("Bytes copied between device and arena.", ("direction",)),
    "num_preemptions": _counter("Sequences whose device pages were taken."),
    "growth_reserve_pages": _gauge("Device pages that admission leaves to those that have some already."),
    "prompt_tokens_computed": _counter("Prompt tokens computed by this worker."),
    "prefix_tokens_copied": _counter("Tokens behind the last cached page that came with a copy of a device page."),
    "prompt_pages_cached": _counter("Prompt pages found instead of computed.", ("tier",)),
    "kv_loads_incomplete": _counter("Fetches that ended before every page was here."),
    "pages_refilled": _counter("Cached device pages written to a store that came up after them."),
    "pages_recomputed": _counter("Complete pages computed once more to compare them."),
    "pages_differing": _counter("Of them, those that differed. They were dropped."),
    "write_through_refused": _counter("Write-throughs that the store had no room for."),
    "spec_decode_num_drafts": _counter("Times that a sequence had proposals in a step."),
    "spec_decode_num_draft_tokens": _counter("Proposals that steps verified."),
    "spec_decode_num_accepted_tokens": _counter("Of them, those that were right."),
    "step_seconds": _seconds("Time of an engine step."),
    "steps_launched_ahead": _counter("Engine steps that were launched while the one before ran."),
    "step_age_seconds": _gauge("Since the running engine step began; 0 while none runs."),
    "step_sequences": _sizes("Sequences in the batch of a step."),
    "iteration_tokens_total": _sizes("Tokens in the batch of a step."),
    "gpu_memory_used_bytes": _gauge("Memory of a GPU of the worker that any process uses.", ("gpu",)),
    "gpu_memory_total_bytes": _gauge("Memory of a GPU of the worker.", ("gpu",)),
    "gpu_utilization_perc": _gauge("Share of the time in which the GPU ran a kernel, 0 to 1.", ("gpu",)),
    "checksum_failures": _counter("Pages dropped because their bytes did not match.", ("tier",)),
    "page_evictions": _counter("Pages evicted.", ("tier",)),
    "load_regret_seconds": _counter("Time lost to loads slower than computing.", ("tier",)),
    "tier_bytes": _gauge("Bytes taken.", ("tier",)),
    "tier_hits": _counter("Pages found there when a worker asked.", ("tier",)),
    "tier_loads": _counter("Pages brought up from there.", ("tier",)),
    "tier_load_seconds": _counter("Time from asking to landing, over loads.", ("tier",)),
    "tier_loads_failed": _counter("Pages that were to come from a lower tier and did not."),
    "pages_sent": _counter("Pages sent to other stores."),
    "pages_unexpected": _counter("Pages of other stores that came when no worker waited for them (any more)."),
    "peer_links": _gauge("Other stores that are connected."),
    "peer_messages_dropped": _counter("Messages between stores not sent, or for another store."),
    "disk_up": _gauge("1 while the disk tier works; 0 without one, and once it has failed."),
    "disk_writes_dropped": _counter("Pages not written to disk: no room, no time, or the disk has failed."),
    "disk_torn_records": _counter("Pages found at start whose writing was cut off."),
    "store_misses": _counter("Pages asked for that were not in the arena."),
    "store_calls": _counter("Calls from workers.", ("call",)),
    "store_pages_awaited": _gauge("Pages that a worker waits for."),
    "unproven_reservations": _gauge("Slots reserved by a writer that left without proof of its death."),
    "oldest_lease_seconds": _gauge("Age of the oldest lease that holds pages."),
    "leases_expired": _counter("Holds that their owner did not renew."),
    "pinned_bytes": _gauge("Bytes kept because they are pinned."),
}

PAGE_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_SECONDS = 0.5  # a rendered page is served for so long: rendering takes milliseconds of the process's one core
_BUCKETS = {
    "seconds": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    "sizes": tuple(float(2**exponent) for exponent in range(15)),
}


class Metrics(Collector):
    """The metrics of one process. Thread-safe: the loop publishes, Prometheus' thread reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()  # others may register families of their own
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self._published: Mapping[str, Sample] = {}
        self._readers: list[Callable[[], Mapping[str, Sample]]] = []
        self._turned: float | None = None
        self._families: dict[str, Histogram] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        self._lock = threading.Lock()
        self._server: MetricsServer | None = None
        self._beside: Mapping[str, Metrics] = {}  # by model, this one among them
        self._page = b""
        self._page_until = float("-inf")
        self._rendering = threading.Lock()

    def publish(self, values: Mapping[str, Sample]) -> None:
        """Replace what gauges and counters say: a number, or numbers by label values. Raises KeyError for a name
        that the table does not have."""
        for name in values:
            TABLE[name]
        self._published = values

    def beside(self, others: Mapping[str, Metrics], mine: str) -> None:
        """Show the metrics of other models on this page, too. Then the label `model_name` of each sample, which vLLM's
        have in any case, says whose it is: `mine`, or the name in `others`."""
        self._beside = {mine: self, **others}

    def read_at_scrape(self, read: Callable[[], Mapping[str, Sample]]) -> None:
        """Call `read` for more values whenever a page is made, from the thread that makes it. A name that the table
        does not have makes the page fail with KeyError."""
        self._readers.append(read)

    def loop_turned(self) -> None:
        """The main loop goes on. `loop_age_seconds` counts from the last call."""
        self._turned = time.monotonic()

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one duration in seconds, or one size, to the histogram of that name and these label values."""
        if (histogram := self._histograms.get((name, labels))) is None:
            histogram = self._child(name, labels)
        histogram.observe(value)

    def _child(self, name: str, labels: tuple[str, ...]) -> Histogram:
        spec = TABLE[name]
        with self._lock:
            if name not in self._families:
                self._families[name] = Histogram(
                    *(f"baton_{name}", spec.help, spec.labels), registry=self.registry, buckets=_BUCKETS[spec.kind]
                )
            family = self._families[name]
            return self._histograms.setdefault((name, labels), family.labels(*labels) if labels else family)

    def collect(self) -> Iterator[Metric]:
        for name, value in self._values().items():
            entry = TABLE[name]
            family = (CounterMetricFamily if entry.kind == "counter" else GaugeMetricFamily)(
                f"baton_{name}", entry.help, labels=entry.labels
            )
            for labels, number in (value if isinstance(value, Mapping) else {(): value}).items():
                family.add_metric(labels, number)
            yield family

    def _values(self) -> Mapping[str, Sample]:
        values = dict(self._published)
        if (turned := self._turned) is not None:
            values["loop_age_seconds"] = time.monotonic() - turned
        for read in self._readers:
            values |= read()
        return values

    def serve(self, host: str) -> str:
        """Serve the page on any free port of `host`, from threads; returns "host:port". Raises PortInUse."""
        try:
            self._server = MetricsServer(listen(host), self.answer)
        except OSError as error:
            raise PortInUse(f"can't serve metrics on {host}: {error.strerror}") from None
        return f"{bracketed(host)}:{self._server.port}"

    def text(self) -> bytes:
        return generate_latest(_OfModels(self._beside) if self._beside else self.registry)

    def page(self) -> bytes:
        """The page as it was at most half a second ago. However many ask, it is rendered twice a second at most."""
        with self._rendering:
            if time.monotonic() >= self._page_until:
                self._page = self.text()
                self._page_until = time.monotonic() + _PAGE_SECONDS
            return self._page

    def answer(self, _: object) -> Answer:
        return Answer(self.page(), content_type=PAGE_TYPE)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class _OfModels(CollectorRegistry):
    """The families of several registries as one page may hold them: once each, with a label for the model."""

    def __init__(self, models: Mapping[str, Metrics]) -> None:
        super().__init__()
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, metrics in self._models.items():
            for family in metrics.registry.collect():
                if family.name.startswith("process_"):  # all models of a router share its process
                    families[family.name] = family
                    continue
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples += [one._replace(labels={**one.labels, "model_name": model}) for one in family.samples]
        yield from families.values()
