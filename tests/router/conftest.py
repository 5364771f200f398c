"""A lab and its processes. A process joins the lab when its fixture is made, so in the order of a test's parameters."""

import pytest

from tests.router.lab import Lab


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def decode(lab: Lab) -> str:
    return lab.join("decode", "decode-0")


@pytest.fixture
def prefill(lab: Lab) -> str:
    return lab.join("prefill", "prefill-0")


@pytest.fixture
def store(lab: Lab) -> str:
    return lab.join("store", "store-0")
