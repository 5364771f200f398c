"""One machine that plays several nodes: each with a store of its own."""

from pathlib import Path

from deploy.local import LocalCluster
from tests.support import workload


def test_each_node_has_a_store_and_workers_start_where_they_are_told(path: Path, tmp_path: Path) -> None:
    settings = workload.settings(path, 1, 1)
    with LocalCluster(settings, tmp_path, nodes=["a", "b", "c"], placed={"prefill-0": "a", "decode-0": "b"}) as cluster:
        assert nodes(cluster) == {"store-0": "a", "store-1": "b", "prefill-0": "a", "decode-0": "b"}
        cluster.start("prefill-1", node="c")  # which has had no store so far
        cluster.kill("decode-0")
        cluster.start("decode-0", node="a")
        cluster.wait_live(["prefill-1", "decode-0", "store-2"])
        after = {"store-0": "a", "store-1": "b", "store-2": "c", "prefill-0": "a", "prefill-1": "c", "decode-0": "a"}
        assert nodes(cluster) == after
        assert len(workload.ask(cluster.address, list(range(40))).token_ids) == workload.OUTPUT


def nodes(cluster: LocalCluster) -> dict[str, str]:
    status = cluster.wait_live(cluster.pids)
    return {
        process.name: process.node
        for process in status.processes
        if process.name in cluster.pids and process.name != "router"
    }
