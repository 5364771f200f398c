"""What the processes of a cluster say of themselves, on their Prometheus pages."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from deploy.local import LocalCluster
from tests.processes.test_failures import process


def metric(cluster: LocalCluster, name: str, sample: str, **labels: str) -> float:
    """A sample on the page of process `name`, summed over the labels that are not given; 0 while it says nothing."""
    found = process(cluster, name)
    if found is None:
        return 0.0
    try:
        with urllib.request.urlopen(f"http://{found.metrics_address}/metrics", timeout=5) as page:
            text = page.read().decode()
    except OSError:  # it has just been killed, or started again
        return 0.0
    return sum(
        each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.name == f"baton_{sample}" and labels.items() <= each.labels.items()
    )


def nothing_held(cluster: LocalCluster, store: str) -> bool:
    """Whether that store's slots are free or hold sealed pages that nobody reads, writes, waits for or brings."""
    states = ("reserved", "held", "loading")
    used = [metric(cluster, store, "kv_pages", tier="host", state=state) for state in states]
    used += [metric(cluster, store, "store_waits"), metric(cluster, store, "unproven_reservations")]
    return not any(used) and not metric(cluster, store, "kv_pages", tier="remote", state="sending")
