"""Dashboards about requests: is the service well, are objectives met, where does the time go, and which tenant asks."""

from __future__ import annotations

from deploy.grafana.board import Board, Panel, Query, Row
from deploy.grafana.boards.common import BETWEEN_TOKENS, FIRST_TOKEN, GOODPUT, JUDGED, REUSE, latency
from deploy.grafana.promql import WINDOW, highest, mean, quantile, rate, rise, series, total

_ATTAINED = f"{GOODPUT} / {JUDGED}"
_FAILED = rate("baton_request_errors_total", "reason")


def _attainment(objective: str) -> str:
    met = rate("baton_slo_requests_total", "priority", objective=objective, met="true")
    return f"{met} / {rate('baton_slo_requests_total', 'priority', objective=objective)}"


def _by_objective(window: str = WINDOW) -> str:
    either = "~ttft|tpot"
    met = rate("baton_slo_requests_total", "objective", window=window, objective=either, met="true")
    return f"{met} / {rate('baton_slo_requests_total', 'objective', window=window, objective=either)}"


OVERVIEW = Board(
    "baton-overview",
    "Baton: overview",
    "Is the cluster well? One line for each question; the other dashboards have the details.",
    [
        Panel(
            "Live workers",
            "Live prefill and decode workers, as the routers see them. Without a decode worker nothing is served.",
            "short",
            [Query(highest("baton_peers", "peer_role", peer_role="~prefill|decode"), "{{peer_role}}")],
            "stat",
            width=4,
            height=4,
        ),
        Panel("Requests", "Requests that ended, a second.", "reqps", [Query(JUDGED, "requests")], "stat", 4, 4),
        Panel(
            "Objectives met",
            "Share of requests that met all their objectives. Goodput is that share of the request rate.",
            "percentunit",
            [Query(_ATTAINED, "met")],
            "stat",
            width=4,
            height=4,
            largest=1,
        ),
        Panel(
            "First token, p99",
            "99th percentile of the time to first token.",
            "s",
            [Query(quantile(0.99, "baton_time_to_first_token_seconds"), "p99")],
            "stat",
            width=4,
            height=4,
        ),
        Panel(
            "Requests waiting",
            "Requests in the routers' queues. Requests that wait at a worker are not among them.",
            "short",
            [Query(total("baton_num_requests_waiting", role="router"), "waiting")],
            "stat",
            width=4,
            height=4,
        ),
        Panel(
            "Alerts firing",
            "Alerts of `prometheus/alerts.yml` that fire now. Each has a section in docs/operations.md.",
            "short",
            [Query('count(ALERTS{alertname=~"Baton.*",alertstate="firing",job=~"$job|"}) or vector(0)', "alerts")],
            "stat",
            width=4,
            height=4,
        ),
        Panel(
            "Requests by end",
            "How requests ended. `stop` and `length` are served; the others are errors by reason, `cancelled` "
            "included.",
            "reqps",
            [
                Query(rate("baton_request_success_total", "finished_reason"), "{{finished_reason}}"),
                Query(f"{_FAILED} > 0", "{{reason}}"),
            ],
            stack="normal",
        ),
        FIRST_TOKEN,
        BETWEEN_TOKENS,
        Panel(
            "Tokens",
            "Prompt tokens that had to be computed, prompt tokens from caches, and generated tokens, a second.",
            "tokens/s",
            [
                Query(rate("baton_prompt_tokens_computed_total"), "prompt, computed"),
                Query(rate("baton_prefix_cache_hits_total"), "prompt, cached"),
                Query(rate("baton_generation_tokens_total", role="router"), "generated"),
            ],
            stack="normal",
        ),
        Panel(
            "Requests running and waiting",
            "Running requests are placed on workers. Waiting ones are in a router's queue.",
            "short",
            [
                Query(total("baton_num_requests_running", role="router"), "running"),
                Query(total("baton_num_requests_waiting", role="router"), "waiting"),
            ],
        ),
        REUSE,
        Panel(
            "Utilization by role",
            "Work of the last half minute over what the workers of the role can do, by the fitted costs. Above 1 a "
            "queue grows.",
            "percentunit",
            [Query(highest("baton_predicted_utilization", "peer_role"), "{{peer_role}}")],
        ),
        Panel(
            "KV cache in use",
            "Share of the pages that running requests hold, by tier and role. Cached pages without a request are free.",
            "percentunit",
            [Query(f"max by (tier,role) ({series('baton_kv_cache_usage_perc')})", "{{role}}, {{tier}}")],
            largest=1,
        ),
        Panel(
            "Memory of processes",
            "Resident memory. The arena is shared: its pages count for each process that has touched them. Memory that "
            "grows for days under even load is a leak.",
            "bytes",
            [Query(series("process_resident_memory_bytes"), "{{name}}")],
        ),
    ],
)

