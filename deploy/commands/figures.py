"""Read the metrics pages of processes and extract the figures of every store's tiers.

All pages are requested at once, with a timeout of `PATIENCE`. A process that does not answer in time shows no figures.
"""

import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PATIENCE = 1.0  # seconds, for one page
TIERS = ("host", "disk", "remote")
_MAX_PAGE = 4 * 2**20  # bytes
_PREFIX = "baton_"
_BY_TIER = {  # shown name → metric
    "bytes": "tier_bytes",
    "hits": "tier_hits_total",
    "loads": "tier_loads_total",
    "load_seconds": "tier_load_seconds_total",
    "evictions": "page_evictions_total",
    "checksum_failures": "checksum_failures_total",
}
_OF_STORE = ("unproven_reservations", "oldest_lease_seconds", "pinned_bytes")

# (name without its prefix, values of its labels in the order of their names) → number
Page = Mapping[tuple[str, tuple[str, ...]], float]


def scrape(addresses: Mapping[str, str]) -> dict[str, Page]:
    """Return the metrics pages of these processes (name → host:port), without unreadable ones."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(min(32, len(addresses))) as pool:
        pages = dict(zip(addresses, pool.map(_read, addresses.values()), strict=True))
    return {name: page for name, page in pages.items() if page is not None}


def of_store(page: Page, workers: Sequence[Page]) -> dict[str, Any]:
    """Return the figures of one store as plain data. `workers` are the metrics pages of its node's workers.

    The workers measure regret: the seconds by which a load was slower than computing the pages.
    """
    tiers: dict[str, dict[str, float]] = {}
    for tier in TIERS:
        figures = {shown: page[name, (tier,)] for shown, name in _BY_TIER.items() if (name, (tier,)) in page}
        if ("kv_pages", ("sealed", tier)) in page:
            figures["pages"] = page["kv_pages", ("sealed", tier)]
        figures["regret_seconds"] = sum(worker.get(("load_regret_seconds_total", (tier,)), 0.0) for worker in workers)
        tiers[tier] = figures
    columns: dict[str, Any] = {"tiers": tiers, "disk_up": bool(page.get(("disk_up", ()), 0.0))}
    return columns | {name: page[name, ()] for name in _OF_STORE if (name, ()) in page}


def parse(text: str) -> Page:
    """Parse a metrics page. Raises ValueError if the text is not one."""
    return {
        (sample.name.removeprefix(_PREFIX), tuple(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith(_PREFIX)
        for sample in family.samples
    }


def _read(address: str) -> Page | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    try:
        with opener.open(f"http://{address}/metrics", timeout=PATIENCE) as answer:
            return parse(answer.read(_MAX_PAGE).decode())
    except (OSError, ValueError):  # urllib's own errors are OSErrors
        return None
