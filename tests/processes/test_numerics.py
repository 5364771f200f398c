"""Workers whose arithmetic gives other bits: refused by name, or let in where that is wanted."""

from pathlib import Path

import msgspec
import pytest

from baton.client import Client
from baton.config import Config
from deploy.local import LocalCluster
from engine.cpu import build
from tests.support import workload
from tests.support.engines import ENGINE

pytestmark = pytest.mark.skipif(ENGINE.name == "vllm" or not build.can_compile(), reason="no native kernels")


def without_kernels(config: Config) -> Config:
    """The configuration of a node whose workers compute with torch."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, native=False))


def test_a_mixed_cluster_takes_it_and_says_so(path: Path, tmp_path: Path) -> None:
    settings = workload.settings(path, 0, 1, **{"model.numerics": "mixed"})
    with LocalCluster(settings, tmp_path) as cluster:
        cluster.config = without_kernels(cluster.config)
        cluster.start("decode-1")
        status = cluster.wait_live(["decode-1"])
        classes = {each.name: each.numerics for each in status.processes if each.role == "decode"}
        assert {name: numerics.partition("-")[0] for name, numerics in classes.items()} == {
            "decode-0": "native",
            "decode-1": "torch",
        }
        assert status.model.namespace.numerics == "mixed"
        with Client(cluster.address, cluster.operator) as client:
            client.generate([5, 6, 7], max_tokens=2, request_id="mine").result()
            (attempt,) = client.explain("mine").attempts
        assert ["model.numerics is mixed" in note for note in attempt.notes] == [True]
