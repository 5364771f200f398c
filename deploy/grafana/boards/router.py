"""Dashboards about the routers' decisions, and about faults."""

from __future__ import annotations

from deploy.grafana.board import Board, Panel, Query, Row
from deploy.grafana.boards.common import latency
from deploy.grafana.promql import highest, rate, rise, series, total

ROUTER = Board(
    "baton-router",
    "Baton: router decisions",
    "What placement decides, how good its predictions are, and what it knows of the workers' pages.",
    [
        Panel(
            "Placements",
            "Placements with a prefill worker (`split`), and where the decode worker computes the prompt (`local`).",
            "ops",
            [Query(rate("baton_placements_total", "kind"), "{{kind}}")],
            stack="normal",
        ),
        Panel(
            "Prediction error, median",
            "Median of |ln(actual / predicted)| of the last predictions: 0.1 is some 10 % off, 0.7 a factor of 2.",
            "short",
            [Query(highest("baton_prediction_error", "kind", quantile="0.5"), "{{kind}}")],
        ),
        Panel(
            "Prediction error, p90",
            "90th percentile of the same.",
            "short",
            [Query(highest("baton_prediction_error", "kind", quantile="0.9"), "{{kind}}")],
        ),
        Panel(
            "Attempts per request",
            "Attempts over requests. Above 1: workers refused, failed or died.",
            "short",
            [
                Query(
                    f"{rate('baton_request_attempts_total')}"
                    f" / ({rate('baton_request_success_total')} + {rate('baton_request_errors_total')})",
                    "attempts",
                )
            ],
        ),
        latency(
            "Wait in the router",
            "From receipt to the placement of the last attempt.",
            "baton_request_queue_time_seconds",
        ),
        Panel(
            "Requests refused",
            "Requests turned away before a worker had begun them, by reason.",
            "reqps",
            [Query(rate("baton_requests_rejected_total", "reason"), "{{reason}}")],
            stack="normal",
        ),
        Panel(
            "Utilization by role",
            "Work of the last half minute over what the workers of the role can do, by the fitted costs.",
            "percentunit",
            [Query(highest("baton_predicted_utilization", "peer_role"), "{{peer_role}}")],
        ),
        Panel(
            "Role advised",
            "1 where one worker of the other kind should have this role (`baton role`, or router.roles: auto).",
            "bool_on_off",
            [Query(highest("baton_role_advised", "peer_role"), "{{peer_role}}")],
        ),
        Panel(
            "Age of the loop",
            "Since the router's loop last looked at its clock. It also streams the tokens, so this delays every "
            "stream.",
            "s",
            [Query(highest("baton_loop_age_seconds", "name", role="router"), "{{name}}")],
        ),
        Row("Prefix map"),
        Panel(
            "Pages known",
            "Different pages that any process holds, as far as the router knows.",
            "pages",
            [Query(series("baton_prefix_map_pages"), "{{name}}")],
        ),
        Panel(
            "Repairs",
            "Holders whose pages were known wrongly and asked for anew. `gap`: events were lost, as after a restart. "
            "`digest`: they differed without a known loss, which is a mistake of ours.",
            "ops",
            [Query(rate("baton_prefix_map_repairs_total", "found_by"), "{{found_by}}")],
        ),
        Panel(
            "Snapshots and replays not taken",
            "What a follower of KV events asked for and did not read.",
            "ops",
            [Query(rate("baton_kv_event_answers_dropped_total", "name"), "{{name}}")],
        ),
    ],
)

