"""How much clients notice of a decode worker that is live and ten times slower than the others (a grey failure).

    python -m tests.soak.slow_worker [--seconds 40] [--rounds 3] [--clients 4]

Real processes serve the demo model: 1 prefill worker, 3 decode workers. Clients send one request after the other, each
with a prompt that no cache has. Each round measures a healthy cluster first. Then SIGSTOP stops one decode worker for a
part of every period, by each pattern in turn. Prints a line of JSON for each measurement, and medians.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from baton import config
from baton.client import Client
from deploy.local import LocalCluster
from deploy.models import with_demo_model
from tests.support.hung_thread import stuttering

VICTIM = "decode-1"
PATTERNS: Mapping[str, tuple[float, float] | None] = {  # seconds stopped of each period
    "healthy": None,
    "45 of 50 ms": (0.045, 0.05),
    "90 of 100 ms": (0.09, 0.1),
    "900 of 1,000 ms": (0.9, 1.0),
}
SETTLED = 5.0  # seconds after which placement has left the worker
RECOVERY = 60.0  # seconds for which the worker's next request is awaited
PROMPT, OUTPUT, VOCAB = 120, 60, 2_000  # tokens


@dataclass(frozen=True)
class Served:
    """One request, in seconds since its measurement began."""

    sent: float
    ttft: float
    ended: float
    workers: tuple[str, ...]


def load(cluster: LocalCluster, clients: int, seconds: float, *, until_served_by: str = "") -> list[Served]:
    """Send requests for so long, or until that worker has served one."""
    began, done = time.monotonic(), False

    def client(number: int) -> list[Served]:
        nonlocal done
        rng, served = random.Random(f"{began} {number}"), list[Served]()
        with Client(cluster.address) as router:
            while (sent := time.monotonic() - began) < seconds and not done:
                prompt = [rng.randrange(3, VOCAB) for _ in range(PROMPT)]
                stream = router.generate(prompt, max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, timeout=120.0)
                first = 0.0
                for delta in stream:
                    first = first or (time.monotonic() - began if delta.token_ids else 0.0)
                workers = tuple(stream.result().work.decode_workers)
                served.append(Served(sent, first - sent, time.monotonic() - began, workers))
                done = done or until_served_by in workers
        return served

    with ThreadPoolExecutor(clients) as pool:
        return [one for served in pool.map(client, range(clients)) for one in served]


def measure(cluster: LocalCluster, pattern: str, clients: int, seconds: float) -> dict[str, float]:
    """Measure one pattern, and how long the worker waits for a request once it is healthy again."""
    times = PATTERNS[pattern]
    with stuttering(cluster.pids[VICTIM], *times) if times else nullcontext():
        served = load(cluster, clients, SETTLED + seconds)
    back = time.monotonic()
    load(cluster, clients, RECOVERY, until_served_by=VICTIM)
    back = time.monotonic() - back
    late = sorted(one.ttft for one in served if one.sent >= SETTLED)
    ends = sorted(one.ended - one.sent for one in served if one.sent >= SETTLED)
    return {
        "ttft_p50": late[len(late) // 2],
        "ttft_p99": late[len(late) * 99 // 100],
        "e2e_p50": ends[len(ends) // 2],
        "e2e_p99": ends[len(ends) * 99 // 100],
        "requests": len(late),
        "there_at_first": sum(VICTIM in one.workers for one in served if one.sent < SETTLED),
        "there": sum(VICTIM in one.workers for one in served if one.sent >= SETTLED),
        "moved": sum(len(one.workers) > 1 for one in served),
        "back_s": back,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.slow_worker", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--only", action="append", choices=PATTERNS)
    given = parser.parse_args()
    ports = dict.fromkeys(("router.grpc_port", "router.internal_port", "router.http_port", "api.port"), 0)
    threads = {"prefill.threads": 1, "decode.threads": 1}
    settings = with_demo_model(config.load(None, {"cluster.prefill": 1, "cluster.decode": 3, **ports, **threads}))
    rounds: dict[str, list[dict[str, float]]] = {pattern: [] for pattern in given.only or PATTERNS}
    with tempfile.TemporaryDirectory() as folder, LocalCluster(settings, Path(folder)) as cluster:
        load(cluster, given.clients, SETTLED)
        for _ in range(given.rounds):
            for pattern, found in rounds.items():
                found.append(measure(cluster, pattern, given.clients, given.seconds))
                print(json.dumps({"pattern": pattern, **found[-1]}), flush=True)
    for pattern, found in rounds.items():
        print(json.dumps({"median of": pattern, **{key: median(one[key] for one in found) for key in found[0]}}))


if __name__ == "__main__":
    main()
