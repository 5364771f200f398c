"""`make soak`: a cluster of real processes under load, with deaths and stops at random, for as long as you like.

    .venv/bin/python -m tests.soak [--minutes 20] [--kills 50] [--requests 10000] [--hostile 10] [--fuzz 10] [--seed N]

Every request must end with the reference's tokens, whatever died meanwhile, while one decode worker lives; and when
the load ends, nothing may be left running or held. Then stores with disk tiers are killed 50 times, and again in a
cluster of two nodes (see `tests/store_deaths.py`). Then come 10,000 requests of mixed length, colocated and split,
which must leave every pool empty (see `tests/soak_requests.py`). Then come hostile clients, strangers and hung
processes beside honest streams (see `tests/soak_hostile.py`), and last a fuzzer of every socket (`tests/fuzz`). Prints
its seed first, and a line of JSON after each part.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from baton.client import Client, Generated
from deploy.local import LocalCluster
from tests import checkpoints
from tests.fuzz.run import fuzz
from tests.soak_hostile import hostile
from tests.soak_requests import requests
from tests.store_deaths import store_deaths
from tests.support import workload
from tests.support.cluster import at_rest
from tests.support.eventually import eventually

STREAMS = 6
BETWEEN_FAULTS = (0.5, 4.0)  # seconds


class Chaos:
    """Kills, stops and restarts processes, always leaving one decode worker that runs."""

    def __init__(self, cluster: LocalCluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._stopped: dict[str, float] = {}  # name → when to wake it
        self.faults: Counter[str] = Counter()

    def act(self, now: float) -> None:
        for name in [name for name, wake in self._stopped.items() if wake <= now]:
            del self._stopped[name]
            self._cluster.kill(name, signal.SIGCONT)
        victim = self._rng.choice(["store-0", "prefill-0", "prefill-1", "decode-0", "decode-1"])
        if victim in self._stopped:
            return
        other = {"decode-0": "decode-1", "decode-1": "decode-0"}.get(victim)
        if other and (other in self._stopped or not self._live(other)):
            return
        if self._rng.random() < 0.3:
            self._cluster.kill(victim, signal.SIGSTOP)
            self._stopped[victim] = now + self._rng.uniform(0.2, 4.0)
            self.faults[f"stop {victim}"] += 1
        else:
            self._cluster.kill(victim)
            self._cluster.start(victim)
            self.faults[f"kill {victim}"] += 1

    def settle(self) -> None:
        for name in self._stopped:
            self._cluster.kill(name, signal.SIGCONT)
        self._stopped.clear()

    def _live(self, name: str) -> bool:
        with Client(self._cluster.address, self._cluster.operator) as client:
            return any(p.name == name and p.state == 1 for p in client.status(timeout=60.0).processes)


def soak(seconds: float, seed: int, folder: Path) -> dict[str, object]:
    """Run it; raises AssertionError at the first wrong or lost token."""
    rng = random.Random(seed)
    path = checkpoints.make("llama", folder / "model")
    prompts = [prompt for prompt in workload.prompts(seed=seed) if len(prompt) < 800][:24]
    count = 48
    expected = workload.references(path, prompts, count)
    quick = {"cluster.heartbeat_ms": 100, "cluster.heartbeat_timeout_ms": 1_000, "decode.fetch_timeout_ms": 3_000}
    settings = workload.settings(path, 2, 2, **quick)
    done = cached = attempts = 0
    with LocalCluster(settings, folder / "cluster") as cluster, ThreadPoolExecutor(STREAMS) as pool:
        chaos = Chaos(cluster, rng)
        running: dict[Future[Generated], list[int]] = {}
        start = time.monotonic()
        next_fault = start + 1.0
        while time.monotonic() - start < seconds or running:
            now = time.monotonic()
            while len(running) < STREAMS and now - start < seconds:
                prompt = rng.choice(prompts)
                running[pool.submit(workload.ask, cluster.address, prompt, count)] = prompt
            if now >= next_fault and now - start < seconds:
                chaos.act(now)
                next_fault = now + rng.uniform(*BETWEEN_FAULTS)
            if now - start >= seconds:
                chaos.settle()
            finished, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            for future in finished:
                prompt = running.pop(future)
                answer = future.result()
                assert answer.token_ids == expected[tuple(prompt)], f"wrong tokens for a prompt of {len(prompt)}"
                done += 1
                cached += answer.usage.cached_tokens
                attempts += answer.work.attempts
        eventually(lambda: at_rest(cluster), what="everything freed")
    return {
        "seed": seed,
        "seconds": round(seconds),
        "requests": done,
        "tokens": done * count,
        "attempts": attempts,
        "cached_tokens": cached,
        "faults": dict(sorted(chaos.faults.items())),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=20.0, help="of deaths and stops of everything")
    parser.add_argument("--kills", type=int, default=50, help="of the store, above a disk tier")
    parser.add_argument("--requests", type=int, default=10_000, help="of mixed length, to pools that are too small")
    parser.add_argument("--hostile", type=float, default=10.0, help="minutes of hostile clients and hung processes")
    parser.add_argument("--fuzz", type=float, default=10.0, help="minutes of a fuzzer on every socket")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args(argv)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"seed {given.seed}, commit {commit.stdout.strip()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as temporary:
        folder = Path(temporary)
        if given.minutes:
            print(json.dumps(soak(given.minutes * 60, given.seed, folder)), flush=True)
        path = checkpoints.make("llama", folder / "store-model")
        for nodes in (("a",), ("a", "b")) if given.kills else ():
            result = store_deaths(given.kills, given.seed, folder / f"{len(nodes)}-nodes", path, nodes)
            print(json.dumps(result), flush=True)
        for prefill in (0, 1) if given.requests else ():
            result = requests(given.requests, given.seed, folder / f"requests-{prefill}", prefill, path)
            print(json.dumps(result), flush=True)
        if given.hostile:
            print(json.dumps(hostile(given.hostile * 60, given.seed, folder / "hostile", path)), flush=True)
        if given.fuzz:
            print(json.dumps(fuzz(given.fuzz * 60, given.seed, folder / "fuzz", path)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
