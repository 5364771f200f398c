"""The operator's port of a real router process."""

import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from baton import operator_port
from baton.client import Client
from baton.errors import ConfigError
from deploy.local import LocalCluster
from tests.support import workload
from tests.support.eventually import eventually


def test_the_operators_socket_of_a_router_that_is_killed_and_comes_back(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with LocalCluster(workload.settings(checkpoint("llama"), 0, 1), tmp_path) as cluster:
        (path,) = operator_port.paths([cluster.operator])
        assert path == tmp_path / "run" / "router.sock"
        with Client(operator=cluster.address) as stranger:
            for call in (stranger.status, stranger.pins, lambda: stranger.drain("decode-0"), stranger.requests):
                with pytest.raises(ConfigError, match="does not serve that: the operator's calls are on"):
                    call()
            with pytest.raises(ConfigError, match="does not serve that"):
                stranger.pin_prefix("a")
        with Client(operator=cluster.operator) as operator:
            cluster.kill("router", signal.SIGKILL)
            assert path.exists()  # it could not remove it
            cluster.start("router")
            cluster.wait_live(["decode-0"])
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert operator.status(timeout=30).processes[0].pid == cluster.pids["router"]
        assert len(workload.ask(cluster.address, [5, 6, 7], 4).token_ids) == 4
        cluster.kill("router", signal.SIGTERM)
        eventually(lambda: not path.exists(), what="the socket to go with its router")
