"""How long the machine itself stands still: a bare engine in a process of its own, with nothing around it.

    python -m tests.support.standstill MODEL

It takes a decode step every 20 ms until its stdin closes. Then it prints the gaps between its steps that were too long,
as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw

NOTED = 0.1  # seconds: shorter gaps are not kept
_STEP = 0.02  # seconds between two steps


@dataclass(frozen=True)
class Gap:
    """Nothing came from `start` to `end`, on `time.monotonic`."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def overlap(self, other: Gap) -> float:
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


class Machine:
    """The bare engine in a process of its own: the times at which the machine let it wait."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "tests.support.standstill", str(model)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline().strip() == "ready"

    def gaps(self) -> list[Gap]:
        """End it; what it noted."""
        output, _ = self._process.communicate("")
        assert self._process.returncode == 0, "the bare engine failed"
        return [Gap(*gap) for gap in json.loads(output)]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def bare_engine(model: Path) -> None:
    """Take a step every 20 ms until stdin closes; then print every gap that was longer than it had to be."""
    engine = Engine.load(model, "float32", "cpu", 4, 16, head=True, threads=1)
    closed = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), closed.set()), daemon=True).start()
    print("ready", flush=True)
    gaps: list[tuple[float, float]] = []
    last = time.monotonic()
    while not closed.wait(_STEP):
        engine.step([Chunk([5], 0, range(1), TokenDraw(temperature=0))])
        now = time.monotonic()
        if now - last > NOTED:
            gaps.append((last, now))
        last = now
    print(json.dumps(gaps), flush=True)


if __name__ == "__main__":
    bare_engine(Path(sys.argv[1]))
