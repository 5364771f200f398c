"""`bench.engine.gpu` runs to its end without a GPU, so that no minute with one is lost to a mistake in the script."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.engine import gpu
from bench.engine.gpu_device import Device
from bench.report import Result

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_to_its_end_on_a_cpu_and_prints_its_table() -> None:
    command = [sys.executable, "-m", "bench.engine.gpu", "--fake"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    _, _, shown = done.stdout.partition("| part |")
    assert {line.split("|")[1].strip() for line in shown.splitlines()[2:] if line.startswith("|")} == {
        "limits", "imports", "tests", "engine", "profile", "pages", "cluster", "runner", "vllm",
    }  # fmt: skip
    assert "failed:" not in done.stdout
    assert "no figure counts" in done.stdout


def test_a_part_that_fails_is_told_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: Device) -> gpu.Rows:
        yield Result("pages", "the first row", 1.0, "GB/s")
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu, "_pages", broken)
    assert gpu.main(["--fake", "--parts", "pages,limits"]) == 1
    output = capsys.readouterr().out
    assert "| pages | the first row | 1 GB/s |" in output
    assert "| limits | copy, bytes read and written |" in output
    assert "pages failed: RuntimeError: an illegal memory access" in output


def test_a_wrong_result_is_a_failure() -> None:
    rows = [Result("imports", "router.service", 1, "exit status", ok=False)]
    assert "| imports | router.service | 1 exit status |  | **wrong** |" in gpu.table(rows, [], Device("cpu", True))
