"""Deaths, stops and clients that go away, with real processes: no token lost, repeated or changed, nothing held."""

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from baton.client import Client
from baton.errors import DeadlineExpired, StartupError, Unavailable
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.cluster import Streams, at_rest, load, process, watching
from tests.support.eventually import DEADLINE, eventually

_RNG = random.Random(7)
LONG = [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(1_500)]
VERY_LONG = [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(3_500)]  # its prefill, a page a step, takes a while


@pytest.fixture
def start(path: Path, tmp_path: Path) -> Iterator[Callable[..., LocalCluster]]:
    running: list[LocalCluster] = []

    def up(prefill: int, decode: int, **more: object) -> LocalCluster:
        quick: dict[str, object] = {
            "cluster.heartbeat_ms": 100,
            "cluster.heartbeat_timeout_ms": 1_000,
            **workload.SLOW_ENGINE,  # that there is a middle in which to fail
        }
        running.append(LocalCluster(workload.settings(path, prefill, decode, **(quick | more)), tmp_path))
        return running[-1].up()

    yield up
    for cluster in running:
        cluster.close()


def expected(path: Path, prompt: Sequence[int], count: int) -> list[int]:
    return checkpoints.reference(path).generate(prompt, count)[0]


def test_a_prefill_worker_killed_while_it_computes(start: Callable[..., LocalCluster], path: Path) -> None:
    cluster = start(1, 1, **{"prefill.max_num_batched_tokens": workload.PAGE})
    streams = Streams(cluster)
    with watching(cluster, "prefill-0") as running:
        future = streams.start(VERY_LONG, 12)
        eventually(running, what="prefill at work")
    cluster.kill("prefill-0")
    finished = future.result(DEADLINE)
    assert streams.seen[0] == expected(path, VERY_LONG, 12)
    assert finished.work.attempts >= 2
    eventually(lambda: at_rest(cluster), what="everything freed")


@pytest.mark.technique("Fail-over with the same tokens")
def test_a_decode_worker_killed_while_it_streams(start: Callable[..., LocalCluster], path: Path) -> None:
    cluster = start(1, 2)
    streams = Streams(cluster)
    prompts = [LONG[:300], LONG[300:450], LONG[500:540], [5]]
    futures = [streams.start(prompt, 150) for prompt in prompts]
    eventually(lambda: all(len(seen) > 10 for seen in streams.seen), what="all streams under way")
    victim = "decode-0" if load(cluster, "decode-0").running else "decode-1"
    cluster.kill(victim)
    for prompt, future, seen in zip(prompts, futures, streams.seen, strict=True):
        future.result(DEADLINE)
        assert seen == expected(path, prompt, 150)
    eventually(lambda: at_rest(cluster), what="everything freed")


