"""`python -m worker`, on a device that flips one bit of the first prompt's third page, after that has been computed."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import cast
from unittest.mock import patch

from baton.messages import WorkerRole
from baton.process import main
from engine.engine import Engine, StepOutput
from engine.step.batch import Chunk
from worker.process import run

LENGTH = 211  # tokens of the prompt, the last of which is the decode worker's


class FlippingEngine(Engine):
    """Once."""

    flipped = False

    def run(self, chunks: Sequence[Chunk]) -> StepOutput:
        output = super().run(chunks)
        for chunk in chunks:
            if chunk.end == LENGTH - 1 and not self.flipped:
                self.pages.view(chunk.pages[2])[77] ^= 4
                self.flipped = True
        return output


if __name__ == "__main__":
    role = cast(WorkerRole, sys.argv[1])
    with patch("worker.load_runner.Engine", FlippingEngine):
        sys.exit(main(f"worker {role}", partial(run, role), sys.argv[2:]))
