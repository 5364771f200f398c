"""Two routers on the same workers and store: each has its own streams, and loses only those when it dies."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.client import Client, Generated
from baton.errors import BatonError
from baton.v1 import cluster_pb2
from deploy.local import LocalCluster
from tests import checkpoints
from tests.processes.test_failures import DEADLINE, expected
from tests.support import workload
from tests.support.eventually import eventually

_RNG = random.Random(11)
PROMPTS = [[_RNG.randrange(3, checkpoints.VOCAB) for _ in range(count)] for count in (300, 150, 220, 40)]
TOKENS = 150


class Stream:
    """One request through one router, whose tokens can be watched as they come."""

    def __init__(self, pool: ThreadPoolExecutor, address: str, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.prompt = prompt
        self._address = address
        self.end: Future[Generated] = pool.submit(self._run)

    def _run(self) -> Generated:
        same = "same"  # at both routers
        with Client(self._address) as client:
            stream = client.generate(
                self.prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, request_id=same, timeout=DEADLINE
            )
            for delta in stream:
                self.tokens += delta.token_ids
            return stream.result()


def loads(cluster: LocalCluster, router: str) -> dict[str, cluster_pb2.Load]:
    """How busy each process is, as that router sees it."""
    with Client(operator=cluster.operator_of(router)) as client:
        return {p.name: p.load for p in client.status(timeout=DEADLINE).processes if p.role != cluster_pb2.ROLE_ROUTER}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_routers_dies(checkpoint: Callable[[str], Path], tmp_path: Path, how: signal.Signals) -> None:
    path = checkpoint("llama")
    quick = {
        "cluster.heartbeat_ms": 100,
        "cluster.heartbeat_timeout_ms": 1_000,
        "cluster.routers": 2,
        "prefill.max_num_seqs": 8,
    }
    quick |= workload.SLOW_ENGINE
    with (
        LocalCluster(workload.settings(path, 1, 2, **quick), tmp_path) as cluster,
        ThreadPoolExecutor(8) as pool,
    ):
        ours, theirs = (
            [Stream(pool, cluster.address_of(router), prompt) for prompt in PROMPTS]
            for router in ("router", "router-1")
        )
        eventually(lambda: all(len(stream.tokens) > 5 for stream in (*ours, *theirs)), what="all streams under way")
        for router in ("router", "router-1"):  # the load of both, within a heartbeat
            eventually(lambda r=router: sum(load.running for load in loads(cluster, r).values()) >= 8, "all seen")
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
            for worker in ("decode-0", "decode-1"):
                log = tmp_path / "logs" / f"{worker}.log"
                eventually(lambda log=log: "lost the router" in log.read_text(), what="the silence noticed")
            cluster.kill("router-1", signal.SIGCONT)
            for stream in theirs:
                stream.end.result(DEADLINE)
        else:
            for stream in theirs:
                with pytest.raises(BatonError):
                    stream.end.result(DEADLINE)
            cluster.start("router-1")
        cluster.wait_live(["router-1", "store-0", "prefill-0", "decode-0", "decode-1"])
        for stream in theirs:
            answer = workload.ask(cluster.address_of("router-1"), stream.prompt, TOKENS)
            assert answer.token_ids == expected(path, stream.prompt, TOKENS)
            assert stream.tokens == answer.token_ids[: len(stream.tokens)]
