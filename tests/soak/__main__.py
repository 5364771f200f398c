"""`make soak`: a cluster of real processes under load, with deaths and stops at random, for as long as you like.

    .venv/bin/python -m tests.soak [--minutes 20] [--families 15] [--kills 50] [--requests 10000] [--hostile 10]
        [--fuzz 10] [--seed N] [--only 'gemma3/*']

Every request must end with the tokens of a cluster that nothing disturbs, whatever died meanwhile, while one decode
worker lives. When the load ends, nothing may be left running or held. Then the same is done for each family of models
on each shape of cluster, with 64 requests at a time. Then stores with disk tiers are killed 50 times, and again in a
cluster of two nodes (see `tests/soak/store_deaths.py`). Then come 10,000 requests of mixed length, colocated and split,
which must leave every pool empty (see `tests/soak/requests.py`). Then come hostile clients, strangers and hung
processes beside honest streams (see `tests/soak/hostile_clients.py`), and last a fuzzer of every socket (`tests/fuzz`).
Prints its seed first, and a line of JSON after each part.

With `BATON_TEST_ENGINE=vllm`, in the environment of `make test-vllm`, vLLM computes. Its own processes are
killed, too. The families that vLLM alone serves join, and so do shapes whose workers have two ranks. `--only` chooses
among families and shapes. A part ends once its time is over and each kind of process has been killed. After a failure
the folder with all logs stays, and its path is printed; `wrong.json` in it has a request with wrong tokens.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.local import LocalCluster
from tests.fuzz.run import fuzz
from tests.soak.deaths import expected_of, families, soak
from tests.soak.hostile_clients import hostile
from tests.soak.requests import requests
from tests.soak.store_deaths import store_deaths
from tests.support import checkpoints
from tests.support.engines import ENGINE
from tests.support.fork_server import forked


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=20.0, help="of deaths and stops of everything")
    parser.add_argument("--families", type=float, default=15.0, help="minutes of the same for every family and shape")
    parser.add_argument("--kills", type=int, default=50, help="of the store, above a disk tier")
    parser.add_argument("--requests", type=int, default=10_000, help="of mixed length, to pools that are too small")
    parser.add_argument("--hostile", type=float, default=10.0, help="minutes of hostile clients and hung processes")
    parser.add_argument("--fuzz", type=float, default=10.0, help="minutes of a fuzzer on every socket")
    parser.add_argument("--only", nargs="+", default=["*"], help="of --families: patterns, such as 'gemma3/*'")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args(argv)
    if ENGINE.name == "vllm":
        LocalCluster.launch = staticmethod(forked)  # else a worker would be down for a quarter of a minute each time
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"seed {options.seed}, commit {commit.stdout.strip()}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="baton-soak-"))
    try:
        path = checkpoints.make("llama", folder / "model")
        if options.minutes:
            expected = expected_of(path, options.seed, folder / "reference")
            result = soak(options.minutes * 60, options.seed, folder / "faults", path, expected)
            print(json.dumps(result), flush=True)
        parts = families(options.families * 60, options.seed, folder / "families", options.only)
        for result in parts if options.families else ():
            print(json.dumps(result), flush=True)
        for nodes in (("a",), ("a", "b")) if options.kills else ():
            result = store_deaths(options.kills, options.seed, folder / f"{len(nodes)}-nodes", path, nodes)
            print(json.dumps(result), flush=True)
        for prefill in (0, 1) if options.requests else ():
            result = requests(options.requests, options.seed, folder / f"requests-{prefill}", prefill, path)
            print(json.dumps(result), flush=True)
        if options.hostile:
            print(json.dumps(hostile(options.hostile * 60, options.seed, folder / "hostile", path)), flush=True)
        if options.fuzz:
            print(json.dumps(fuzz(options.fuzz * 60, options.seed, folder / "fuzz", path)), flush=True)
    except BaseException:
        print(f"all logs are in {folder}", flush=True)
        raise
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