FAULTS = Board(
    "baton-faults",
    "Baton: faults",
    "What died, hung, failed or was lost, and whether requests noticed.",
    [
        Panel(
            "Processes lost",
            "Processes that went, by role and reason. `dead`: the kernel told so. `silent`: no heartbeat. `stuck`: a "
            "step without end. `replaced`: a successor came. `rejected`: it does not fit.",
            "short",
            [Query(f"{rise('baton_peers_lost_total', 'peer_role,reason')} > 0", "{{peer_role}}, {{reason}}")],
        ),
        Panel(
            "Live processes",
            "Live processes by role, as the routers see them.",
            "short",
            [Query(highest("baton_peers", "peer_role"), "{{peer_role}}")],
        ),
        Panel(
            "Restarts",
            "Processes whose start time has changed under the same name.",
            "short",
            [Query(f"sum by (name) (resets({series('process_cpu_seconds_total')}[$__rate_interval]))", "{{name}}")],
        ),
        Panel(
            "Oldest heartbeat",
            "Age of the oldest last heartbeat of live processes. Above cluster.heartbeat_timeout_ms (3 s) a process is "
            "gone.",
            "s",
            [Query(highest("baton_heartbeat_age_seconds", "peer_role"), "{{peer_role}}")],
        ),
        Panel(
            "Age of main loops",
            "Since the main loop of each process last turned. It grows while a step runs.",
            "s",
            [Query(highest("baton_loop_age_seconds", "name"), "{{name}}")],
        ),
        Panel(
            "Not scraped",
            "Processes that Prometheus knows and can't read. 1: it is gone, or unreachable.",
            "bool_on_off",
            [Query(f"1 - {series('up')}", "{{name}}")],
        ),
        Panel(
            "Requests failed",
            "Requests that failed, by reason. `cancelled` ones were given up by their clients.",
            "reqps",
            [Query(rate("baton_request_errors_total", "reason"), "{{reason}}")],
            stack="normal",
        ),
        Panel(
            "Attempts beyond the first",
            "Attempts more than requests that ended, a second: what workers refused, failed, or took with them.",
            "ops",
            [
                Query(
                    f"clamp_min({rate('baton_request_attempts_total')} - {rate('baton_request_success_total')}"
                    f" - {rate('baton_request_errors_total')}, 0)",
                    "attempts",
                )
            ],
        ),
        Panel(
            "Fetches that ended short",
            "Fetches that ended before every page was there: the prefill worker died, or its pages went.",
            "ops",
            [Query(rate("baton_kv_loads_incomplete_total", "name"), "{{name}}")],
        ),
        Row("Pages"),
        Panel(
            "Unproven reservations",
            "Slots that a writer left without proof of its death. They come back when it goes on, or is gone.",
            "pages",
            [Query(total("baton_unproven_reservations", "name"), "{{name}}")],
        ),
        Panel(
            "Expired leases",
            "Leases that their owner did not renew in time.",
            "ops",
            [Query(rate("baton_leases_expired_total", "name"), "{{name}}")],
        ),
        Panel(
            "Damaged pages",
            "Pages whose bytes did not match, by tier, and records of the disk whose writing was cut off.",
            "ops",
            [
                Query(rate("baton_checksum_failures_total", "tier"), "{{tier}}"),
                Query(rate("baton_disk_torn_records_total"), "torn records"),
            ],
        ),
        Panel(
            "Wrong knowledge",
            "Repairs of the prefix map, and digests that a holder had to correct. Digests are mistakes of ours.",
            "ops",
            [
                Query(rate("baton_prefix_map_repairs_total", "found_by"), "repairs, {{found_by}}"),
                Query(rate("baton_kv_event_digests_corrected_total"), "corrected digests"),
            ],
        ),
        Row("Links"),
        Panel(
            "Messages that are none",
            "Frames and requests dropped because they are no message of their link.",
            "ops",
            [Query(rate("baton_malformed_messages_total", "name"), "{{name}}")],
        ),
        Panel(
            "Connections refused",
            "Connections without the cluster's keys, or of another user.",
            "ops",
            [Query(rate("baton_connections_refused_total", "name"), "{{name}}")],
        ),
        Panel(
            "Descriptors in use",
            "Open descriptors over the limit. At 1 no connection is accepted any more.",
            "percentunit",
            [Query(f"{series('process_open_fds')} / {series('process_max_fds')}", "{{name}}")],
            largest=1,
        ),
        Panel(
            "Processor time",
            "Processor seconds that each process takes in a second.",
            "short",
            [Query(rate("process_cpu_seconds_total", "name"), "{{name}}")],
        ),
    ],
)
