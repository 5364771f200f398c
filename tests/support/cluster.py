"""A running cluster, as its router's status tells it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from baton.client import Client, Generated
from baton.messages import LoadReport
from baton.operator_api import Process
from deploy.local import LocalCluster
from tests.support.eventually import DEADLINE


def process(cluster: LocalCluster, name: str) -> Process | None:
    with Client(cluster.address, cluster.operator) as client:
        return next((p for p in client.status(timeout=DEADLINE).processes if p.name == name), None)


@contextmanager
def watching(cluster: LocalCluster, name: str) -> Iterator[Callable[[], bool]]:
    """Whether that process runs something now, asked often: what is watched for may last less than a second."""
    with Client(cluster.address, cluster.operator) as client:
        client.status(timeout=DEADLINE)
        yield lambda: any(p.name == name and p.load.running for p in client.status(timeout=DEADLINE).processes)


def load(cluster: LocalCluster, name: str) -> LoadReport:
    status = process(cluster, name)
    return status.load if status else LoadReport()


def at_rest(cluster: LocalCluster) -> bool:
    """Whether no process runs, waits for or holds anything."""
    with Client(cluster.address, cluster.operator) as client:
        status = client.status(timeout=DEADLINE)
    live = [p for p in status.processes if p.state == "live"]
    loads = [p.load for p in live if p.role != "router"]
    return all(not (x.running or x.waiting) and x.pages_free == x.pages_total for x in loads)


class Streams:
    """Requests in the background, whose tokens can be watched as they come."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._pool = ThreadPoolExecutor(16)
        self.seen: list[list[int]] = []

    def start(self, prompt: Sequence[int], count: int, **more: Any) -> Future[Generated]:
        seen: list[int] = []
        self.seen.append(seen)
        return self._pool.submit(self._run, prompt, seen, {"max_tokens": count, "temperature": 0.0, **more})

    def _run(self, prompt: Sequence[int], seen: list[int], options: Mapping[str, Any]) -> Generated:
        with Client(self._cluster.address) as client:
            stream = client.generate(prompt, ignore_eos=True, timeout=DEADLINE, **options)
            for delta in stream:
                seen += delta.token_ids
            return stream.result()
