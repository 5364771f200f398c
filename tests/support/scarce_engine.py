"""`python -m worker`, on a device with little memory: a step of more than SCARCE_TOKENS tokens does not fit.

Stands in for a GPU, on a CPU. What such a step has written into its pages stays there.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from baton.messages import WorkerRole
from baton.process import main
from engine.engine import Engine
from engine.step.batch import Chunk
from worker.process import run as run_worker

TOKENS = "SCARCE_TOKENS"


def make_scarce(most: int) -> None:
    """Let every step of more tokens run out of memory from now on, once it has been computed."""
    run = Engine.run

    def scarce(engine: Engine, chunks: Sequence[Chunk], *more: Any, **named: Any) -> Any:
        output = run(engine, chunks, *more, **named)
        if sum(len(chunk.tokens) for chunk in chunks) > most:
            raise torch.OutOfMemoryError("CUDA out of memory, says a test")
        return output

    Engine.run = scarce  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    make_scarce(int(os.environ[TOKENS]))
    role = cast(WorkerRole, sys.argv[1])
    sys.exit(main(f"worker {role}", partial(run_worker, role), sys.argv[2:]))
