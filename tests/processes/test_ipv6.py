"""A cluster of real processes on IPv6: every link, and pages between two stores."""

import random
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import Client
from deploy.local import LocalCluster, LocalNode
from tests.processes.test_failures import expected
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest
from tests.support.eventually import eventually

_RNG = random.Random(19)
PROMPT = [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(200)]
HOSTS = {"router.host": "[::1]", "api.host": "::1"}  # brackets are accepted


def _unavailable() -> str:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return f"this machine has no IPv6 loopback address: {error.strerror}"
    return ""


pytestmark = pytest.mark.skipif(bool(_unavailable()), reason=_unavailable())


@pytest.fixture
def cluster(path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    settings = workload.settings(path, 1, 1, **HOSTS, **getattr(request, "param", {}))
    nodes = [LocalNode("one", "::1"), LocalNode("two", "[::1]")]
    with LocalCluster(settings, tmp_path, nodes=nodes, placed={"decode-0": "one", "prefill-0": "two"}) as running:
        yield running


def page(address: str, path: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}{path}", timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("cluster", [{}, {"cluster.routers": 2}], indirect=True, ids=["one router", "two routers"])
def test_a_whole_cluster_on_ipv6(cluster: LocalCluster, path: Path) -> None:
    answer = workload.ask(cluster.address, PROMPT, 20)
    assert answer.token_ids == expected(path, PROMPT, 20)
    assert answer.work.pages_fetched > 0, "pages went from the store of node two to that of node one"
    for address in (cluster.addresses.grpc, cluster.addresses.http, cluster.addresses.api):
        assert address.startswith("[::1]:"), cluster.addresses
    assert cluster.addresses.internal.startswith("tcp://[::1]:")
    with Client(cluster.address, cluster.operator) as client:
        status = client.status(timeout=60)
    for process in status.processes:
        assert process.metrics_address.startswith("[::1]:"), process
        assert "baton_" in page(process.metrics_address, "/metrics")
        if process.name != "router-1":  # of the routers, each lists itself alone
            assert process.metrics_address in page(cluster.addresses.http, "/discovery")
    assert "serving" in page(cluster.addresses.http, "/healthz")
    assert '"data"' in page(cluster.addresses.api, "/v1/models")
    assert "<html" in page(cluster.addresses.api, "/dashboard")
    eventually(lambda: at_rest(cluster), what="everything freed")


def test_a_router_on_ipv6_is_found_again_after_its_death(cluster: LocalCluster, path: Path) -> None:
    before = cluster.addresses
    cluster.kill("router")
    cluster.start("router")
    assert cluster.addresses == before
    cluster.wait_live(cluster.pids)
    assert workload.ask(cluster.address, PROMPT, 20).token_ids == expected(path, PROMPT, 20)


def test_an_operator_port_on_ipv6(path: Path, tmp_path: Path) -> None:
    settings = workload.settings(path, 0, 1, **HOSTS, **{"router.operator": "[::1]:0"})
    with LocalCluster(settings, tmp_path) as cluster:
        assert cluster.operator.startswith("[::1]:")
        command = [sys.executable, "-m", "deploy", "drain", "decode-0", "--operator", cluster.operator]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "decode-0 is given nothing new" in done.stdout, done
