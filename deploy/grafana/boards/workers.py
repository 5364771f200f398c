"""Dashboards about workers: what each prefill worker and each decode worker does with its steps and pages."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.grafana.board import Board, Panel, Query, Row, Unit
from deploy.grafana.boards.common import BETWEEN_TOKENS, gpu
from deploy.grafana.promql import highest, mean, quantile, rate, total


def _each(expr: str) -> Sequence[Query]:
    return [Query(expr, "{{name}}")]


def _steps(role: str) -> Sequence[Panel]:
    """What every worker's steps are like."""
    named = {"role": role, "name": "~$name"}
    return [
        Panel(
            "Step time, p99",
            "99th percentile of the time of an engine step.",
            "s",
            _each(quantile(0.99, "baton_step_seconds", "name", **named)),
        ),
        Panel(
            "Sequences in a step",
            "Mean number of sequences in the batch of a step.",
            "short",
            _each(mean("baton_step_sequences", "name", **named)),
        ),
        Panel(
            "Tokens in a step",
            "Mean and 99th percentile of the tokens that a step computes.",
            "tokens",
            [
                Query(mean("baton_iteration_tokens_total", "name", **named), "{{name}}, mean"),
                Query(quantile(0.99, "baton_iteration_tokens_total", "name", **named), "{{name}}, p99"),
            ],
        ),
        Panel(
            "Busy with steps",
            "Share of the time in which a step of the engine runs.",
            "percentunit",
            _each(rate("baton_step_seconds_sum", "name", **named)),
            largest=1,
        ),
        Panel(
            "Age of the loop and of the step",
            "Since the main loop last turned, and since the running step began. Seconds are a long step; without end "
            "it hangs, and the supervisor replaces it after cluster.step_timeout_ms.",
            "s",
            [
                Query(highest("baton_loop_age_seconds", "name", **named), "{{name}}, loop"),
                Query(highest("baton_step_age_seconds", "name", **named), "{{name}}, step"),
            ],
        ),
        Panel(
            "Memory",
            "Resident memory of the process: weights, page pool, and the pages of the arena that it has touched.",
            "bytes",
            _each(highest("process_resident_memory_bytes", "name", **named)),
        ),
    ]


def _pages(role: str) -> Sequence[Panel]:
    """What every worker's device pages are like."""
    named = {"role": role, "name": "~$name"}
    return [
        Panel(
            "Device pages in use",
            "Share of the device pages that running requests hold.",
            "percentunit",
            _each(highest("baton_kv_cache_usage_perc", "name", tier="device", **named)),
            largest=1,
        ),
        Panel(
            "Device evictions",
            "Cached device pages that had to make room, a second. Their copies in the arena stay.",
            "pages/s",
            _each(rate("baton_page_evictions_total", "name", tier="device", **named)),
        ),
        Panel(
            "Prompt pages found",
            "Prompt pages that were found instead of computed, by where.",
            "pages/s",
            [Query(rate("baton_prompt_pages_cached_total", "tier", **named), "{{tier}}")],
            stack="normal",
        ),
    ]


def _count(title: str, description: str, unit: Unit, metric: str, role: str, **labels: str) -> Panel:
    return Panel(title, description, unit, _each(rate(metric, "name", role=role, name="~$name", **labels)))


_PREFILL = {"role": "prefill", "name": "~$name"}
_DECODE = {"role": "decode", "name": "~$name"}

PREFILL = Board(
    "baton-prefill",
    "Baton: prefill workers",
    "How quickly prompts are computed, what waits for it, and what the caches spare.",
    [
        _count(
            "Prompt tokens computed",
            "Prompt tokens that a prefill worker computes, a second.",
            "tokens/s",
            "baton_prompt_tokens_computed_total",
            "prefill",
        ),
        Panel(
            "Prompts running and waiting",
            "Prompts that a worker computes, and prompts that wait there for pages which another prompt makes.",
            "short",
            [
                Query(total("baton_num_requests_running", "name", **_PREFILL), "{{name}}, running"),
                Query(total("baton_num_requests_waiting", "name", **_PREFILL), "{{name}}, waiting"),
            ],
        ),
        Panel(
            "Queue and computation of a prompt",
            "Mean time of a prompt in a prefill worker's queue and in its steps, over all workers.",
            "s",
            [
                Query(mean("baton_request_hop_seconds", hop="prefill_queue"), "queue"),
                Query(mean("baton_request_hop_seconds", hop="prefill_compute"), "computation"),
            ],
            stack="normal",
        ),
        *_steps("prefill"),
        Row("Pages"),
        *_pages("prefill"),
        Row("GPU"),
        *gpu("prefill"),
    ],
    names='baton_step_age_seconds{role="prefill"}',
)

DECODE = Board(
    "baton-decode",
    "Baton: decode workers",
    "How quickly tokens come, how full the batches and the pages are, and what disturbs the streams.",
    [
        _count(
            "Tokens generated",
            "Tokens that a decode worker generates, a second.",
            "tokens/s",
            "baton_generation_tokens_total",
            "decode",
        ),
        Panel(
            "Sequences running and waiting",
            "Sequences in the running batch, and sequences that wait for pages or for room.",
            "short",
            [
                Query(total("baton_num_requests_running", "name", **_DECODE), "{{name}}, running"),
                Query(total("baton_num_requests_waiting", "name", **_DECODE), "{{name}}, waiting"),
            ],
        ),
        BETWEEN_TOKENS,
        *_steps("decode"),
        Row("Pages"),
        *_pages("decode"),
        _count(
            "Preemptions",
            "Sequences whose device pages were taken because there was no room to grow. They fetch or compute them "
            "anew.",
            "ops",
            "baton_num_preemptions_total",
            "decode",
        ),
        Panel(
            "Pages kept for growth",
            "Device pages that admission leaves to the sequences that run already.",
            "pages",
            _each(highest("baton_growth_reserve_pages", "name", **_DECODE)),
        ),
        _count(
            "Prompt tokens computed here",
            "Prompt tokens that a decode worker computes itself. Each such step delays the streams beside it.",
            "tokens/s",
            "baton_prompt_tokens_computed_total",
            "decode",
        ),
        Row("GPU"),
        *gpu("decode"),
    ],
    names='baton_step_age_seconds{role="decode"}',
)
