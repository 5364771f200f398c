"""`python -m tests.fuzz`: fuzz every socket of a cluster for a while, or make one case again."""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS
from tests.support import checkpoints


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--only", default="", help=f"of {', '.join(TARGETS)}; several with commas")
    parser.add_argument("--case", type=int, default=None, help="make this case alone")
    options = parser.parse_args(argv)
    only = [name for name in options.only.split(",") if name]
    if strange := set(only) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(strange))}; there are {', '.join(TARGETS)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"seed {options.seed}, commit {commit.stdout.strip()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as temporary:
        folder = Path(temporary)
        path = checkpoints.make("llama", folder / "model")
        try:
            result = fuzz(options.seconds, options.seed, folder / "cluster", path, only, options.case)
        except AssertionError as finding:
            sys.exit(f"seed {options.seed}: {finding}")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
