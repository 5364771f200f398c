"""Dashboards about pages: the hand-off from prefill to decode, and the tiers that keep pages."""

from __future__ import annotations

from deploy.grafana.board import Board, Panel, Query, Row
from deploy.grafana.boards.common import REUSE, latency
from deploy.grafana.promql import highest, rate, series, total

HANDOFF = Board(
    "baton-handoff",
    "Baton: hand-off",
    "Do the pages of a prompt come to its decode worker, how quickly, and what fails on the way?",
    [
        latency(
            "Hand-off time",
            "From the router's news that a prompt is computed to its pages at the decode worker. Pages are copied "
            "while the prompt is computed, so this is what is left at its end.",
            "baton_handoff_seconds",
        ),
        Panel(
            "Hand-off bytes",
            "Bytes of pages that decode workers fetched for requests with a prefill worker.",
            "Bps",
            [Query(rate("baton_handoff_bytes_total"), "bytes")],
        ),
        Panel(
            "Split and local requests",
            "Placements with a prefill worker, and placements where the decode worker computes the prompt.",
            "ops",
            [Query(rate("baton_placements_total", "kind"), "{{kind}}")],
            stack="normal",
        ),
        Panel(
            "Copied between device and arena",
            "Bytes that workers copy out of their devices, and into them.",
            "Bps",
            [Query(rate("baton_bytes_copied_total", "name,direction"), "{{name}}, {{direction}}")],
        ),
        Panel(
            "Fetches that ended short",
            "Fetches of decode workers that ended before every page was there. The request makes a new attempt or "
            "computes the rest.",
            "ops",
            [Query(rate("baton_kv_loads_incomplete_total", "name"), "{{name}}")],
        ),
        Panel(
            "Write-throughs refused",
            "Pages that a decode worker wanted to keep in the arena, and the store had no room for.",
            "ops",
            [Query(rate("baton_write_through_refused_total", "name"), "{{name}}")],
        ),
        Panel(
            "Pages awaited",
            "Pages that workers wait for at each store at this moment.",
            "pages",
            [Query(total("baton_store_pages_awaited", "name"), "{{name}}")],
        ),
        Panel(
            "Calls of workers",
            "Calls from workers to stores, by kind.",
            "ops",
            [Query(rate("baton_store_calls_total", "call"), "{{call}}")],
        ),
        Panel(
            "Leases",
            "Age of the oldest lease that holds pages, by store. Running requests renew theirs; a lease that outlives "
            "all requests keeps pages for nothing.",
            "s",
            [Query(highest("baton_oldest_lease_seconds", "name"), "{{name}}")],
        ),
        Row("Between nodes"),
        Panel(
            "Pages sent to other stores",
            "Pages that each store sends to the stores of other nodes.",
            "pages/s",
            [Query(rate("baton_pages_sent_total", "name"), "{{name}}")],
        ),
        Panel(
            "Links between stores",
            "Other stores that are connected.",
            "short",
            [Query(total("baton_peer_links", "name"), "{{name}}")],
        ),
        Panel(
            "Messages and pages lost between stores",
            "Messages between stores that were not sent, and pages that came when no worker waited for them any more. "
            "Both are asked for again.",
            "ops",
            [
                Query(rate("baton_peer_messages_dropped_total", "name"), "{{name}}, messages"),
                Query(rate("baton_pages_unexpected_total", "name"), "{{name}}, pages"),
            ],
        ),
    ],
)

_FOUND = rate("baton_tier_hits_total", "name", tier="host")
_LOADING = rate("baton_tier_load_seconds_total", "tier", tier="~disk|remote")
_LOADS = rate("baton_tier_loads_total", "tier", tier="~disk|remote")

TIERS = Board(
    "baton-tiers",
    "Baton: KV tiers",
    "Where pages are kept, what each tier wins, and what it costs where loading was slower than computing.",
    [
        REUSE,
        Panel(
            "Hits by tier",
            "Pages that a store found when a worker asked, by tier. `disk` and `remote` pages are brought up to the "
            "host.",
            "pages/s",
            [Query(rate("baton_tier_hits_total", "tier"), "{{tier}}")],
            stack="normal",
        ),
        Panel(
            "Hit rate of the arenas",
            "Pages found in the arena, of all pages that workers asked their store for.",
            "percentunit",
            [Query(f"{_FOUND} / ({_FOUND} + {rate('baton_store_misses_total', 'name')})", "{{name}}")],
            largest=1,
        ),
        Panel(
            "Regret",
            "Seconds lost in each second to loads that were slower than computing the same pages. It should stay near "
            "0: each load is chosen by measured speeds.",
            "short",
            [Query(rate("baton_load_regret_seconds_total", "tier"), "{{tier}}")],
        ),
        Panel(
            "Loads",
            "Pages brought up from a lower tier, and pages that should have come and did not.",
            "pages/s",
            [Query(_LOADS, "{{tier}}"), Query(rate("baton_tier_loads_failed_total"), "failed")],
        ),
        Panel(
            "Mean time of a load",
            "From asking for a page to its arrival in the arena.",
            "s",
            [Query(f"{_LOADING} / {_LOADS}", "{{tier}}")],
        ),
        Panel(
            "Pages of the arenas",
            "Slots by state. `held` ones are sealed too and can't be evicted now; `reserved` ones are being written.",
            "pages",
            [Query(total("baton_kv_pages", "state", tier="host"), "{{state}}")],
        ),
        Panel(
            "Bytes by tier",
            "Bytes that pages take in the arenas and on the disks.",
            "bytes",
            [Query(total("baton_tier_bytes", "tier"), "{{tier}}")],
        ),
        Panel(
            "Evictions",
            "Pages that had to make room, by tier. A page of the host may still be on the disk.",
            "pages/s",
            [Query(rate("baton_page_evictions_total", "tier"), "{{tier}}")],
        ),
        Row("Faults"),
        Panel(
            "Checksum failures",
            "Pages whose bytes did not match: dropped, and made again. Not zero: look at that node's memory, disk or "
            "link.",
            "pages/s",
            [Query(rate("baton_checksum_failures_total", "node,tier"), "{{node}}, {{tier}}")],
        ),
        Panel(
            "Disk tier works",
            "1 while the disk tier of a store works; 0 without one, and once it has failed.",
            "bool_on_off",
            [Query(series("baton_disk_up"), "{{name}}")],
        ),
        Panel(
            "Not written to disk",
            "Pages not written: no room, no time, or the disk has failed.",
            "pages/s",
            [Query(rate("baton_disk_writes_dropped_total", "name"), "{{name}}")],
        ),
    ],
)
