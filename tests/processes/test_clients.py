"""Clients of other projects that need no environment of their own: the same checks as in `make interop`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop import target
from tests.interop.environment import Environment
from tests.interop.result import SuiteResult
from tests.interop.suites import clients, schemathesis
from tests.interop.target import Target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("interop")
    with target.cluster(target.make_checkpoint(folder / "model"), folder / "cluster") as running:
        yield running


@pytest.fixture
def here(tmp_path: Path) -> Environment:
    """The environment that the tests run in."""
    return Environment(Path(sys.prefix), tmp_path, 240.0)


@pytest.mark.parametrize("script", ["openai_client.py", "anthropic_client.py"])
def test_a_client_finds_its_api(cluster: Target, here: Environment, script: str) -> None:
    result = clients.run_client(script, cluster, here)
    assert result.count("passed") > 8
    assert failed(result) == []


def test_answers_are_as_the_openapi_document_says(cluster: Target, here: Environment) -> None:
    result = schemathesis.run(cluster, here, examples=10)
    assert result.count("passed") > 10
    assert failed(result) == []


def failed(result: SuiteResult) -> list[str]:
    return [f"{case.name}: {case.reason}" for case in result.cases if case.outcome == "failed"]