OBJECTIVES = Board(
    "baton-slo",
    "Baton: objectives and goodput",
    "Do requests get what was promised, and if not, which class and which objective?",
    [
        Panel(
            "Goodput",
            "Requests a second that met all their objectives, beside all that ended. Cancelled, invalid and "
            "rate-limited requests are left out.",
            "reqps",
            [Query(GOODPUT, "goodput"), Query(JUDGED, "all requests")],
        ),
        Panel(
            "Attainment by priority",
            "Share of requests of a priority that met all their objectives. A request without objectives meets them if "
            "it is served.",
            "percentunit",
            [Query(_attainment("all"), "priority {{priority}}")],
            largest=1,
        ),
        Panel(
            "Attainment by objective",
            "Share of requests that met their objective for the first token, and for the time per token after it.",
            "percentunit",
            [Query(_by_objective(), "{{objective}}")],
            largest=1,
        ),
        Panel(
            "Burn rate of the error budget",
            "How many times faster than allowed requests miss an objective, where 1 % of them may. The alerts fire at "
            "14.4 (an hour takes 2 % of a month's budget) and 6.",
            "short",
            [
                Query(f"(1 - {_by_objective(window)}) / 0.01", f"{{{{objective}}}}, {window}")
                for window in ("5m", "1h", "6h")
            ],
        ),
        FIRST_TOKEN,
        latency(
            "Time per output token",
            "Of finished requests: the time from the first token to the end, over the tokens after the first.",
            "baton_request_time_per_output_token_seconds",
        ),
        latency("End to end", "Of finished requests: receipt to end.", "baton_e2e_request_latency_seconds"),
        Panel(
            "Distribution of the time to first token",
            "How many first tokens came after how long. Two bands often mean cached and uncached prompts.",
            "s",
            [Query(rise("baton_time_to_first_token_seconds_bucket", "le"), "{{le}}")],
            "heatmap",
        ),
        Panel(
            "Distribution of the time between tokens",
            "How many gaps between tokens were how long.",
            "s",
            [Query(rise("baton_inter_token_latency_seconds_bucket", "le"), "{{le}}")],
            "heatmap",
        ),
        Panel(
            "Requests refused",
            "Requests turned away before a worker had begun them, by reason. `objective` means that no placement would "
            "have met it.",
            "reqps",
            [Query(rate("baton_requests_rejected_total", "reason"), "{{reason}}")],
            width=12,
            stack="normal",
        ),
        Panel(
            "Requests waiting by priority",
            "Requests in the routers' queues. The lower the number, the more urgent.",
            "short",
            [Query(total("baton_requests_waiting", "priority"), "priority {{priority}}")],
            width=12,
            stack="normal",
        ),
    ],
)

_HOP = "baton_request_hop_seconds"
_FIRSTS = rate("baton_time_to_first_token_seconds_count")

