"""Give each test that failed a second run, alone: `python .ci/rerun_failed.py`, after `make test` has failed.

A test that passes then is printed as `FLAKY name` and counts as passed. Exit status 1: a test failed twice, too many
tests failed for a second run, or pytest did not get as far as running tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 20  # failed tests: with more, the change is at fault and not the machine
PATIENCE = 900.0  # seconds that one test may take

_ROOT = Path(__file__).parents[1]
_CACHES = _ROOT / ".pytest_cache"  # `make test` has one for the pure tests in it


def main() -> int:
    """Run the failed tests one by one."""
    failed = sorted(name for file in _CACHES.rglob("lastfailed") for name in json.loads(file.read_text()))
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed: no second run")
        return 1
    return max(map(_again, failed))


def _again(name: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", name]
    try:
        passed = subprocess.run(command, cwd=_ROOT, timeout=PATIENCE, check=False).returncode == 0  # noqa: S603
    except subprocess.TimeoutExpired:
        passed = False
    print(f"{'FLAKY' if passed else 'FAILED TWICE'} {name}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
