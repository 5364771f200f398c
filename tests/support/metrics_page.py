"""What the processes of a cluster say of themselves, on their Prometheus pages."""

import http.client
import socket
from collections.abc import Iterable

from prometheus_client.metrics_core import Sample
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import Unavailable
from deploy.local import LocalCluster
from tests.support.cluster import process


class _Connection(http.client.HTTPConnection):
    """To host:port, or to the Unix socket at "unix:path"."""

    def connect(self) -> None:
        path = self.host.removeprefix("unix:")
        if path == self.host:
            super().connect()
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(path)


def page(address: str) -> str:
    """The Prometheus page of the process at that address. Raises OSError."""
    host, port = (address, 80) if address.startswith("unix:") else address.rsplit(":", 1)
    connection = _Connection(host, int(port), timeout=5)
    try:
        connection.request("GET", "/metrics", headers={"Host": "here"})
        return connection.getresponse().read().decode()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from None
    finally:
        connection.close()


def samples(cluster: LocalCluster, name: str) -> list[Sample]:
    """Everything on the page of process `name`; nothing while it does not answer."""
    try:
        status = process(cluster, name)
        return parsed(page(cluster.reach(status.metrics_address))) if status else []
    except (OSError, Unavailable):  # it has just been killed, or started again, or the machine is very busy
        return []


def parsed(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(here: Iterable[Sample], name: str, **labels: str) -> float:
    """A sample, summed over the labels that are not given."""
    return sum(each.value for each in here if each.name == f"baton_{name}" and labels.items() <= each.labels.items())


def metric(cluster: LocalCluster, process: str, name: str, **labels: str) -> float:
    """What that process says now; 0 while it says nothing."""
    return total(samples(cluster, process), name, **labels)


def nothing_held(cluster: LocalCluster, store: str) -> bool:
    """Whether no lease or transfer reads, writes, waits for, loads or sends a page of that store."""
    here = samples(cluster, store)
    used = [total(here, "kv_pages", tier="host", state=state) for state in ("reserved", "held", "loading")]
    used.append(total(here, "kv_pages", tier="remote", state="sending"))
    used += [total(here, "store_pages_awaited"), total(here, "unproven_reservations")]
    return bool(here) and not any(used)
