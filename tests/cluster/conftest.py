"""A fresh machine for each test; skipped, with the reason, where the kernel does not let us have one."""

from collections.abc import Iterator
from functools import cache

import pytest

from engine.cpu import build
from tests.cluster.machine import Machine, unavailable

_unavailable = cache(unavailable)


@pytest.fixture
def machine() -> Iterator[Machine]:
    if reason := _unavailable():
        pytest.skip(reason)
    build.library()  # compiled here, not while a cluster is timed
    with Machine() as made:
        made.make_model()
        yield made
