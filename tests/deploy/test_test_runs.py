"""`make test` is `.ci/test.py`: each failed test runs once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "test.py"
_FLAKY = """
import pathlib
def test_flaky():
    ran = pathlib.Path("ran")
    before, _ = ran.exists(), ran.touch()
    assert before
def test_right(): pass
"""
_ALONE = "import pytest\n@pytest.mark.alone\ndef test_alone(): pass\n"
_WRONG = "def test_wrong(): assert False\n"
_BROKEN = "import no_such_module\n"


def run(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a folder with these files of tests."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_test_that_passes_the_second_time_is_flaky_and_counts_as_passed(tmp_path: Path):
    done = run(tmp_path, "--jobs", "2", ".", flaky=_FLAKY, alone=_ALONE)
    assert "FLAKY test_flaky.py::test_flaky" in done.stdout
    assert done.stdout.count("FLAKY") == 1
    assert done.returncode == 0, done


@pytest.mark.parametrize(("jobs", "folder"), [("2", "."), ("0", "test_wrong.py")])
def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path, jobs: str, folder: str):
    done = run(tmp_path, "--jobs", jobs, folder, flaky=_FLAKY, wrong=_WRONG)
    assert "FAILED TWICE test_wrong.py::test_wrong" in done.stdout
    assert ("FLAKY test_flaky.py::test_flaky" in done.stdout) == (folder == ".")
    assert done.returncode == 1


def test_nothing_runs_again_where_pytest_could_not_run_all(tmp_path: Path):
    done = run(tmp_path, "--jobs", "2", ".", broken=_BROKEN, wrong=_WRONG)
    assert done.returncode == 1
    assert "none runs again" in done.stdout
    assert "TWICE" not in done.stdout


def test_what_optional_tests_need_is_fetched_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "made $*"\n')
    make.chmod(0o755)
    monkeypatch.setenv("PATH", str(make.parent), prepend=os.pathsep)
    assert "made prometheus" in run(tmp_path, "--jobs", "1", alone=_ALONE).stdout
