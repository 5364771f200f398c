"""Exact tokens from workers whose larger steps run out of GPU memory."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from deploy.local import Child, LocalCluster, launch
from tests.support import scarce_engine, workload

COUNT = 8
FITS = 40  # tokens of a step


def launch_scarce(enter: Sequence[str], argv: Sequence[str], out: BinaryIO, err: BinaryIO) -> Child:
    module, *rest = argv
    return launch(enter, [scarce_engine.__name__ if module == "worker" else module, *rest], out, err)


class ScarceCluster(LocalCluster):
    launch = staticmethod(launch_scarce)


def test_steps_that_do_not_fit_are_made_smaller_and_no_request_notices(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(scarce_engine.TOKENS, str(FITS))
    prompts = [prompt for prompt in workload.prompts() if 100 < len(prompt) < 500][:8]
    expected = workload.references(path, prompts, COUNT)
    with ScarceCluster(workload.settings(path, 1, 1), tmp_path) as cluster:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: workload.ask(cluster.address, prompt, COUNT), prompts))
        workload.compare(path, prompts, answers, expected)
        (log,) = (tmp_path / "logs").glob("prefill-0*.log")
        limits = [int(each) for each in re.findall(r"steps have at most (\d+) tokens from now on", log.read_text())]
    assert limits == sorted(limits, reverse=True)
    assert FITS / 2 <= limits[-1] <= FITS