def test_a_death_is_told_by_the_store_and_not_only_by_silence(
    start: Callable[..., LocalCluster], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(
        1, 2, **{"cluster.heartbeat_timeout_ms": 3_600_000, "prefill.max_num_batched_tokens": workload.PAGE}
    )
    streams = Streams(cluster)
    future = streams.start(LONG[:300], 150)
    eventually(lambda: len(streams.seen[0]) > 10, what="the stream under way")
    cluster.kill("decode-0" if load(cluster, "decode-0").running else "decode-1")
    future.result(DEADLINE)
    assert streams.seen[0] == expected(path, LONG[:300], 150)
    with watching(cluster, "prefill-0") as running:
        future = streams.start(VERY_LONG, 12)
        eventually(running, what="prefill at work")
    cluster.kill("prefill-0")
    future.result(DEADLINE)
    assert streams.seen[1] == expected(path, VERY_LONG, 12)
    status = process(cluster, "prefill-0")
    assert status.state == "dead"
    # A worker that ends after it was seen running, and before the router was asked, is not live.
    monkeypatch.setattr(cluster, "_check_running", lambda name: None)
    with pytest.raises(StartupError, match="prefill-0"):
        cluster.wait_live(["prefill-0"], 0.5)


@pytest.mark.technique("Fail-over with the same tokens")
@pytest.mark.parametrize("seed", [1, 2])
def test_a_store_killed_at_any_time(start: Callable[..., LocalCluster], path: Path, seed: int) -> None:
    rng = random.Random(seed)
    cluster = start(1, 1, **{"prefill.max_num_batched_tokens": 32})
    streams = Streams(cluster)
    prompts = [LONG[i * 50 : i * 50 + rng.randrange(100, 700)] for i in range(8)]
    futures = [streams.start(prompt, 30) for prompt in prompts]
    eventually(lambda: sum(map(len, streams.seen)) >= rng.randrange(30), what="work under way")
    cluster.kill("store-0")
    for prompt, future, seen in zip(prompts, futures, streams.seen, strict=True):
        future.result(DEADLINE)
        assert seen == expected(path, prompt, 30)
    cluster.start("store-0")
    cluster.wait_live(["store-0", "prefill-0", "decode-0"])

    def fetched() -> bool:
        answer = workload.ask(cluster.address, [rng.randrange(3, 900) for _ in range(200)], 2)
        return answer.work.pages_fetched > 0

    eventually(fetched, what="hand-off through the new store")
    eventually(lambda: at_rest(cluster), what="everything freed")


def test_a_worker_joins_once_its_store_has_taken_it_in(start: Callable[..., LocalCluster]) -> None:
    cluster = start(1, 1, **{"cluster.heartbeat_timeout_ms": 60_000})
    cluster.kill("store-0", signal.SIGSTOP)
    cluster.start("decode-1")
    log = cluster.config.cluster.logs / "decode-1.log"
    eventually(lambda: log.exists() and "serves with" in log.read_text(), what="the model loaded")
    with pytest.raises(StartupError, match="decode-1"):
        cluster.wait_live(["decode-1"], seconds=1.0)
    cluster.kill("store-0", signal.SIGCONT)
    cluster.wait_live(["decode-1"])
    assert "attached to the store" in log.read_text()


def test_a_prefill_worker_stopped_replaced_and_woken(start: Callable[..., LocalCluster], path: Path) -> None:
    cluster = start(1, 1, **{"prefill.max_num_batched_tokens": workload.PAGE})
    streams = Streams(cluster)
    with watching(cluster, "prefill-0") as running:
        future = streams.start(VERY_LONG, 12)
        eventually(running, what="prefill at work")
    cluster.kill("prefill-0", signal.SIGSTOP)
    future.result(DEADLINE)
    assert streams.seen[0] == expected(path, VERY_LONG, 12)
    cluster.start("prefill-1")
    cluster.wait_live(["prefill-1", "decode-0"])
    other = VERY_LONG[::-1]
    future = streams.start(other, 12)
    cluster.kill("prefill-0", signal.SIGCONT)  # it goes on writing where it was, into slots that are still its own
    future.result(DEADLINE)
    assert streams.seen[1] == expected(path, other, 12)
    for prompt in (VERY_LONG, other):
        assert workload.ask(cluster.address, prompt, 12).token_ids == expected(path, prompt, 12)
    cluster.wait_live(["prefill-0", "prefill-1", "decode-0"])
    eventually(lambda: at_rest(cluster), what="everything freed")


def test_a_deadline_frees_everything_too(start: Callable[..., LocalCluster]) -> None:
    cluster = start(1, 1)
    # Either side may notice first: the router says so, or gRPC does.
    with Client(cluster.address, cluster.operator) as client, pytest.raises((DeadlineExpired, Unavailable)):
        client.generate(LONG, max_tokens=2_000, temperature=0.0, ignore_eos=True, timeout=0.2).result()
    eventually(lambda: at_rest(cluster), what="everything freed")


def test_a_router_that_dies_ends_its_streams_and_its_successor_serves(
    start: Callable[..., LocalCluster], path: Path
) -> None:
    cluster = start(1, 1)
    streams = Streams(cluster)
    future = streams.start(LONG[:100], 1_500)
    eventually(lambda: len(streams.seen[0]) > 5, what="the stream under way")
    cluster.kill("router")
    with pytest.raises(Unavailable):
        future.result(DEADLINE)
    cluster.start("router")
    cluster.wait_live(["router", "store-0", "prefill-0", "decode-0"])
    eventually(lambda: at_rest(cluster), what="the dead router's work forgotten")
    assert workload.ask(cluster.address, LONG[:100], 12).token_ids == expected(path, LONG[:100], 12)
