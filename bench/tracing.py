"""Measure what tracing costs: the router's CPU time for a request and the gaps in its stream, with spans and without.

    bench/tracing.py [--rounds N] [--requests N] [--streams N] [--model tiny|100m|DIR]

Three clusters of one decode worker each serve the same requests in turns, and each round reverses their order. One is
without tracing, the spans of one go to a collector, and the collector of one does not exist. The collector is a process
of its own that reads OTLP over HTTP and keeps nothing. CPU time is that of the router's process, the exporter's thread
included. Beside busy neighbours it grows less than the latencies do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from multiprocessing.connection import Connection

import psutil

from bench import cluster, models, report
from deploy.load.sender import closed_loop
from deploy.load.workload import Planned
from deploy.local import LocalCluster

TARGET = 1.03
_OUTPUT = 32
_PROMPT = 33
_TIMEOUT = 60.0
_NOWHERE = "http://127.0.0.1:9"  # discard: a port at which hardly any machine listens


@dataclass(frozen=True)
class Round:
    """One round of requests on one cluster: seconds."""

    cpu: float  # of the router, for each request
    first: float  # median time to first token
    gap: float  # 99th percentile of the gaps between tokens


class _Discard(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _collect(orders: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Discard)
    orders.send(server.server_port)
    server.serve_forever()


def measure(running: LocalCluster, requests: int, streams: int) -> Round:
    """Serve so many requests, `streams` at a time."""
    router = psutil.Process(running.pids["router"])
    plan = [
        Planned(0.0, tuple(range(10 + number % 7, 10 + number % 7 + _PROMPT)), _OUTPUT) for number in range(requests)
    ]
    before = router.cpu_times()
    outcomes = asyncio.run(closed_loop(running.address, plan, streams, _TIMEOUT))
    after = router.cpu_times()
    assert not any(outcome.failed for outcome in outcomes), "a request failed"
    gaps = sorted(later - at for outcome in outcomes for at, later in pairwise(outcome.tokens))
    return Round(
        (after.user + after.system - before.user - before.system) / requests,
        statistics.median(outcome.tokens[0] - outcome.sent for outcome in outcomes),
        gaps[len(gaps) * 99 // 100],
    )


def compare(rounds: Mapping[str, Sequence[Round]]) -> None:
    """Print every figure beside that without tracing."""
    for case in ("on", "no collector"):
        for name, unit, scale in (("cpu", "us/request", 1e6), ("first", "ms", 1e3), ("gap", "ms", 1e3)):
            mine = [getattr(each, name) * scale for each in rounds[case]]
            plain = [getattr(each, name) * scale for each in rounds["off"]]
            told = {"cpu": "router CPU", "first": "TTFT p50", "gap": "ITL p99"}[name]
            ratio = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
            result = report.Result(
                "tracing", f"{case}: {told}", statistics.median(mine), unit,
                limit=statistics.median(plain), ratio=ratio, runs=tuple(mine),
            )  # fmt: skip
            report.emit(report.judged(result, TARGET, "low") if name != "cpu" else result)


def main() -> int:
    """Measure all three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200, help="of a round")
    parser.add_argument("--streams", type=int, default=8, help="requests at a time")
    parser.add_argument("--model", default="tiny", help="tiny, 100m or a directory")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    collector = context.Process(target=_collect, args=(theirs,), daemon=True)
    collector.start()
    ports = {"off": "", "on": f"http://127.0.0.1:{orders.recv()}", "no collector": _NOWHERE}
    report.say(report.machine())
    rounds: dict[str, list[Round]] = {case: [] for case in ports}
    with contextlib.ExitStack() as stack:
        running = {
            case: stack.enter_context(
                cluster.local(
                    models.directory(given.model), 0, 1,
                    {"decode.kv_cache_bytes": "64MiB", "store.host_cache_bytes": "64MiB",
                     "tracing.enabled": bool(url), "tracing.endpoint": url},
                )
            )
            for case, url in ports.items()
        }  # fmt: skip
        for number in range(given.rounds + 1):
            order = list(running) if number % 2 else list(running)[::-1]
            for case in order:
                found = measure(running[case], given.requests, given.streams)
                if number:  # the first round warms up
                    rounds[case].append(found)
    collector.terminate()
    collector.join()
    compare(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
