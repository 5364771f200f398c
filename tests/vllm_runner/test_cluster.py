"""Whole clusters whose workers compute with vLLM: tokens are those of transformers, under the death of vLLM, too."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm")

from deploy.local import LocalCluster, launch
from tests import checkpoints
from tests.support import workload
from tests.support.eventually import eventually

SHAPES = {
    "1P+1D": (1, 1, "always"),
    "2P+2D": (2, 2, "auto"),
    "colocated": (0, 1, "auto"),
    "2 colocated": (0, 2, "auto"),
}
PROMPTS = [prompt for prompt in workload.prompts() if len(prompt) <= 1_100][::2]
WIDE = {**checkpoints.WIDE, "head_dim": 64}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[tuple[int, ...], list[int]]:
    return workload.references(path, PROMPTS)


class CommandCluster(LocalCluster):
    """Its processes start as users start them: none is forked with vLLM imported."""

    launch = staticmethod(launch)


def cluster(
    path: Path, shape: str, folder: Path, kind: type[LocalCluster] = LocalCluster, **more: object
) -> LocalCluster:
    prefill, decode, split = SHAPES[shape]
    own = {
        "model.engine": "vllm",
        "pages.page_size": 32,
        "router.disaggregation": split,
        "router.queue_timeout_ms": 300_000,
        "router.attempt_timeout_ms": 300_000,
        **more,
    }
    return kind(workload.settings(path, prefill, decode, **own), folder, patience=200.0)


@pytest.mark.parametrize("shape", ["1P+1D", "2P+2D", "colocated"])
def test_requests_at_once_get_the_reference_tokens(
    shape: str, path: Path, expected: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    with cluster(path, shape, tmp_path) as running:
        answers = workload.ask_all(running.address, PROMPTS)
        workload.compare(path, PROMPTS, answers, expected)
        if SHAPES[shape][2] == "always":
            assert any(answer.work.pages_fetched for answer in answers)
        repeats = workload.ask_all(running.address, PROMPTS[:8])
        workload.compare(path, PROMPTS[:8], repeats, expected)


def test_streams_outlive_the_death_of_vllm(
    path: Path, expected: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    """vLLM's process is killed; its worker ends, and another goes on with the same tokens."""
    with cluster(path, "2 colocated", tmp_path, CommandCluster) as running, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(workload.ask_all, running.address, PROMPTS)
        victim = _child_of(running.pids["decode-0"])
        eventually(lambda: psutil.Process(victim).cpu_times().user > 0, what="vLLM at work")
        os.kill(victim, signal.SIGKILL)
        workload.compare(path, PROMPTS, asked.result(timeout=300), expected)


def _child_of(worker: int) -> int:
    (found,) = [
        child.pid for child in psutil.Process(worker).children() if "engine.vllm_runner.child" in child.cmdline()
    ]
    return found
