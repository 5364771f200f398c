"""An engine for tests of several packages."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engine.engine import Engine

PAGES = 96


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str], Path]) -> Callable[..., Engine]:
    """`engine(name, page_size=16, head=True, copy=0)`: a float32 engine, loaded once a session; pools stay dirty."""

    @cache
    def loaded(name: str, page_size: int = 16, head: bool = True, copy: int = 0) -> Engine:
        return Engine.load(checkpoint(name), "float32", "cpu", PAGES * 16 // page_size, page_size, head, threads=1)

    return loaded
