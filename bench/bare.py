"""The engine alone: `Engine.step` in a loop, in a process of its own, and nothing else. What a cluster is measured by.

    python -m bench.bare DIRECTORY DTYPE THREADS

For each line of JSON on stdin, `{"prompt": [ids], "count": n}`, one line on stdout: the `n` − 1 gaps between the
tokens, in seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.errors import StartupError
from engine.batch import Chunk, Draw
from engine.engine import Engine

_PAGE_SIZE, _PAGES, _STEP_TOKENS = 16, 512, 512
_GREEDY = Draw(temperature=0)


def generate(engine: Engine, prompt: Sequence[int], count: int) -> list[float]:
    """When each of `count` greedy tokens was there."""
    pages = range(-(-(len(prompt) + count) // _PAGE_SIZE))
    for start in range(0, len(prompt) - 1, _STEP_TOKENS):
        engine.step([Chunk(prompt[start : min(start + _STEP_TOKENS, len(prompt) - 1)], start, pages)])
    token, times = prompt[-1], []
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        (drawn,) = engine.step([Chunk([token], position, pages, _GREEDY)])
        assert drawn is not None
        token = drawn.token
        times.append(time.perf_counter())
    return times


def main() -> None:
    directory, dtype, threads = sys.argv[1:]
    engine = Engine.load(Path(directory), dtype, "cpu", _PAGES, _PAGE_SIZE, head=True, threads=int(threads))
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        times = generate(engine, asked["prompt"], asked["count"])
        print(json.dumps([later - earlier for earlier, later in pairwise(times)]), flush=True)


class BareEngine:
    """The other end of that process, which ends with this object."""

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        command = [sys.executable, "-m", "bench.bare", str(model), dtype, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._answer() != "ready":
            raise StartupError("the bare engine did not start; its reason stands above")

    def gaps(self, prompt: Sequence[int], count: int) -> list[float]:
        """Seconds between `count` tokens generated after `prompt`."""
        assert self._process.stdin is not None
        print(json.dumps({"prompt": list(prompt), "count": count}), file=self._process.stdin, flush=True)
        return json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()  # closes its stdin, which ends it


if __name__ == "__main__":
    main()
