"""Panels and queries that more than one dashboard has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deploy.grafana.board import Panel, Query, Unit
from deploy.grafana.promql import quantile, rate, series

QUANTILES = (0.5, 0.9, 0.99)


def quantiles(histogram: str, **labels: str) -> Sequence[Query]:
    """The median, and the 90th and 99th percentile."""
    return [Query(quantile(q, histogram, **labels), f"p{q * 100:g}") for q in QUANTILES]


def latency(title: str, description: str, histogram: str, unit: Unit = "s", width: int = 8, **labels: str) -> Panel:
    """The quantiles of a histogram."""
    return Panel(title, description, unit, quantiles(histogram, **labels), width=width)


def gpu(role: str) -> Sequence[Panel]:
    """Of the GPUs of the workers of a role. Two workers of one GPU tell the same of it."""
    named = {"name": "~$name", "role": role}
    used, all_ = series("baton_gpu_memory_used_bytes", **named), series("baton_gpu_memory_total_bytes", **named)
    note = "Empty without a GPU, and without nvidia-ml-py (`pip install 'baton[gpu]'`)."
    memory = Panel(
        "GPU memory",
        f"Share of the GPU's memory that any process uses. {note}",
        "percentunit",
        [Query(f"max by (name,gpu) ({used} / {all_})", "{{name}} {{gpu}}")],
        width=12,
        largest=1,
    )
    busy = series("baton_gpu_utilization_perc", **named)
    return [
        memory,
        replace(
            memory,
            title="GPU utilization",
            description=f"Share of the time in which a kernel ran. It says nothing of how well it ran. {note}",
            queries=[Query(f"max by (name,gpu) ({busy})", "{{name}} {{gpu}}")],
        ),
    ]


GOODPUT = rate("baton_slo_requests_total", objective="all", met="true")
JUDGED = rate("baton_slo_requests_total", objective="all")
HIT_RATE = f"{rate('baton_prefix_cache_hits_total')} / {rate('baton_prefix_cache_queries_total')}"

REUSE = Panel(
    "Prefix hit rate and its ceiling",
    "Share of prompt tokens that came from caches, and the share that a cache without bounds would have had. The gap "
    "is what more memory or better routing could win. The ceiling is that of the router with the most reuse.",
    "percentunit",
    [
        Query(HIT_RATE, "hit rate"),
        *(
            Query(f"max ({series('baton_prefix_cache_ceiling', window=window)})", f"ceiling, last {window}")
            for window in ("15m", "1h", "24h")
        ),
    ],
    largest=1,
)

FIRST_TOKEN = latency(
    "Time to first token",
    "From a request's receipt to its first token, as the router sent it.",
    "baton_time_to_first_token_seconds",
)

BETWEEN_TOKENS = latency(
    "Time between tokens",
    "Gaps between two tokens of one stream. A high p99 with a low median means that some steps wait: look at "
    "preemptions and at prompts that decode workers compute.",
    "baton_inter_token_latency_seconds",
)
