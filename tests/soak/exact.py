"""No token differs, in bf16 either, whatever dies: a part of `make soak`.

    .venv/bin/python -m tests.soak.exact [--minutes 20] [--faults 200] [--dtype bfloat16] [--model DIR] [--seed N]

24 prompts are asked for, each greedily, with a seed and repeating itself, in a cluster of 1 prefill and 2 decode
workers and in a colocated one. Decode workers verify every guess of n-grams. Workers and stores are killed and stopped
at random, `--faults` times in all, and three busy loops take the cores. Every stream must have the tokens of a
colocated cluster without proposals that nothing disturbs. Those that differ are counted, and the last one stays in
`wrong.json`. Native kernels must run the model (`engine/cpu/features.py`).
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.soak.deaths import OUTPUT, PROPOSALS, STREAMS, Shape, soak, streams_of
from tests.support import checkpoints
from tests.support.undisturbed import undisturbed

SHAPES = {"1P+2D": Shape(1, 2), "colocated": Shape(0, 1)}
BUSY = 3  # loops


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that do nothing and take a core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.exact")
    parser.add_argument("--minutes", type=float, default=20.0, help="of both shapes together")
    parser.add_argument("--faults", type=int, default=200, help="kills and stops, at least so many in all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", type=Path, help="a checkpoint; default: one of random weights")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="baton-soak-"))
    print(f"seed {options.seed}, all logs are in {folder}", flush=True)
    path: Path = options.model or checkpoints.make("llama", folder / "model")
    streams, settings = streams_of(options.seed), {"model.dtype": options.dtype, **PROPOSALS}
    expected = undisturbed(path, folder / "reference", streams, OUTPUT, **{**settings, "model.speculation": "off"})
    wrong = 0
    with busy(BUSY):
        for name, shape in SHAPES.items():
            seconds, faults = options.minutes * 60 / len(SHAPES), -(-options.faults // len(SHAPES))
            result = soak(
                seconds, options.seed, folder / name, path, expected, shape, STREAMS, faults, settings, count_wrong=True
            )
            print(json.dumps({"shape": name, "dtype": options.dtype, **result}), flush=True)
            wrong += int(str(result["wrong"]))
            assert result["streams"] == len(streams), "some stream was never asked for"
    assert not wrong, f"{wrong} streams had other tokens than undisturbed"


if __name__ == "__main__":
    sys.exit(main())
