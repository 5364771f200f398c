"""A client that closes its connection: one second later nothing of its requests is left in any process.

Each phase is held open: a worker drains (queued), a long prompt is computed in small chunks (prefill), the store stands
still (hand-off), or tokens come (decode). Over HTTP with one output, several, and beams, as a stream or not; over gRPC.
"""

import contextlib
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from baton.client import Client
from baton.operator_api import RequestSummary
from baton.v1 import generation_pb2, generation_pb2_grpc
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import samples, total
from tests.support.thorough import cases

# The bound is a second of the clock, so no other test may use the cores meanwhile.
pytestmark = pytest.mark.alone

BOUND = 1.0  # seconds from the end of the connection until nothing is left
STEADY = 0.6  # seconds that it must stay so: a store's figures may be half a second old
PROMPT, OUTPUT = 1_500, 400  # tokens
SETTINGS = {
    **workload.SLOW_ENGINE,
    "prefill.max_num_batched_tokens": workload.PAGE,  # a chunk is a page, so that a prompt takes a while
    "cluster.heartbeat_ms": 100,  # how old a worker's load may be
    "cluster.heartbeat_timeout_ms": 30_000,  # a store that stands still is not given up
    "router.queue_timeout_ms": 120_000,
}

Close: TypeAlias = Callable[[], None]
Open: TypeAlias = Callable[[LocalCluster, list[int]], Close]


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = workload.settings(path, 1, 1, **SETTINGS)
    with LocalCluster(settings, tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def operator(cluster: LocalCluster) -> Iterator[Client]:
    with Client(operator=cluster.operator) as client:
        yield client


# --- doors: each sends a request, and returns what closes its connection --------------------------------------------


def http(**fields: Any) -> Open:
    def send(cluster: LocalCluster, prompt: list[int]) -> Close:
        host, _, port = cluster.api_of("router").rpartition(":")
        body = json.dumps({"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, **fields}).encode()
        connection = socket.create_connection((host, int(port)), timeout=30)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection.close

    return send


def rpc(cluster: LocalCluster, prompt: list[int], **fields: Any) -> Close:
    channel = grpc.insecure_channel(cluster.address)
    ids = generation_pb2.TokenIds(ids=prompt)
    request = generation_pb2.GenerateRequest(token_ids=ids, max_tokens=OUTPUT, ignore_eos=True, **fields)
    call: Any = generation_pb2_grpc.GenerationStub(channel).Generate(request)
    reader = threading.Thread(target=_read, args=(call,), daemon=True)
    reader.start()

    def close() -> None:
        channel.close()
        reader.join()

    return close


def _read(call: Any) -> None:
    with contextlib.suppress(grpc.RpcError, ValueError):  # ValueError: the channel is closed
        for _ in call:
            pass


DOORS: dict[str, Open] = {
    "http": http(stream=True),
    "http, whole": http(),
    "http, n 4": http(stream=True, n=4),
    "http, best of 4": http(best_of=4),
    "http, 3 beams": http(use_beam_search=True, n=3),
    "grpc": rpc,
    "grpc, n 3": partial(rpc, n=3),
}


# --- phases: each holds a request that is sent within it in that phase ----------------------------------------------


@contextlib.contextmanager
def queued(cluster: LocalCluster, operator: Client) -> Iterator[Callable[[], object]]:
    operator.drain("decode-0")
    try:
        yield lambda: operator.status().counts.queued
    finally:
        operator.drain("decode-0", undo=True)


@contextlib.contextmanager
def prefill(cluster: LocalCluster, operator: Client) -> Iterator[Callable[[], object]]:
    yield lambda: any(p.name == "prefill-0" and p.load.running for p in operator.status().processes)


@contextlib.contextmanager
def hand_off(cluster: LocalCluster, operator: Client) -> Iterator[Callable[[], object]]:
    """The decode worker waits for pages from a store that stands still until the connection has been closed."""
    cluster.kill("store-0", signal.SIGSTOP)
    try:
        yield lambda: _listed(operator, lambda one: one.decode_worker and one.prefill_worker)
    finally:
        cluster.kill("store-0", signal.SIGCONT)


@contextlib.contextmanager
def decode(cluster: LocalCluster, operator: Client) -> Iterator[Callable[[], object]]:
    before = operator.status().counts.generated_tokens
    yield lambda: operator.status().counts.generated_tokens > before


def _listed(operator: Client, condition: Callable[[RequestSummary], object]) -> bool:
    """Whether a request that runs is so."""
    running = "running"
    return any(one.state == running and condition(one) for one in operator.requests(8))


# --- the count -------------------------------------------------------------------------------------------------------


def left(cluster: LocalCluster, operator: Client) -> dict[str, float]:
    """What the router, the workers and the store still have. A figure of 0 is left out."""
    status = operator.status()
    counts: dict[str, float] = {"requests queued": status.counts.queued, "requests running": status.counts.running}
    for process in status.processes:
        name, load = process.name, process.load
        counts[f"{name}: attempts"] = process.attempts
        if name.startswith(("prefill", "decode")):
            counts[f"{name}: running"], counts[f"{name}: waiting"] = load.running, load.waiting
            counts[f"{name}: device pages"] = load.pages_total - load.pages_free
    page = samples(cluster, "store-0")
    for state in ("reserved", "held", "loading"):
        counts[f"store-0: {state}"] = total(page, "kv_pages", tier="host", state=state)
    counts["store-0: awaited"] = total(page, "store_pages_awaited")
    counts["store-0: no page"] = not page
    return {what: count for what, count in counts.items() if count}


@pytest.mark.parametrize("phase", [queued, prefill, hand_off, decode], ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("door", cases([*DOORS], ["http", "http, n 4", "http, 3 beams", "grpc"]))
def test_nothing_is_left_a_second_after_the_connection_is_closed(
    cluster: LocalCluster, operator: Client, door: str, phase: Any
) -> None:
    eventually(lambda: not left(cluster, operator), "rest before the test")
    prompt = [random.randrange(3, checkpoints.VOCAB) for _ in range(PROMPT)]
    cancelled = operator.status().counts.cancelled
    with phase(cluster, operator) as reached:
        close = DOORS[door](cluster, prompt)
        try:
            eventually(reached, phase.__name__)
            assert left(cluster, operator), "the count does not see what is there"
        finally:
            close()
    closed = rest = time.monotonic()
    while rest - closed < BOUND and time.monotonic() - rest < STEADY:
        if counts := left(cluster, operator):
            rest = time.monotonic()
    assert rest - closed < BOUND, f"left {BOUND} s after the end of the connection: {counts}"
    print(f"{door}, {phase.__name__}: nothing left after {rest - closed:.2f} s")
    # Each step of a beam search is a request of its own, and the connection may close between two of them.
    if not (door == "http, 3 beams" and phase is decode):
        assert operator.status().counts.cancelled > cancelled
