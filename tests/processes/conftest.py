"""A cluster of real processes for the tests of one file, which may replace its checkpoint or the whole cluster."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.local import LocalCluster
from tests.support import workload


@pytest.fixture(scope="session")
def path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(workload.settings(path, 1, 2), tmp_path_factory.mktemp("cluster")) as running:
        yield running
