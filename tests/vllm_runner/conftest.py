"""Fixtures of the tests of vLLM's runner."""

from __future__ import annotations

import pytest
import torch

from engine.vllm_runner.runner import VllmRunner
from tests.support.fork_server import forked_vllm


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_forked() -> None:
    if not torch.cuda.is_available():  # the server imports what vLLM needs on a CPU
        VllmRunner.launch_child = staticmethod(forked_vllm)
