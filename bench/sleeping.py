"""A worker whose engine sleeps for as long as a timing model says, and draws the same token each time: real processes,
sockets and copies of many workers on few cores. `bench/agreement.py --sleeping` starts these in place of the real ones.

It is run like `python -m worker`, behind which stands the role.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

from baton.process import main
from engine.engine import Engine, StepOutput
from engine.step.batch import Chunk, Sampled
from simulator import timing
from worker.process import run

TIMING = "BATON_BENCH_TIMING"
"""The environment variable that names the timing model."""


def sleeping(times: timing.StepTimes) -> type[Engine]:
    """An engine that loads a model and never runs it."""

    class SleepingEngine(Engine):
        def run(self, chunks: Sequence[Chunk]) -> StepOutput:
            time.sleep(timing.StepWork.of(chunks).seconds(times))
            return StepOutput([Sampled(1) if chunk.sample else None for chunk in chunks], {})

    return SleepingEngine


if __name__ == "__main__":
    model = timing.read(os.environ[TIMING])
    role = "decode" if sys.argv[1] == "decode" else "prefill"
    with patch("worker.loop.Engine", sleeping(model.decode if role == "decode" else model.prefill)):
        sys.exit(main("worker", partial(run, role), sys.argv[2:]))
