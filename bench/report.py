"""How every script here says what it measured: one JSON object per line and result on stdout; all else on stderr."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeAlias

Better: TypeAlias = Literal["low", "high"]

_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Result:
    """One figure. What does not apply is None and left out of the line.

    `limit` was measured in the same run, and `ratio` is value / limit; `runs` are the values that `value` is the
    median of.
    """

    bench: str
    case: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    target: float | None = None
    ok: bool | None = None
    runs: tuple[float, ...] | None = None

    def line(self) -> str:
        fields = {key: _short(value) for key, value in asdict(self).items() if value is not None}
        return json.dumps(fields, allow_nan=False)


def median_of(bench: str, case: str, unit: str, runs: Sequence[float]) -> Result:
    """The median of one figure over several runs."""
    return Result(bench, case, statistics.median(runs), unit, runs=tuple(runs) if len(runs) > 1 else None)


def beside(bench: str, case: str, unit: str, runs: Sequence[float], limits: Sequence[float]) -> Result:
    """The median of one figure beside that of its limit, which took turns with it.

    `ratio` is the median of the runs' own: what disturbs a run disturbs its limit as well.
    """
    ratio = statistics.median(run / limit for run, limit in zip(runs, limits, strict=True))
    return replace(median_of(bench, case, unit, runs), limit=statistics.median(limits), ratio=ratio)


def judged(result: Result, target: float, better: Better) -> Result:
    """The result, which has a ratio: `ok` when that is on the better side of the target."""
    assert result.ratio is not None
    return replace(result, target=target, ok=result.ratio <= target if better == "low" else result.ratio >= target)


def emit(result: Result) -> None:
    print(result.line(), flush=True)


def say(text: str) -> None:
    """Print progress to stderr: stdout carries results only."""
    print(text, file=sys.stderr, flush=True)


def machine() -> str:
    """Return the machine's properties on which a figure depends."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "grpcio", "pyzmq"))
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return f"commit {commit()}, {cores} cores, load {load:.1f}, Python {platform.python_version()}, {versions}"


def commit() -> str:
    """Return the commit that is measured, with "-dirty" where files differ from it."""
    try:
        process = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return process.stdout.strip()


def _short(value: object) -> object:
    """Five significant digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, tuple):
        return [_short(one) for one in value]
    return value
