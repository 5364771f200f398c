"""The tiers of every store, from the metrics pages of real processes' code to the screen."""

import io
import socket
import threading
import time

from rich.console import Console

from baton.config import Config
from baton.messages import Peer
from baton.metrics import TABLE, Metrics
from deploy.commands import figures, show, status
from kvstore.disk.index import DiskIndex
from kvstore.server.metrics import metric_samples as figures_of
from kvstore.server.state import StoreState


def store_metrics() -> Metrics:
    """The page of a store that has just started."""
    config = Config()
    me = Peer("store", "store-0", "here", "store-0-1", 1)
    metrics = Metrics()
    metrics.publish(figures_of(StoreState(me, config.store, DiskIndex(config.disk), 2, 0.25, 3.0).stats(0.0)))
    return metrics


def worker_metrics(regret: float) -> Metrics:
    metrics = Metrics()
    metrics.publish({"load_regret_seconds": {("disk",): regret}})
    return metrics


def test_every_figure_that_is_shown_is_one_that_stores_publish():
    page = figures.parse(store_metrics().text().decode())
    columns = figures.of_store(page, [])
    assert set(columns["tiers"]) == {"host", "disk", "remote"}
    names = {"pages", "bytes", "hits", "evictions", "checksum_failures", "regret_seconds"}
    assert names <= set(columns["tiers"]["host"])
    assert names | {"loads", "load_seconds"} <= set(columns["tiers"]["disk"])
    assert {"hits", "loads", "load_seconds", "checksum_failures"} <= set(columns["tiers"]["remote"])
    assert columns["oldest_lease_seconds"] == columns["unproven_reservations"] == columns["pinned_bytes"] == 0
    assert columns["disk_up"] is False


def test_what_stores_publish_stands_in_the_table_with_its_labels():
    config = Config()
    me = Peer("store", "store-0", "here", "store-0-1", 1)
    published = figures_of(StoreState(me, config.store, DiskIndex(config.disk), 2, 0.25, 3.0).stats(0.0))
    for name, sample in published.items():
        labels = {len(values) for values in sample} if isinstance(sample, dict) else {0}
        assert labels == {len(TABLE[name].labels)}, name


def test_regret_is_found_out_by_the_workers_of_the_node():
    store = figures.parse(store_metrics().text().decode())
    workers = [figures.parse(worker_metrics(regret).text().decode()) for regret in (1.5, 0.25)]
    assert figures.of_store(store, workers)["tiers"]["disk"]["regret_seconds"] == 1.75


def test_pages_are_read_at_once_and_without_those_that_do_not_answer():
    """One answers, one refuses, six are silent, one says nonsense."""
    metrics = store_metrics()
    good = metrics.serve("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0), backlog=9) as silent, socket.create_server(("127.0.0.1", 0)) as mad:

        def babble() -> None:
            connection, _ = mad.accept()
            with connection:
                connection.recv(1_000)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nbaton_x{ 1 2 3\n")

        threading.Thread(target=babble, daemon=True).start()
        addresses = {"good": good, "refuses": "127.0.0.1:1"}
        addresses |= {name: f"127.0.0.1:{s.getsockname()[1]}" for name, s in (("mad", mad),)}
        addresses |= {f"silent-{number}": f"127.0.0.1:{silent.getsockname()[1]}" for number in range(6)}
        began = time.monotonic()
        pages = figures.scrape(addresses)
        assert time.monotonic() - began < 3 * figures.PATIENCE
    metrics.close()
    assert set(pages) == {"good"}
    assert figures.scrape({}) == {}


def test_stores_show_their_tiers_where_they_can_be_asked():
    metrics, worker = store_metrics(), worker_metrics(0.5)
    rows = [
        {"name": "store-0", "role": "store", "node": "a", "state": "live", "metrics": metrics.serve("127.0.0.1")},
        {"name": "store-1", "role": "store", "node": "b", "state": "live"},  # known to the supervisor only
        {"name": "store-2", "role": "store", "node": "c", "state": "silent", "metrics": "127.0.0.1:1"},
        {"name": "decode-0", "role": "decode", "node": "a", "state": "live", "metrics": worker.serve("127.0.0.1")},
        {"name": "router", "role": "router", "node": "a", "state": "live", "metrics": "127.0.0.1:1"},
    ]
    shown = status._with_tiers(rows)
    metrics.close()
    worker.close()
    assert [row["name"] for row in shown if "tiers" in row] == ["store-0"]
    assert shown[0]["tiers"]["disk"]["regret_seconds"] == 0.5


def test_the_tiers_on_the_screen():
    tiers = {
        "host": {"pages": 120.0, "bytes": 120 * 2**20, "hits": 50.0, "evictions": 7.0, "regret_seconds": 0.0},
        "disk": {
            "pages": 900.0, "bytes": 2 * 2**30, "hits": 40.0, "loads": 40.0, "load_seconds": 0.1,
            "regret_seconds": 1.25, "checksum_failures": 1.0,
        },
        "remote": {"hits": 0.0, "loads": 0.0, "load_seconds": 0.0, "regret_seconds": 0.0},
    }  # fmt: skip
    store = {"name": "store-0", "tiers": tiers, "disk_up": True, "oldest_lease_seconds": 12.0, "pinned_bytes": 2**22}
    console = Console(file=io.StringIO(), width=100, highlight=False)
    show._tiers(console, [store | {"unproven_reservations": 3.0}])
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    disk = next(line for line in shown.splitlines() if "disk" in line).split()
    assert disk == ["disk", "900", "2.0", "GiB", "40", "40", "2.5", "1.25", "s"]
    assert "store-0: 1 pages found damaged on disk" in shown
    assert "oldest lease 12 s" in shown
    assert "4.0 MiB pinned" in shown
    assert "3 slots reserved by writers that may still write" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
