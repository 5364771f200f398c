"""Two routers on the same workers, store and ports: each has its own streams, and loses only those when it dies."""

import contextlib
import json
import random
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.client import Client, Generated
from baton.errors import BatonError, PinNotFound, RequestNotFound, StartupError
from baton.messages import LoadReport
from deploy.local import LocalCluster
from tests.processes.test_failures import DEADLINE, expected
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest
from tests.support.eventually import eventually

_RNG = random.Random(11)
PROMPTS = [[_RNG.randrange(3, checkpoints.VOCAB) for _ in range(count)] for count in (300, 150, 220, 40)]
TOKENS = 150
ROUTERS = ("router", "router-1")
QUICK = {
    "cluster.heartbeat_ms": 100,
    "cluster.heartbeat_timeout_ms": 3_000,  # less, and a busy machine makes a worker seem lost
    "cluster.routers": 2,
    "prefill.max_num_seqs": 8,
    **workload.SLOW_ENGINE,
}


class Stream:
    """One request at the shared port, whose tokens can be watched as they come. The kernel chooses its router."""

    def __init__(self, pool: ThreadPoolExecutor, address: str, prompt: Sequence[int], name: str) -> None:
        self.tokens: list[int] = []
        self.prompt = prompt
        self.name = name
        self._address = address
        self.end: Future[Generated] = pool.submit(self._run)

    def _run(self) -> Generated:
        with Client(self._address) as client:
            stream = client.generate(
                self.prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, request_id=self.name, timeout=DEADLINE
            )
            for delta in stream:
                self.tokens += delta.token_ids
            return stream.result()


@contextlib.contextmanager
def client_of(cluster: LocalCluster, router: str) -> Iterator[Client]:
    """The operator's client of one router alone."""
    with Client(operator=cluster.operator_of(router), one_router=True) as client:
        yield client


def loads(cluster: LocalCluster, router: str) -> dict[str, LoadReport]:
    """How busy each process is, as that router sees it."""
    with client_of(cluster, router) as client:
        return {p.name: p.load for p in client.status(timeout=DEADLINE).processes if p.role != "router"}


def router_of(cluster: LocalCluster, name: str) -> str:
    """The router that has the request, "" while none has."""
    for router in ROUTERS:
        with client_of(cluster, router) as client, contextlib.suppress(RequestNotFound):
            if client.explain(name, DEADLINE).request.name:
                return router
    return ""


def streams_at_both(cluster: LocalCluster, pool: ThreadPoolExecutor) -> dict[str, list[Stream]]:
    """Streams until each router has two of them, by router. Each has a connection of its own."""
    by_router: dict[str, list[Stream]] = {router: [] for router in ROUTERS}
    for number in range(32):
        stream = Stream(pool, cluster.address, PROMPTS[number % len(PROMPTS)], f"stream-{number}")
        eventually(lambda stream=stream: router_of(cluster, stream.name), "the request under way")
        by_router[router_of(cluster, stream.name)].append(stream)
        if all(len(streams) >= 2 for streams in by_router.values()):
            return by_router
    raise AssertionError(f"the kernel gave every connection to one router: {by_router}")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_routers_dies(path: Path, tmp_path: Path, how: signal.Signals) -> None:
    """There is one decode worker: of two, a busy machine slows one, and a router moves its streams to the other."""
    with LocalCluster(workload.settings(path, 1, 1, **QUICK), tmp_path) as cluster, ThreadPoolExecutor(32) as pool:
        ours, theirs = streams_at_both(cluster, pool).values()
        eventually(lambda: all(len(stream.tokens) > 5 for stream in (*ours, *theirs)), what="all streams under way")
        cluster.kill("router-1", how)
        for stream in ours:
            assert stream.end.result(DEADLINE).work.attempts == 1, "it should not have noticed"
            assert stream.tokens == expected(path, stream.prompt, TOKENS)
        eventually(
            lambda: all(
                not (load.running or load.waiting) and load.pages_free == load.pages_total
                for load in loads(cluster, "router").values()
            ),
            what="what the dead router owned freed",
        )
        if how == signal.SIGSTOP:  # it wakes, reads what was said meanwhile, and has done anew what was forgotten
            log = tmp_path / "logs" / "decode-0.log"
            eventually(lambda: "lost the router" in log.read_text(), what="the silence noticed")
            cluster.kill("router-1", signal.SIGCONT)
            for stream in theirs:
                stream.end.result(DEADLINE)
        else:
            for stream in theirs:
                with pytest.raises(BatonError):
                    stream.end.result(DEADLINE)
            for prompt in PROMPTS:  # new connections go to the router that is left
                assert workload.ask(cluster.address, prompt, 5).token_ids == expected(path, prompt, TOKENS)[:5]
            cluster.start("router-1")
        cluster.wait_live(["router-1", "store-0", "prefill-0", "decode-0"])
        for stream in theirs:
            answer = workload.ask(cluster.address, stream.prompt, TOKENS)
            assert answer.token_ids == expected(path, stream.prompt, TOKENS)
            assert stream.tokens == answer.token_ids[: len(stream.tokens)]
        if how == signal.SIGKILL:  # both take connections again
            for each in (stream for streams in streams_at_both(cluster, pool).values() for stream in streams):
                each.end.result(DEADLINE)


