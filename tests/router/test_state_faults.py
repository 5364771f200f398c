"""Whatever links and processes do, every request ends exactly once, with the right tokens, and nothing is left over."""

import random
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.keys import pack_tokens
from router.events import Cancelled, ClientGone, Failed, Finished, StopMatched
from router.requests.counts import RequestCounts
from tests.router.cluster import Cluster
from tests.router.model import CONFIG, submit
from tests.router.processes import Process, Store
from tests.support.thorough import automaton

FAULTS = (
    "dies",
    "restarts",
    "is replaced",
    "stops",
    "is full",
    "is stuck",
    "hangs",
    "fails",
    "says a deadline",
    "fetches short",
    "loses its pages",
)


def break_process(cluster: Cluster, process: Process, fault: str) -> None:
    peer = process.peer
    match fault:
        case "dies":
            cluster.kill(process)
        case "restarts":
            cluster.kill(process)
            cluster.start(peer.role, peer.name, peer.node, slots=process.slots)
        case "is replaced":  # though it lives
            if len(cluster.processes) < 10:
                cluster.start(peer.role, peer.name, peer.node, slots=process.slots)
        case "stops":
            process.stopped = not process.stopped
        case "is full":
            process.full = not process.full
        case "is stuck":
            process.step_age_ms = 0 if process.step_age_ms else 10_000
        case "hangs":
            process.hung_since = cluster.now if process.hung_since is None else None
        case "fails":
            process.fail()
        case "says a deadline":
            process.fail("deadline")
        case "fetches short":
            process.give_up_fetch(1)
        case "loses its pages" if isinstance(process, Store):
            process.pages.clear()


def check_ends(cluster: Cluster) -> None:
    for name, end in cluster.ends.items():
        tokens, reason = cluster.expected(name)
        emitted = cluster.outputs[name]
        match end.outcome:
            case Finished("length"):
                assert emitted == tokens
                assert reason == "length"
            case Finished("stop"):  # by a token, or by a string at the edge
                assert emitted == tokens or len(emitted) == end.summary.usage.completion
            case Failed(error=error):
                assert str(error)
            case Cancelled():
                pass
        assert emitted == tokens[: len(emitted)]
        assert 0 <= end.summary.usage.cached <= end.summary.usage.prompt


class ClusterFaults(RuleBasedStateMachine):
    """Links lose, repeat and delay messages."""

    cluster: Cluster

    def _pick(self, index: int) -> Process | None:
        processes = list(self.cluster.processes.values())
        return processes[index % len(processes)] if processes else None

    @rule(index=st.integers(0, 30), repeated=st.booleans())
    def loses_or_repeats(self, index: int, repeated: bool) -> None:
        agenda = self.cluster.agenda
        if lanes := agenda.loaded("message"):
            (agenda.repeat if repeated else agenda.pop)(lanes[index % len(lanes)])

    @rule(rounds=st.integers(1, 40), loss=st.sampled_from([0.0, 0.05, 0.3]), lag=st.sampled_from([0.0, 0.3, 0.7]))
    def goes_on(self, rounds: int, loss: float, lag: float) -> None:
        for _ in range(rounds):
            self.cluster.round(loss=loss, lag=lag)


