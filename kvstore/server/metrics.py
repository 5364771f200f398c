"""A store's statistics as Prometheus reads them. Pure: what is counted, and what it means, is the state's to say."""

from collections.abc import Mapping

from baton.samples import Sample
from kvstore.server.events import StoreStats

HOST, DISK, REMOTE = ("host",), ("disk",), ("remote",)


def metric_samples(stats: StoreStats) -> Mapping[str, Sample]:
    """Every metric that `stats` tells of. A store without a disk tier, and without other stores, shows zeros there."""
    loads, disk = stats.loads, stats.disk
    return {
        "kv_cache_usage_perc": {HOST: (stats.slots - stats.free - stats.evictable) / max(1, stats.slots)},
        "kv_pages": {
            ("host", "free"): stats.free,
            ("host", "sealed"): stats.sealed,
            ("host", "reserved"): stats.reserved,
            ("host", "held"): stats.held,
            ("host", "loading"): loads.loading,
            ("disk", "sealed"): disk.pages,
            ("disk", "writing"): disk.writing,
            ("remote", "sending"): stats.serving.sending,
        },
        "tier_bytes": {HOST: (stats.slots - stats.free) * stats.page_bytes, DISK: disk.bytes},
        "tier_hits": {HOST: stats.hits, DISK: loads.disk_pages, REMOTE: loads.remote_pages},
        "tier_loads": {DISK: loads.disk_pages, REMOTE: loads.remote_pages},
        "tier_load_seconds": {DISK: loads.disk_seconds, REMOTE: loads.remote_seconds},
        "tier_loads_failed": loads.failed,
        "page_evictions": {HOST: stats.evictions, DISK: disk.evictions},
        "checksum_failures": {HOST: stats.corrupt, DISK: disk.corrupt, REMOTE: loads.damaged},
        "pages_sent": stats.serving.sent_pages,
        "disk_up": float(disk.state == "on"),
        "disk_writes_dropped": disk.dropped_writes,
        "disk_torn_records": disk.torn,
        "store_misses": stats.misses,
        "store_pages_awaited": stats.waits,
        "unproven_reservations": stats.unproven,
        "oldest_lease_seconds": stats.oldest_hold,
        "leases_expired": stats.expired,
        "pinned_bytes": stats.pinned_bytes,
    }
