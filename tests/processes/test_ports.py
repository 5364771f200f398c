"""A router that is started again while another program's connection holds one of its ports."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.local import LocalCluster
from tests.support import workload
from tests.support.eventually import DEADLINE, eventually
from tests.support.outgoing import outgoing


@pytest.mark.parametrize("port", ["api", "http"])
def test_a_restarted_router_waits_for_its_port(path: Path, tmp_path: Path, port: str) -> None:
    with LocalCluster(workload.settings(path, 0, 1), tmp_path) as cluster:
        before = cluster.addresses
        cluster.kill("router")
        number = int(getattr(before, port).rpartition(":")[2])
        with outgoing(number) as connection, ThreadPoolExecutor(1) as starter:
            starting = starter.submit(cluster.start, "router")
            log = cluster.config.cluster.logs / "router.log"
            eventually(lambda: f"waiting for 127.0.0.1:{number}" in log.read_text(), what="the router waits")
            connection.reset()
            starting.result(DEADLINE)
        assert cluster.addresses == before
        cluster.wait_live(cluster.pids)
        assert len(workload.ask(cluster.address, [5, 6, 7], 4).token_ids) == 4