class Faults(ClusterFaults):
    """The same while requests come, and processes die, stop, wake up, refuse and fail."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()

    @initialize(
        decoders=st.integers(1, 3),
        prefillers=st.integers(0, 3),
        nodes=st.integers(1, 3),
        together=st.booleans(),
        serves_none=st.sets(st.sampled_from("abc"), max_size=1),
        seed=st.integers(0, 2**16),
    )
    def begin(
        self, decoders: int, prefillers: int, nodes: int, together: bool, serves_none: set[str], seed: int
    ) -> None:
        """`together`: both kinds of workers on each node, as far as they go; or prefill workers from the other end."""
        self.cluster.random.seed(seed)
        self.cluster.serves_none = serves_none
        names = "abc"[:nodes]
        for node in names:
            self.cluster.start("store", f"store-{node}", node)
        for i in range(decoders):
            self.cluster.start("decode", f"decode-{i}", names[i % nodes], slots=4)
        for i in range(prefillers):
            self.cluster.start("prefill", f"prefill-{i}", names[(i if together else -1 - i) % nodes], slots=2)
        self.cluster.run(0.2)

    def _request(self, index: int) -> str | None:
        names = list(self.cluster.requests)
        return names[index % len(names)] if names else None

    # --- clients ---

    @rule(
        count=st.integers(1, 4),
        prompt=st.integers(1, 60),
        max_tokens=st.integers(1, 60),
        seed=st.integers(0, 1_000),
        priority=st.integers(0, 2),
        deadline=st.none() | st.floats(0.1, 5.0),
        ttft=st.none() | st.floats(0.05, 5.0),
        tenant=st.sampled_from(["", "a"]),
    )
    def come(
        self,
        count: int,
        prompt: int,
        max_tokens: int,
        seed: int,
        priority: int,
        deadline: float | None,
        ttft: float | None,
        tenant: str,
    ) -> None:
        cluster = self.cluster
        at = None if deadline is None else cluster.now + deadline
        for i in range(count):
            name = f"r{len(cluster.requests)}"
            wishes: dict[str, Any] = {"priority": priority, "deadline": at, "ttft": ttft, "tenant": tenant}
            cluster.submit(name, prompt + i, max_tokens, seed=seed + i, **wishes)

    @rule(index=st.integers(0, 50), stopped=st.booleans())
    def leaves_or_is_stopped(self, index: int, stopped: bool) -> None:
        if name := self._request(index):
            emitted = len(self.cluster.outputs[name])
            self.cluster.tell(StopMatched(name, emitted) if stopped else ClientGone(name))

    # --- processes ---

    @rule(index=st.integers(0, 10), fault=st.sampled_from(FAULTS))
    def goes_wrong(self, index: int, fault: str) -> None:
        if process := self._pick(index):
            break_process(self.cluster, process, fault)

    @rule(node=st.sampled_from("abc"), role=st.sampled_from(["store", "decode", "prefill"]))
    def joins(self, node: str, role: Any) -> None:
        if len(self.cluster.processes) < 10:
            name = f"store-{node}" if role == "store" else f"{role}-{self.cluster.births}"
            self.cluster.start(role, name, node, slots=2)

    # --- links and time ---

    @rule(seconds=st.floats(0.05, 3.0), paused=st.booleans())
    def time_passes(self, seconds: float, paused: bool) -> None:
        live = sum(self.cluster.state.stats().live.values())
        self.cluster.advance(seconds, paused=paused)
        assert not paused or sum(self.cluster.state.stats().live.values()) == live, "blamed for our own pause"

    @precondition(lambda self: self.cluster.requests)
    @rule()
    def everything_ends(self) -> None:
        self.cluster.settle()

    @precondition(lambda self: self.cluster.requests)
    @rule(beats=st.booleans())
    def nothing_happens_any_more(self, beats: bool) -> None:
        """No message but heartbeats, or not even those: every state there is has a limit, and so have all together."""
        cluster, router = self.cluster, CONFIG.router
        attempt = (router.queue_timeout_ms + router.attempt_timeout_ms + CONFIG.cluster.heartbeat_timeout_ms) / 1_000
        limit = cluster.now + router.max_attempts * attempt + 1
        while len(cluster.ends) < len(cluster.requests):
            assert cluster.now < limit, f"still alive: {set(cluster.requests) - set(cluster.ends)}"
            for process in list(cluster.processes.values()) if beats else ():
                if process.stopped or not process.membership.router:
                    continue
                if process.hung_since is None:
                    process.beat()
                else:
                    process.repeat()
                cluster.agenda.go("message", cluster.incarnation, process.peer.incarnation, True)
            cluster.advance(0.2)

    @invariant()
    def ends_are_right(self) -> None:
        check_ends(self.cluster)

    def teardown(self) -> None:
        self.cluster.settle()
        self.ends_are_right()


Faults.TestCase.settings = automaton(count=60, steps=30)
TestFaults = Faults.TestCase


@pytest.mark.parametrize("seed", range(12))
def test_a_busy_cluster_survives_random_faults(seed: int) -> None:
    """Longer than the machine above goes, and always under load."""
    dice = random.Random(seed)
    cluster = Cluster()
    cluster.random.seed(seed)
    cluster.serves_none = set(dice.choice(["", "c"]))
    for node in "abc":
        cluster.start("store", f"store-{node}", node)
    for i in range(3):
        cluster.start("decode", f"decode-{i}", "ab"[i % 2], slots=6)
        cluster.start("prefill", f"prefill-{i}", dice.choice(["abc", "cab"])[i], slots=2)
    cluster.run(0.2)
    loss, lag = dice.choice([(0.0, 0.0), (0.01, 0.2), (0.1, 0.5)])
    for turn in range(600):
        if dice.random() < 0.15 and len(cluster.requests) - len(cluster.ends) < 20:
            name = f"r{len(cluster.requests)}"
            cluster.submit(name, dice.randint(1, 80), dice.randint(1, 60), seed=dice.randint(0, 99))
        if dice.random() < 0.03 and cluster.processes:
            break_process(cluster, dice.choice(list(cluster.processes.values())), dice.choice(FAULTS))
        if turn % 100 == 99:  # the supervisor repairs the cluster now and then
            for role, name, node in [
                ("decode", "decode-0", "a"),
                ("prefill", "prefill-0", "a"),
                ("store", "store-a", "a"),
            ]:
                for old in cluster.named(name):
                    cluster.kill(old)
                cluster.start(role, name, node, slots=6)
        cluster.round(loss=loss, lag=lag)
    cluster.settle()
    check_ends(cluster)
    assert cluster.state.stats().counts.finished


def twenty_requests(cluster: Cluster) -> RequestCounts:
    """Serve requests that take an attempt each."""
    for i in range(20):
        cluster.submit(f"r{i}", 5 + 7 * i, 20, seed=i)
        cluster.round()
    cluster.settle()
    check_ends(cluster)
    counts = cluster.state.stats().counts
    assert sum(counts.finished.values()) == counts.attempts == 20
    return counts


def test_without_faults_every_request_takes_one_attempt() -> None:
    cluster = Cluster()
    cluster.start("store", "store-0")
    for i in range(2):
        cluster.start("decode", f"decode-{i}")
        cluster.start("prefill", f"prefill-{i}")
    cluster.run(0.2)
    counts = twenty_requests(cluster)
    assert counts.resends == 0
    assert counts.split > 0


def two_kinds_of_nodes(cluster: Cluster) -> None:
    """A prefill worker on each of two nodes, a decode worker on each of two others, and four stores."""
    for node in "abcd":
        cluster.start("store", f"store-{node}", node)
    for node in "ab":
        cluster.start("prefill", f"prefill-{node}", node, slots=2)
    for node in "cd":
        cluster.start("decode", f"decode-{node}", node)
    cluster.run(0.2)


def test_workers_of_different_nodes_share_every_request() -> None:
    cluster = Cluster()
    two_kinds_of_nodes(cluster)
    counts = twenty_requests(cluster)
    assert counts.split > 15  # one prompt has a single page, and some are cached as a whole


PATIENT = msgspec.structs.replace(
    CONFIG, router=msgspec.structs.replace(CONFIG.router, attempt_timeout_ms=1_000_000, queue_timeout_ms=1_000_000)
)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("node", "abcd")
def test_no_attempt_stays_with_a_store_that_died(node: str, restarts: bool) -> None:
    """At whatever moment it dies: nothing here runs into a limit of time but the silence of the dead."""
    attempts = 0
    for moment in range(25):
        cluster = Cluster(PATIENT)
        two_kinds_of_nodes(cluster)
        cluster.submit("r0", 60, 10)
        cluster.run(1.0)
        for i in range(1, 6):  # all begin like the first; the prefill worker that made that can't take all
            order = submit(f"r{i}", 60 + 20 * i, 10)
            ours = pack_tokens([200 + i]) * 20 * i
            cluster.tell(msgspec.structs.replace(order, tokens=order.tokens[: -len(ours)] + ours))
        for _ in range(moment):
            cluster.round()
        (store,) = cluster.named(f"store-{node}")
        cluster.kill(store)
        if restarts:
            cluster.start("store", f"store-{node}", node)
        cluster.settle(limit=5.0)
        check_ends(cluster)
        stats = cluster.state.stats()
        assert sum(stats.counts.finished.values()) == 6
        attempts += stats.counts.attempts - 6
    assert attempts > 0, "none was there when it died"
