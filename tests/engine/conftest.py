from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.checkpoints import Reference
from tests.support.checkpoints import reference as load_reference
from tests.support.engine_fixture import engine

__all__ = ["engine"]


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """`reference(name)`: that checkpoint as transformers runs it."""
    return cache(lambda name: load_reference(checkpoint(name)))
