"""Hostile clients, strangers and hung processes while honest streams run: a part of `make soak`.

    .venv/bin/python -m tests.soak --hostile 10 --minutes 0 --kills 0 --requests 0

24 honest streams run all the time, each request checked token by token against a cluster that nothing disturbs. Beside
them run the attacks of `tests/soak/attacks.py`, and every few seconds ptrace stops the main thread of one process while
its other threads go on. No honest request may fail. No gap between two tokens of a stream may be longer than one
second, except by the time for which the machine itself stood still: the bare engine of `tests/support/standstill.py`
tells that. After the attacks nothing may be left running or held, and no process may have grown: descriptors, threads
and memory are compared with those before the attacks.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from baton.grpc_loop import GrpcEventLoop
from deploy.local import LocalCluster
from kvstore.client.connection import store_address
from tests.support import workload
from tests.support.cluster import at_rest, process
from tests.support.eventually import eventually
from tests.support.honest_streams import COUNT, STREAMS, Size, Streams, grown, log_lines, references, sizes
from tests.support.hung_thread import hung
from tests.support.machine_speed import slowness
from tests.support.metrics_page import nothing_held
from tests.support.standstill import Gap, Machine

LONGEST = 1.0
"""Seconds between two tokens of a stream, besides what the machine itself does, on the machine of `machine_speed`."""
CALM = 8.0  # seconds of honest streams before the attacks
BETWEEN_HANGS, HANG = (2.0, 5.0), (0.3, 6.0)  # seconds
# Milliseconds: the streams of a hung worker go on in time.
LIMITS = {"heartbeat": 100, "heartbeat_timeout": 400, "step_timeout": 400}
STRANGERS = frozenset({"operator_calls", "store_connects", "zmq_strangers"})  # attacks of another user
IDLE = 150  # connections to each port
PLACES, HELD = 256, 800  # HTTP connections that the router serves at a time, and those that a stranger holds
LONG = 300.0  # seconds of attacks after which memory must have stayed as it was after a minute, ...
GROWTH = 1.05  # ... but for so much
WINDOW = 30.0  # seconds whose least value counts


@contextmanager
def attack(name: str, **arguments: object) -> Iterator[Counter[str]]:
    """Run an attack meanwhile; its counts are there at the end. Raises AssertionError when it got what it must not."""
    command = [sys.executable, "-m", "tests.soak.attacks", name, json.dumps(arguments)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    counts: Counter[str] = Counter()
    try:
        yield counts
        out, err = process.communicate("", timeout=120)
        assert process.returncode == 0, f"{name}: {err[-2_000:]}"
        counts.update(json.loads(out))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def hang_processes(cluster: LocalCluster, rng: random.Random, stop: threading.Event, counts: Counter[str]) -> None:
    """Stop the main thread of one process after another. One decode worker always runs."""
    while not stop.wait(rng.uniform(*BETWEEN_HANGS)):
        name = rng.choice(["decode-0", "decode-1", "prefill-0", "store-0"])
        with hung(cluster.pids[name], anywhere=True):
            stop.wait(rng.uniform(*HANG))
        counts[name] += 1
        cluster.wait_live([name])


def growth(memory: Sequence[tuple[float, Mapping[str, Size]]]) -> dict[str, float]:
    """Return the memory of each process at the end of the attacks, divided by that after a minute: the least of half a
    minute each. A large body, which comes and goes, adds up to a fifth to the router's. The first minute does not
    count: the router fills its records of 1,000 requests, and decode workers take 13 to 18 MiB at once."""
    begin, end = memory[0][0], memory[-1][0]
    minute = max(begin, min(60.0, end - WINDOW))

    def least(name: str, since: float) -> float:
        return min(by_name[name].anonymous for at, by_name in memory if since <= at <= since + WINDOW)

    return {name: least(name, max(begin, end - WINDOW)) / least(name, minute) for name in memory[-1][1]}


def judged(gaps: Sequence[Gap], machine: Sequence[Gap]) -> list[tuple[float, Gap]]:
    """Each gap with its length besides what the machine stood still in it, the longest first."""
    pairs = [(gap.seconds - sum(gap.overlap(other) for other in machine), gap) for gap in gaps]
    return sorted(pairs, key=lambda one: -one[0])


def hostile(seconds: float, seed: int, folder: Path, path: Path, longest: float = LONGEST) -> dict[str, object]:
    """Run all attacks for so long; raises AssertionError for a failed request, a gap longer than `longest` or anything
    that grew."""
    rng = random.Random(seed)
    expected = references(path, seed, folder / "reference")
    settings = workload.settings(
        path,
        1,
        2,
        **{f"cluster.{name}_ms": limit for name, limit in LIMITS.items()},
        **{"decode.fetch_timeout_ms": 3_000, "router.max_concurrent_rpcs": PLACES},
    )
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(settings, folder))
        machine = Machine(path)
        stack.callback(machine.close)
        streams = Streams(cluster.address, expected, rng)
        running = threading.Thread(target=lambda: _finish(streams, failures), name="streams")
        failures: list[BaseException] = []
        running.start()
        stack.callback(running.join)
        stack.callback(lambda: setattr(streams, "stop", True))
        time.sleep(CALM)
        before = sizes(cluster)
        stop, hangs = threading.Event(), Counter[str]()
        with ExitStack() as attacks:
            counts = {name: attacks.enter_context(attack(name, **args)) for name, args in plan(cluster).items()}
            hanging = threading.Thread(target=lambda: _finish_hangs(cluster, rng, stop, hangs, failures), name="hangs")
            hanging.start()
            attacks.callback(hanging.join)
            attacks.callback(stop.set)
            began, memory = time.monotonic(), list[tuple[float, dict[str, Size]]]()
            while (elapsed := time.monotonic() - began) < seconds and not failures:
                memory.append((elapsed, sizes(cluster)))
                time.sleep(1)
        streams.stop = True
        running.join()
        if failures:
            raise failures[0]
        eventually(lambda: at_rest(cluster), what="everything freed")
        eventually(lambda: nothing_held(cluster, "store-0"), what="nothing held in the store")
        ratios = growth(memory)
        stood_still = machine.gaps()
        long = judged(streams.gaps, stood_still)
        logs = {file.name: file.stat().st_size for file in cluster.config.cluster.logs.iterdir() if file.is_file()}
        result: dict[str, object] = {
            "seed": seed,
            "seconds": round(seconds),
            "streams": STREAMS,
            "requests": streams.requests,
            "tokens": streams.requests * COUNT,
            "attempts": streams.attempts,
            "longest_first_token_s": round(max(streams.first_tokens), 3),
            "longest_gap_s": round(max((gap.seconds for gap in streams.gaps), default=0.0), 3),
            "longest_gap_besides_machine_s": round(long[0][0], 3) if long else 0.0,
            "longest_gap_of_machine_s": round(max((gap.seconds for gap in stood_still), default=0.0), 3),
            "hangs": dict(sorted(hangs.items())),
            "attacks": {name: dict(sorted(kinds.items())) for name, kinds in counts.items()},
            "grown_mib": {
                name: round((size.anonymous - before[name].anonymous) / 2**20, 1)
                for name, size in sizes(cluster).items()
            },
            "memory_at_the_end_of_that_after_a_minute": {name: round(ratio, 3) for name, ratio in ratios.items()},
            "log_kib": {name: round(size / 1_024) for name, size in sorted(logs.items())},
        }
        assert seconds < LONG or max(ratios.values()) <= GROWTH, f"memory at the end has grown: {result}"
        limit = longest * slowness()
        assert not long or long[0][0] <= limit, f"a stream waited longer than {limit:.2f} s: {long[:5]}, {result}"
        eventually(lambda: not grown(before, sizes(cluster)), what=f"{grown(before, sizes(cluster))}: sizes as before")
        assert not (lines := log_lines(cluster, "Traceback")), f"a traceback in {lines}"
        return result


def _finish(streams: Streams, failures: list[BaseException]) -> None:
    try:
        with asyncio.Runner(loop_factory=GrpcEventLoop) as runner:  # gaps are to be the cluster's, not this loop's
            runner.run(streams.run())
    except BaseException as error:  # noqa: BLE001 the soak's own thread raises it
        failures.append(error)


def _finish_hangs(
    cluster: LocalCluster,
    rng: random.Random,
    stop: threading.Event,
    counts: Counter[str],
    failures: list[BaseException],
) -> None:
    try:
        hang_processes(cluster, rng, stop, counts)
    except BaseException as error:  # noqa: BLE001 the soak's own thread raises it
        failures.append(error)


def plan(cluster: LocalCluster) -> dict[str, dict[str, object]]:
    """Every attack with its arguments. Only root can become another user, so others go without those that must."""
    assert cluster.addresses is not None
    metrics = [status.metrics_address for name in cluster.pids if (status := process(cluster, name))]
    stores = [status for name in cluster.pids if name.startswith("store") and (status := process(cluster, name))]
    api = cluster.addresses.api
    endpoints = [cluster.addresses.endpoint_of(0), *(store.events_endpoint for store in stores)]
    attacks: dict[str, dict[str, object]] = {
        "long_inputs": {"grpc_address": cluster.address},
        "operator_calls": {"grpc_address": cluster.address, "operator_path": cluster.operator.removeprefix("unix:")},
        "slow_readers": {"grpc_address": cluster.address, "count": 4},
        "idle_connections": {"addresses": [*dict.fromkeys([*metrics, cluster.addresses.http, api])], "each": IDLE},
        "store_connects": {"store_address": store_address(cluster.config.cluster.name, cluster.node)},
        "zmq_strangers": {"endpoints": endpoints},
        "scrapes": {"http_addresses": [*dict.fromkeys(metrics)]},
        "held_streams": {"grpc_address": cluster.address, "connections": 20, "each": 20},
        "unspoken_connections": {"grpc_address": cluster.address, "count": 1_000},
        "http_requests": {"api_address": api},
        "held_connections": {"api_address": api, "count": HELD},
        "large_bodies": {"api_address": api},
    }
    return attacks if os.getuid() == 0 else {name: args for name, args in attacks.items() if name not in STRANGERS}
