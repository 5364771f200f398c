"""A crowded cluster of two routers and an adversary: small pages, pools and arenas; requests that share prefixes."""

import itertools
import random
from dataclasses import dataclass

from baton.messages import WorkerRole
from kvstore.keys import pack_tokens
from router.events import PIN, PinPrefix, UnpinPrefix
from simulator.adversary import Adversary
from simulator.cluster import Layout, SimulatedCluster
from simulator.workloads import Arrival
from tests.simulator.simulated import timing
from tests.support.wait_graph import assert_no_cycle

PAGE = 4  # tokens
POOL = 40  # device pages of a worker
ARENA = 120  # pages of a store
ROUTERS = ("router", "router-1")
JOINED = 2.0  # seconds until all processes have joined
_SETTINGS = {
    "cluster.heartbeat_ms": 250, "cluster.heartbeat_timeout_ms": 1_000, "cluster.step_timeout_ms": 5_000,
    "router.max_attempts": 4, "router.queue_timeout_ms": 60_000, "router.attempt_timeout_ms": 4_000,
    "prefill.max_num_batched_tokens": 8, "prefill.max_num_seqs": 2, "prefill.store_timeout_ms": 2_000,
    "decode.max_num_batched_tokens": 16, "decode.fetch_timeout_ms": 2_000, "store.lease_ms": 3_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt(Arrival):
    """A request with a prompt of these tokens."""

    own: bytes = b""

    def tokens(self) -> bytes:
        return self.own


class Crowd:
    """The cluster, and what a test may do to it."""

    def __init__(self, layout: str = "1P+2D", seed: int = 0, per_node: int = 3) -> None:
        """All processes have joined, without anything of note. From then on the adversary has its way."""
        self.dice = random.Random(seed)
        self.adversary = Adversary(random.Random(seed), late=0.0, standstill=0.0)
        page_bytes = PAGE * timing().token_bytes
        config = timing().configuration(
            PAGE,
            {
                **_SETTINGS, "prefill.kv_cache_bytes": POOL * page_bytes, "decode.kv_cache_bytes": POOL * page_bytes,
                "store.host_cache_bytes": ARENA * page_bytes,
            },
        )  # fmt: skip
        self.cluster = SimulatedCluster(
            Layout.parse(layout, per_node), timing(), config, seed, routers=len(ROUTERS), checked=True,
            adversary=self.adversary,
        )  # fmt: skip
        self._pins = itertools.count(1)
        self.homes: dict[str, str] = {}  # the router that each request was sent to
        self.cluster.advance(JOINED)
        self.wild()

    def wild(self, late: float = 0.1, standstill: float = 0.02, loss: float = 0.0) -> None:
        self.adversary.late, self.adversary.standstill, self.adversary.loss = late, standstill, loss

    # --- clients ------------------------------------------------------------------------------------------------------

    def submit(self, router: str, tokens: int, output: int) -> str:
        """Send a request. Prompts begin alike, so that requests of both routers share pages."""
        start = [7] * min(tokens, PAGE * self.dice.randrange(6))
        prompt = start + [self.dice.randrange(1, 50) for _ in range(tokens - len(start))]
        name = self.cluster.submit(
            Prompt(self.cluster.agenda.now, (), tokens, output, output + 10, own=pack_tokens(prompt)), router
        )
        self.homes[name] = router
        return name

    def submit_some(self, count: int) -> None:
        """Send as many requests to each router."""
        for _ in range(count):
            for router in ROUTERS:
                self.submit(router, self.dice.randrange(5, 60), self.dice.randrange(20, 40))

    def pin(self, router: str, pages: int, ttl: float) -> None:
        """Ask that a prefix be pinned."""
        wish = f"{PIN}{next(self._pins)}"
        self.cluster.routers[router].tell(PinPrefix(wish, "p", pack_tokens([7] * (PAGE * pages)), ttl))

    def unpin(self, router: str) -> None:
        for pin in self.cluster.routers[router].state.pins(self.cluster.agenda.now):
            self.cluster.routers[router].tell(UnpinPrefix(pin.id))

    # --- faults -------------------------------------------------------------------------------------------------------

    def replace_router(self, name: str) -> None:
        self.cluster.end_router(name)
        self.cluster.start_router(name)

    def replace_worker(self, name: str, role: WorkerRole | None = None) -> None:
        self.cluster.end_worker(name)
        self.cluster.start_worker(name, role)

    def replace_store(self, node: str) -> None:
        self.cluster.end_store(node)
        self.cluster.start_store(node)

    def fault(self) -> None:
        """Let some process die, or a link be cut or mended, as the dice say."""
        dice, cluster = self.dice, self.cluster
        match dice.randrange(4):
            case 0:
                self.replace_router(dice.choice(ROUTERS))
            case 1:
                self.replace_worker(dice.choice(sorted(cluster.workers)))
            case 2:
                self.replace_store(dice.choice(sorted(cluster.stores)))
            case _:
                cluster.network.cuts ^= {(dice.choice(ROUTERS), dice.choice(sorted(cluster.workers)))}

    # --- checks -------------------------------------------------------------------------------------------------------

    def events(self, count: int) -> None:
        """Let so many events happen, and check all states after each tenth."""
        agenda = self.cluster.agenda
        for _ in range(0, count, 10):
            most = agenda.happened + 10
            agenda.run(lambda most=most: agenda.happened >= most)
            self.check()

    def check(self) -> None:
        """Check every state, and that processes do not wait for each other in a circle. Tokens and pages are checked by
        the cluster."""
        for router in self.cluster.routers.values():
            router.state.validate()
            assert_no_cycle(router.state.waits())
        for store in self.cluster.stores.values():
            store.state.validate()
        for worker in self.cluster.workers.values():
            worker.state.validate()
        assert not self.cluster.measures.ended_twice

    def settle(self, seconds: float = 300.0) -> None:
        """Let all requests end, without further faults. Then no process holds anything for one."""
        self.cluster.network.cuts.clear()
        self.wild(late=0.0, standstill=0.0)
        until, measures = self.cluster.agenda.now + seconds, self.cluster.measures
        self.cluster.agenda.run(lambda: not measures.waiting, until)
        assert not measures.waiting
        for name in ROUTERS:
            self.unpin(name)
        self.cluster.advance(6.0)
        self.check()
        for worker in self.cluster.workers.values():
            assert not worker.state.heartbeat(0).load.running
            assert worker.state.blocks.available == POOL, worker.peer.name
            assert not worker.state.leases, worker.peer.name
        for store in self.cluster.stores.values():
            stats = store.state.stats(self.cluster.agenda.now)
            assert stats.leases == stats.reserved == stats.held == stats.pins == 0, store.peer.name
        assert set(measures.ends) <= {"finished"}, measures.ends
