"""The death of vLLM's own process beneath a worker. Everything else that holds for a cluster of any engine is tested by
tests/processes, with vLLM as well (`make test-vllm`)."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm")

from deploy.local import LocalCluster, launch
from tests.support import checkpoints, workload
from tests.support.eventually import eventually
from tests.vllm_runner import deaths

PROMPTS = [prompt for prompt in workload.prompts() if len(prompt) <= 1_100][::2]
WIDE = {**checkpoints.WIDE, "head_dim": 64}
SETTINGS = {
    "model.engine": "vllm",
    "pages.page_size": 32,
    "router.disaggregation": "auto",
    "router.queue_timeout_ms": 300_000,
    "router.attempt_timeout_ms": 300_000,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("wide"), **WIDE)


class CommandCluster(LocalCluster):
    """Its processes start as users start them: none is forked with vLLM imported."""

    launch = staticmethod(launch)


def test_streams_outlive_the_death_of_vllm(path: Path, tmp_path: Path) -> None:
    """Its worker ends, and another goes on with the same tokens."""
    expected = workload.references(path, PROMPTS)
    settings = workload.settings(path, 0, 2, **SETTINGS)
    with CommandCluster(settings, tmp_path, patience=200.0) as cluster, ThreadPoolExecutor(1) as pool:
        victim = deaths.pid_of(cluster, "vLLM of decode-0")
        before = psutil.Process(victim).cpu_times().user
        answers = pool.submit(workload.ask_all, cluster.address, PROMPTS)
        eventually(lambda: psutil.Process(victim).cpu_times().user > before, what="vLLM at work")
        os.kill(victim, signal.SIGKILL)
        workload.compare(path, PROMPTS, answers.result(timeout=300), expected)
        eventually(lambda: "decode-0" not in cluster.pids, what="the end of its worker")


def test_a_worker_without_work_ends_with_its_vllm(path: Path, tmp_path: Path) -> None:
    with LocalCluster(workload.settings(path, 0, 1, **SETTINGS), tmp_path) as cluster:
        deaths.kill(cluster, "vLLM of decode-0")
        eventually(lambda: "decode-0" not in cluster.pids, what="the end of its worker")
        assert "this process ends and must be replaced" in (tmp_path / "logs" / "decode-0.log").read_text()
        cluster.start("decode-0")
        cluster.wait_live(["decode-0"])
        assert len(workload.ask(cluster.address, PROMPTS[0]).token_ids) == workload.OUTPUT
