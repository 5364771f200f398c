"""Fixtures that more than one folder of tests uses."""

import asyncio
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from baton.wire import use_keys
from deploy.local import LocalCluster
from tests.support.cluster_keys import KEYS
from tests.support.engines import ENGINE
from tests.support.fork_server import forked

# Machines are shared and noisy: how long an example takes says nothing about the code.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("baton"))  # see tests/support/thorough.py
settings.register_profile("fast", settings.get_profile("baton"), max_examples=25)
settings.load_profile("baton")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of our own engine where another one is under test."""
    if ENGINE.name != "native":
        native = [item for item in items if item.get_closest_marker("native")]
        config.hook.pytest_deselected(items=native)
        items[:] = [item for item in items if item not in native]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine. At its deadline the traceback shows what it waited for."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**fixtures), 150))
    return True


@pytest.fixture(autouse=True)
def _keys() -> None:
    """Sockets of this process speak with the tests' keys, whichever the last test used."""
    use_keys(KEYS)


@pytest.fixture(scope="session", autouse=True)
def _processes_of_clusters_are_forked() -> None:
    LocalCluster.launch = staticmethod(forked)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(name)`: the directory of that kind of checkpoint (see tests/support/checkpoints.py), made once a
    session; `checkpoint("wide-" + name)` is the wider kind that whole clusters are compared with."""

    @cache
    def make(name: str) -> Path:
        from tests.support import checkpoints  # transformers takes seconds to import, and most tests need none of it

        wide = checkpoints.WIDE if name.startswith("wide-") else {}
        return checkpoints.make(name.removeprefix("wide-"), tmp_path_factory.mktemp(name), **wide)

    return make