TTFT = Board(
    "baton-ttft",
    "Baton: where the time to first token goes",
    "The hops of a request until its first token, stacked: they add up to the time to first token.",
    [
        Panel(
            "Mean time to first token by hop",
            "Mean seconds that a request spends in each hop, over all requests; the top of the stack is the mean time "
            "to first token. docs/operations.md says from when to when each hop lasts.",
            "s",
            [Query(f"{rate(f'{_HOP}_sum', 'hop')} / on () group_left {_FIRSTS}", "{{hop}}")],
            width=24,
            height=11,
            stack="normal",
        ),
        Panel(
            "Shares of the hops",
            "The same as shares of the whole.",
            "percentunit",
            [Query(rate(f"{_HOP}_sum", "hop"), "{{hop}}")],
            width=12,
            stack="percent",
        ),
        Panel(
            "Slowest requests by hop, p99",
            "99th percentile of each hop by itself, over the requests that pass it. Percentiles don't add up.",
            "s",
            [Query(quantile(0.99, _HOP, "hop"), "{{hop}}")],
            width=12,
        ),
        Panel(
            "Requests that pass a hop",
            "`load` is passed where the decode worker computes the prompt, the prefill hops where a prefill worker "
            "does.",
            "reqps",
            [Query(rate(f"{_HOP}_count", "hop"), "{{hop}}")],
        ),
        FIRST_TOKEN,
        latency(
            "Wait in the router",
            "From receipt to the placement of the last attempt. High: no worker has room; look at utilization.",
            "baton_request_queue_time_seconds",
        ),
    ],
)

_TENANT_TOKENS = rate("baton_tenant_tokens_total", "tenant")

TENANTS = Board(
    "baton-tenants",
    "Baton: tenants",
    "Which tenants use the cluster, what they cost, and which limits turn them away. The first 32 tenants have names; "
    "the others are `other`. All clients without keys are one tenant without a name.",
    [
        Panel(
            "Tokens by tenant",
            "Tokens of requests that ended: computed and cached prompt tokens, and generated ones.",
            "tokens/s",
            [Query(_TENANT_TOKENS, "{{tenant}}")],
            width=12,
            stack="normal",
        ),
        Panel(
            "Shares of the tenants",
            "The same as shares of the whole.",
            "percentunit",
            [Query(_TENANT_TOKENS, "{{tenant}}")],
            width=12,
            stack="percent",
        ),
        Panel(
            "Tokens by tenant and kind",
            "Which tenant computes prompts, which one lives on caches, and which one generates.",
            "tokens/s",
            [Query(rate("baton_tenant_tokens_total", "tenant,kind"), "{{tenant}}, {{kind}}")],
            width=12,
        ),
        Panel(
            "Cached share by tenant",
            "Cached prompt tokens over all prompt tokens of the tenant. Tenants share no page.",
            "percentunit",
            [
                Query(
                    f"{rate('baton_tenant_tokens_total', 'tenant', kind='cached')}"
                    f" / {rate('baton_tenant_tokens_total', 'tenant', kind='~computed|cached')}",
                    "{{tenant}}",
                )
            ],
            width=12,
            largest=1,
        ),
        Panel(
            "Refused by limits",
            "Requests over a tenant's rate limit, and requests that did not fit into the queue.",
            "reqps",
            [Query(rate("baton_requests_rejected_total", "reason", reason="~rate_limited|queue_full"), "{{reason}}")],
            width=12,
        ),
        Panel(
            "Mean wait in the router",
            "From receipt to placement. Where it grows, fairness decides which tenant waits.",
            "s",
            [Query(mean("baton_request_queue_time_seconds"), "mean")],
            width=12,
        ),
        Row("Pinned prefixes"),
        Panel(
            "Pins",
            "Prefixes that are kept pinned, or are on their way to it, by phase.",
            "short",
            [Query(total("baton_pins", "phase"), "{{phase}}")],
            width=12,
        ),
        Panel(
            "Pinned memory",
            "Bytes of the arenas that pinned prefixes take.",
            "bytes",
            [Query(total("baton_pinned_bytes", "node"), "{{node}}")],
            width=12,
        ),
    ],
)
