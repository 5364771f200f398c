"""A router's statistics as Prometheus reads them, under our names and under vLLM's. What is counted, and what it means,
is the state's to say.

A counter that appears with its first event is not seen to rise, because Prometheus takes its first value as the one
before. So whatever has a known set of labels is told with zeros from the start.

Under vLLM's names the whole cluster looks like one engine: labels `model_name` and `engine` ("0"), vLLM's buckets. What
has no meaning here is left out; docs/http-api.md lists it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton import errors
from baton.messages import FinishReason
from baton.samples import Labels, Sample
from router.events import Cancelled, Finished, RequestEnded
from router.frontend.served_model import ServedModel
from router.members import GONE_REASONS
from router.not_cached import REASONS
from router.queueing.admission import REJECTIONS
from router.requests.counts import RequestCounts
from router.views import ProcessView, RouterStats

_ERRORS = (
    errors.InvalidRequest, errors.ContextTooLong, errors.InvalidGrammar, errors.Overloaded, errors.ObjectiveUnreachable,
    errors.RateLimited, errors.DeadlineExpired, errors.RequestCancelled, errors.Unavailable, errors.AttemptsExhausted,
    errors.NonFiniteLogits, errors.BatonError,
)  # fmt: skip  # those that end requests
_FINISHED: Mapping[Labels, float] = {(reason,): 0.0 for reason in get_args(FinishReason)}
_FAILED: Mapping[Labels, float] = {(error.reason,): 0.0 for error in _ERRORS}
_REJECTED: Mapping[Labels, float] = {(reason,): 0.0 for reason in REJECTIONS}
Name = TypeVar("Name", bound=str)
_NOT_CACHED: Mapping[Labels, float] = {(reason,): 0.0 for reason in REASONS}
_LOST: Mapping[Labels, float] = dict.fromkeys(product(("prefill", "decode", "store"), GONE_REASONS), 0.0)
_LABELS = ("model_name", "engine")
_ENGINE = "0"
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_BETWEEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_SECONDS = {
    "time_to_first_token_seconds": ("Time to first token.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Time between two tokens of a request.", _BETWEEN),
    "request_time_per_output_token_seconds": ("Time per output token of a request.", _BETWEEN),
    "e2e_request_latency_seconds": ("Time from receipt to the end.", _REQUEST),
    "request_queue_time_seconds": ("Time in the router's queue.", _REQUEST),
    "request_inference_time_seconds": ("Time from placement to the end.", _REQUEST),
    "request_prefill_time_seconds": ("Time from placement until the prompt is covered.", _REQUEST),
    "request_decode_time_seconds": ("Time from the first token to the end.", _REQUEST),
}
_TOKENS = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Output tokens of a request.",
    "request_params_max_tokens": "The max_tokens of a request.",
}
_COUNTERS = {
    "prompt_tokens": ("Prompt tokens.", ()),
    "prompt_tokens_cached": ("Prompt tokens from caches.", ()),
    "prompt_tokens_by_source": ("Prompt tokens by where they came from.", ("source",)),
    "generation_tokens": ("Output tokens.", ()),
    "prefix_cache_queries": ("Prompt tokens that were looked up in caches.", ()),
    "prefix_cache_hits": ("Prompt tokens that were found in caches.", ()),
    "request_success": ("Requests that ended, by reason.", ("finished_reason",)),
    "spec_decode_num_drafts": ("Steps of a request that verified proposals.", ()),
    "spec_decode_num_draft_tokens": ("Proposals that steps have verified.", ()),
    "spec_decode_num_accepted_tokens": ("Proposals that were right.", ()),
}


def metric_samples(stats: RouterStats) -> Mapping[str, Sample]:
    counts, utilization, advice = stats.counts, stats.utilization, stats.advice
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.queued,
        "request_success": {**_FINISHED, **_by(counts.finished)},
        "request_errors": {**_FAILED, **_by(counts.failed), (errors.RequestCancelled.reason,): _cancelled(counts)},
        "request_attempts": counts.attempts,
        "placements": {("split",): counts.split, ("local",): counts.local},
        "slo_requests": {
            (str(level), objective, str(met).lower()): count
            for (level, objective, met), count in stats.attainment.items()
        },
        "prompt_tokens": counts.prompt_tokens,
        "generation_tokens": counts.generated_tokens,
        "prefix_cache_queries": counts.prompt_tokens,
        "prefix_cache_hits": counts.cached_tokens,
        "prefix_cache_ceiling": _by(stats.reuse_ceiling),
        "prompt_tokens_not_cached": {**_NOT_CACHED, **_by(counts.not_cached_tokens)},
        "prefix_map_pages": stats.kv_index.pages,
        "prefix_map_repairs": {("gap",): stats.kv_index.gaps, ("digest",): stats.kv_index.divergences},
        "requests_waiting": {
            **{(str(level),): 0.0 for level, _, _ in stats.attainment},
            **{(str(level),): float(count) for level, count in stats.waiting.items()},
        },
        "requests_rejected": {**_REJECTED, **_by(stats.rejected)},
        "prediction_error": {
            (kind, quantile): error
            for kind, score in stats.prediction_errors.items()
            for quantile, error in (("0.5", score.median), ("0.9", score.p90))
        },
        "tenant_tokens": stats.tenant_tokens,
        "pins": _by(stats.pins),
        "peers": {(role,): count for role, count in stats.live.items()},
        "worker_slowdown": _by(stats.slowdowns),
        "attempts_moved": counts.moved,
        "prompts_moved": counts.prompts_moved,
        "attempts_yielded": counts.yielded,
        "peers_lost": {**_LOST, **stats.lost},
        "predicted_utilization": {}
        if utilization is None
        else {("prefill",): utilization.prefill, ("decode",): utilization.decode},
        "role_advised": {(role,): float(advice is not None and advice.role == role) for role in ("prefill", "decode")},
    }


def heartbeat_age(processes: Sequence[ProcessView]) -> Mapping[Labels, float]:
    """Of the live process of each role that has been silent longest, seconds."""
    oldest: dict[Labels, float] = {}
    for view in processes:
        if view.gone is None:
            role = (view.peer.role,)
            oldest[role] = max(oldest.get(role, 0.0), view.heartbeat_age)
    return oldest


def _by(counts: Mapping[Name, float]) -> Mapping[Labels, float]:
    return {(label,): count for label, count in counts.items()}


def _cancelled(counts: RequestCounts) -> float:
    return counts.cancelled + counts.failed.get(errors.RequestCancelled.reason, 0)


@dataclass(frozen=True)
class EngineLoad:
    """The cluster as one engine."""

    running: int
    waiting: int
    pages_free: int  # on the devices of decode workers
    pages_total: int
    running_adapters: Sequence[str] = ()  # names of the LoRA adapters of requests that run,
    waiting_adapters: Sequence[str] = ()  # and of those that wait


class VllmMetrics(Collector):
    """Counts requests as they end, and shows `load`, which the router's loop replaces. Any thread may render it."""

    def __init__(self, registry: CollectorRegistry, model: ServedModel, page_size: int) -> None:
        self._registry = registry
        self._registry.register(self)
        self.load = EngineLoad(0, 0, 0, 0)
        self._values = (model.name, _ENGINE)
        self._page_size, self._max_lora = page_size, len(model.adapters)
        self._seconds = {name: self._histogram(name, *parts) for name, parts in _SECONDS.items()}
        buckets = _one_two_five(model.limits.max_context)
        self._tokens = {name: self._histogram(name, text, buckets) for name, text in _TOKENS.items()}
        self._between = self._seconds["inter_token_latency_seconds"]
        self._counters = {
            name: Counter(f"vllm:{name}", text, (*_LABELS, *labels), registry=self._registry)
            for name, (text, labels) in _COUNTERS.items()
        }

    def gap(self, seconds: float) -> None:
        """A request's next token came after so long."""
        self._between.observe(seconds)

    def request_ended(self, end: RequestEnded, max_tokens: int | None) -> None:
        """A request has ended, in any way."""
        usage, line = end.summary.usage, end.summary.timeline
        if isinstance(end.outcome, Cancelled):
            self._count("request_success", 1, "abort")
        if not isinstance(end.outcome, Finished):
            return
        self._count("request_success", 1, end.outcome.reason)
        here = min(usage.cached, end.summary.served.pages_on_device * self._page_size)
        for source, tokens in (
            ("local_compute", usage.prompt - usage.cached),
            ("local_cache_hit", here),
            ("external_kv_transfer", usage.cached - here),
        ):
            self._count("prompt_tokens_by_source", tokens, source)
        self._count("prompt_tokens", usage.prompt)
        self._count("prompt_tokens_cached", usage.cached)
        self._count("generation_tokens", usage.completion)
        self._count("prefix_cache_queries", usage.prompt)
        self._count("prefix_cache_hits", usage.cached)
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            self._count(f"spec_decode_num_{name}", getattr(end.summary.served, name))
        for name, seconds in {
            "time_to_first_token_seconds": line.ttft,
            "request_time_per_output_token_seconds": line.tpot(usage.completion),
            "e2e_request_latency_seconds": line.between("received", "ended"),
            "request_queue_time_seconds": line.between("received", "placed"),
            "request_inference_time_seconds": line.between("placed", "ended"),
            "request_prefill_time_seconds": line.between("placed", "started"),
            "request_decode_time_seconds": line.between("first_token", "ended"),
        }.items():
            if seconds is not None:
                self._seconds[name].observe(seconds)
        self._tokens["request_prompt_tokens"].observe(usage.prompt)
        self._tokens["request_generation_tokens"].observe(usage.completion)
        if max_tokens is not None:
            self._tokens["request_params_max_tokens"].observe(max_tokens)

    def collect(self) -> Iterator[Metric]:
        """Yield what is read when a page is made."""
        load = self.load
        used = (load.pages_total - load.pages_free) / load.pages_total if load.pages_total else 0.0
        yield from (
            self._gauge("num_requests_running", "Requests that run.", load.running),
            self._gauge("num_requests_waiting", "Requests that wait.", load.waiting),
            self._gauge("kv_cache_usage_perc", "Share of the device pages in use, 0 to 1.", used),
        )
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests that wait, by reason.", labels=(*_LABELS, "reason")
        )
        waiting.add_metric((*self._values, "capacity"), load.waiting)
        yield waiting
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=(*_LABELS, "block_size", "num_gpu_blocks")
        )
        config.add_metric((*self._values, str(self._page_size), str(load.pages_total)), 1)
        yield config
        if self._max_lora:
            names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
            adapters = GaugeMetricFamily(
                "vllm:lora_requests_info", "LoRA adapters of requests; the value is the time.", labels=names
            )
            values = (str(self._max_lora), ",".join(load.waiting_adapters), ",".join(load.running_adapters))
            adapters.add_metric(values, time.time())
            yield adapters

    def describe(self) -> Iterable[Metric]:
        return ()

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, _LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(*self._values)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(*self._values, *labels).inc(amount)


def _one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, … up to `most`, as vLLM buckets tokens."""
    buckets: list[float] = []
    exponent = 0
    while True:
        for mantissa in (1, 2, 5):
            if (value := mantissa * 10**exponent) > most:
                return buckets or [1.0]
            buckets.append(float(value))
        exponent += 1
