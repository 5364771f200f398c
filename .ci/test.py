"""Run the tests: `make test`, or those of some folders: `make test P=tests/kvstore`.

Tests of processes wait more than they compute, so they run in more test workers than there are cores. Tests marked
`alone`, of a whole Ray or of the gaps in a stream, then run one by one. The pure tests take the time that these leave
idle.

A test that fails runs once more, alone, after all others. If it passes then, it is printed as `FLAKY name` and counts
as passed. Exit status 0: every test has passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MOST = 20  # failed tests that run again: with more, the change is at fault and not the machine
PATIENCE = 900.0  # seconds for a test that runs again
FETCH = "120"  # seconds for what is optional

_CACHE = Path(".pytest_cache")
_PYTEST = [sys.executable, "-m", "pytest"]
_RAN = (0, 1, 5)  # exit statuses of pytest: all passed, some failed, none was selected


class Lane:
    """One run of pytest, with a cache of its own."""

    def __init__(self, name: str, *arguments: str, hidden: bool = False) -> None:
        """Start it. A `hidden` one has the lowest priority, and its output is printed at its end."""
        self._cache = _CACHE / name
        shutil.rmtree(self._cache, ignore_errors=True)
        self._cache.mkdir(parents=True)
        self._log = self._cache / "log" if hidden else None
        command = [*(["nice", "-n", "19"] if hidden else []), *_PYTEST, "-o", f"cache_dir={self._cache}", *arguments]
        with self._log.open("w") if self._log else contextlib.nullcontext() as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)  # noqa: S603

    def wait(self) -> bool:
        """Wait for its end. Return whether pytest got as far as running its tests."""
        status = self._process.wait()
        if self._log:
            print(self._log.read_text(), end="", flush=True)
        return status in _RAN

    def failed(self) -> list[str]:
        """Return the names of its tests that failed."""
        return [name for file in self._cache.rglob("lastfailed") for name in json.loads(file.read_text())]


def main() -> int:
    """Run what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders of tests; all, if there are none")
    parser.add_argument("--jobs", default="4", help="test workers of the tests of processes; 0: all tests one by one")
    parser.add_argument("--pure", nargs="*", default=[], help="folders of pure tests, where all tests run")
    options = parser.parse_args()
    try:
        lanes, ran = _run(options.jobs, options.paths, options.pure)
    except KeyboardInterrupt:  # the runs of pytest got it, too
        return 130
    failed = sorted({name for lane in lanes for name in lane.failed()})
    if not ran or len(failed) > MOST:
        print(f"{len(failed)} tests failed, and pytest {'ran' if ran else 'did not run'} all: none runs again")
        return 1
    return max(map(_again, failed), default=0)


def _run(jobs: str, paths: Sequence[str], pure: Sequence[str]) -> tuple[list[Lane], bool]:
    """Run all lanes. Return them, and whether each ran its tests."""
    if jobs == "0":
        lane = Lane("all", *paths)
        return [lane], lane.wait()
    if not paths:
        _fetch_prometheus()
    others = paths or [f"--ignore={folder}" for folder in pure]
    crowd = Lane("crowd", "-n", jobs, "--dist", "worksteal", "-m", "not alone", *others)
    ran = [crowd.wait()]
    rest = [Lane("alone", "-m", "alone", *paths)]
    if pure and not paths:
        rest.append(Lane("pure", "-n", "2", "--dist", "worksteal", *pure, hidden=True))
    ran += [lane.wait() for lane in rest]
    return [crowd, *rest], all(ran)


def _fetch_prometheus() -> None:
    if subprocess.run(["timeout", FETCH, "make", "prometheus"], check=False).returncode:  # noqa: S603, S607
        print("no Prometheus can be fetched: the tests that need it are skipped", flush=True)


def _again(name: str) -> int:
    """Run a test once more, alone. Return 0 if it passes."""
    try:
        status = subprocess.run([*_PYTEST, "-q", "-p", "no:cacheprovider", name], timeout=PATIENCE, check=False)  # noqa: S603
        passed = status.returncode == 0
    except subprocess.TimeoutExpired:
        passed = False
    print(f"{'FLAKY' if passed else 'FAILED TWICE'} {name}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
