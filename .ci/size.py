"""Count the lines of Python, and fail above the numbers in `.ci/size.toml`: `python .ci/size.py`.

Generated code and other languages are not counted in production, bench, tools and tests. C++, JavaScript, CSS and HTML
have a number of their own. A commit that adds lines raises a number, and says what for. One that removes lines lowers
it.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("baton", "engine", "kvstore", "router", "prefill_worker", "decode_worker", "worker", "simulator", "deploy")
_OTHER = (".cpp", ".h", ".cu", ".js", ".css", ".html")


def main() -> int:
    """Print a table. 1 if a number is exceeded."""
    limits: dict[str, int] = tomllib.loads((_ROOT / ".ci/size.toml").read_text())
    lines = count()
    for name in _PACKAGES:
        print(f"  {name:18}{lines[name]:>8,}")
    lines["production"] = sum(lines[name] for name in _PACKAGES)
    over = [name for name, limit in limits.items() if lines[name] > limit]
    for name, limit in limits.items():
        print(f"{name:20}{lines[name]:>8,}   at most {limit:,}{'   EXCEEDED' if name in over else ''}")
    if over:
        print("Delete lines, or raise the number in .ci/size.toml in a commit that says what it pays for.")
    return int(bool(over))


def count() -> Counter[str]:
    """Return the lines of tracked files by top folder, and those in other languages as "other"."""
    command = ["git", "ls-files", "-z"]
    tracked = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603
    lines: Counter[str] = Counter()
    for name in tracked.split("\0"):
        path, folder = _ROOT / name, name.partition("/")[0]
        counted = folder in {*_PACKAGES, "bench", "tools", "tests"} and path.suffix in {".py", *_OTHER}
        if counted and "_pb2" not in path.name and path.exists():
            lines[folder if path.suffix == ".py" else "other"] += path.read_bytes().count(b"\n")
    return lines


if __name__ == "__main__":
    sys.exit(main())