def dashboard(cluster: LocalCluster, part: str) -> Any:
    with urllib.request.urlopen(f"http://{cluster.api_of('router')}/dashboard/api/{part}", timeout=DEADLINE) as answer:
        return json.load(answer)


def test_any_router_answers_its_operator_for_all(path: Path, tmp_path: Path) -> None:
    with LocalCluster(workload.settings(path, 1, 1, **QUICK), tmp_path) as cluster, ThreadPoolExecutor(32) as pool:
        assert cluster.api_of("router") == cluster.api_of("router-1")
        by_router = streams_at_both(cluster, pool)
        every = [stream.name for streams in by_router.values() for stream in streams]
        worker: dict[str, int] = {}
        for router in ROUTERS:
            with Client(operator=cluster.operator_of(router)) as client:
                status = client.status(timeout=DEADLINE)
                rows = {process.name: process for process in status.processes}
                assert set(rows) == {*ROUTERS, "store-0", "prefill-0", "decode-0"}
                worker[router] = status.counts.running + status.counts.finished
                for name in every:
                    assert client.explain(name).request.request_id == name
                with pytest.raises(RequestNotFound):
                    client.explain("nothing")
                assert {one.request_id for one in client.requests(len(every))} == set(every)
        assert set(worker.values()) == {len(every)}
        for router, other in (ROUTERS, ROUTERS[::-1]):
            with Client(operator=cluster.operator_of(router)) as mine, client_of(cluster, other) as theirs:
                theirs.pin_prefix(PROMPTS[1], id=f"of-{other}", timeout=DEADLINE)
                assert f"of-{other}" in {pin.id for pin in mine.pins()}
                mine.unpin(f"of-{other}")
                assert not theirs.pins()
                with pytest.raises(PinNotFound):
                    mine.unpin(f"of-{other}")
                mine.drain("decode-0")
                states = {process.name: process.state for process in theirs.status(timeout=DEADLINE).processes}
                assert states["decode-0"] == "draining"
                mine.drain("decode-0", undo=True)
        for router, streams in by_router.items():  # whichever router takes the connection
            snapshot = dashboard(cluster, f"snapshot?router={router}")
            assert (snapshot["router"]["name"], snapshot["router"]["routers"]) == (router, [*ROUTERS])
            assert {row["request_id"] for row in snapshot["requests"]} == {stream.name for stream in streams}
            assert dashboard(cluster, f"request?router={router}&name={streams[0].name}")["request"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            dashboard(cluster, "snapshot?router=router-7")
        for streams in by_router.values():
            for stream in streams:
                assert stream.end.result(DEADLINE).token_ids == expected(path, stream.prompt, TOKENS)
        cluster.kill("router-1")
        with Client(operator=cluster.operator) as client:
            assert "router-1" not in {process.name for process in client.status(timeout=DEADLINE).processes}
        eventually(lambda: at_rest(cluster), what="everything freed")


def test_a_stranger_at_the_shared_port_is_named(path: Path, tmp_path: Path) -> None:
    """vLLM's server sets SO_REUSEPORT, too: the kernel would give it a part of the connections."""
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        for setting in ("api.port", "router.grpc_port"):
            settings = workload.settings(path, 0, 1, **{**QUICK, setting: port})
            with (
                pytest.raises(StartupError, match=rf"(?s)127\.0\.0\.1:{port} \({setting}\) is in use: process \d+ "),
                LocalCluster(settings, tmp_path),
            ):
                pass
