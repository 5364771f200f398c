"""Fixtures of the tests of vLLM's runner."""

from __future__ import annotations

import pytest

from engine.vllm_runner.runner import VllmRunner
from tests.support.fork_server import forked_vllm


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_forked() -> None:
    VllmRunner.launch_child = staticmethod(forked_vllm)
