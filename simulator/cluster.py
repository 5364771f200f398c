"""A simulated cluster: its processes, their nodes, and their starts and ends."""

from __future__ import annotations

import gc
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from baton.config import Config
from baton.errors import ConfigError
from baton.messages import ModelCard, Namespace, Peer, Role, SamplingParams, WorkerRole
from kvstore.window_groups import NO_GROUPS, WindowGroups
from router.events import RequestEnded
from router.generation_request import GenerationRequest
from router.placement.policy import PlacementPolicy
from router.queueing.admission import ModelLimits
from simulator.adversary import AdversarialAgenda, AdversarialNetwork, Adversary
from simulator.clock import Agenda, Stops
from simulator.device import PageMemory
from simulator.disk import SimulatedDisk
from simulator.measure import Measures
from simulator.network import SimulatedNetwork
from simulator.router import SimulatedRouter
from simulator.store import SimulatedStore
from simulator.timing import ModelTiming, Noise, calibration
from simulator.transport import NoMemory
from simulator.worker import SimulatedWorker
from simulator.workloads import VOCAB, Arrival

_ASK_AGAIN = 0.5  # seconds until a client asks another router after its own has died
_BEGIN = 2.0  # seconds until the first request: all processes have joined by then
_STOPS = (VOCAB - 1,)
_SAMPLING = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Layout:
    """The number of workers of each role, and of workers per node and store. Each role is spread over all nodes."""

    prefill: int
    decode: int
    per_node: int = 1

    @classmethod
    def parse(cls, text: str, per_node: int = 1) -> Layout:
        """Parse `8P+8D`, or `16D` for a colocated cluster. Raises ConfigError."""
        match = re.fullmatch(r"(?:(\d+)P\+)?(\d+)D", text)
        if not match or int(match[2]) < 1:
            raise ConfigError(f"{text!r} is no cluster; write 8P+8D, or 16D for a colocated one")
        return cls(int(match[1] or 0), int(match[2]), per_node)

    @property
    def workers(self) -> Iterator[tuple[WorkerRole, str, str]]:
        """Role, name and node of each worker."""
        total = self.prefill + self.decode
        nodes = -(-total // self.per_node)
        for place in range(total):
            node = f"node-{place % nodes:04}"
            if place < self.prefill:
                yield "prefill", f"prefill-{place:04}", node
            else:
                yield "decode", f"decode-{place - self.prefill:04}", node


class SimulatedCluster:
    """All simulated processes. A name is permanent; its processes start and end."""

    def __init__(
        self, layout: Layout, timing: ModelTiming, config: Config, seed: int, placer: PlacementPolicy | None = None, *,
        runs: bool = True, routers: int = 1, checked: bool = False, adversary: Adversary | None = None,
        groups: WindowGroups = NO_GROUPS,
    ) -> None:  # fmt: skip
        """Start all processes.

        `runs`: repeatable decode steps are simulated as one event, which is much faster and hardly changes results.
        `routers`: the number of routers that share the workers. Requests go to them in turn.
        `checked`: pages have contents. A step that reads a wrong one, and a client that gets a wrong token, fail the
        simulation. Raises ConfigError with a disk, whose pages have none.
        `adversary` chooses the order of events.
        `groups`: those of the model's layers that have pages of their own.
        """
        self.agenda = Agenda() if adversary is None else AdversarialAgenda(adversary)
        self.layout, self.timing, self.config = layout, timing, config
        if checked and timing.disk is not None:
            raise ConfigError("a checked cluster has no disk tier: the pages on a simulated disk have no contents")
        self._seed, self._runs, self._checked = seed, runs, checked
        self._rng = random.Random(seed)
        self.network = (
            SimulatedNetwork(self.agenda, timing, random.Random(seed + 1))
            if adversary is None
            else AdversarialNetwork(self.agenda, timing, adversary)
        )
        self.measures = Measures(self.agenda)
        self._page_bytes = page_bytes = config.pages.page_size * timing.token_bytes
        self._namespace = Namespace(b"simulated model.", "simulated", "bfloat16", config.pages.page_size, 1, "split", 1)
        self._groups = groups
        pool = config.decode.kv_cache_bytes.on_cpu // page_bytes // (1 + groups.count)
        speeds = {"prefill": timing.prefill, "decode": timing.decode}
        self._cards = {
            role: ModelCard(
                self._namespace, page_bytes, VOCAB, timing.max_context, pool, calibration(times),
                rings=timing.layers is not None and not groups.count,
            )
            for role, times in speeds.items()
        }  # fmt: skip
        self._numbers = itertools.count(1)
        self._places: dict[str, tuple[WorkerRole, str]] = {name: (role, node) for role, name, node in layout.workers}
        nodes = sorted({node for _, node in self._places.values()})
        self._disks = {node: SimulatedDisk(config.disk, timing.disk, self.agenda) for node in nodes}
        self._slowness: dict[str, float] = {}  # of workers, by name; 1 if absent
        self.ends = 0  # number of ended processes
        self.stores: dict[str, SimulatedStore] = {}  # by node
        self.workers: dict[str, SimulatedWorker] = {}  # by name
        self.busy = dict.fromkeys(self._places, 0.0)  # seconds in steps, of processes that are gone
        self._limits, self._placer = ModelLimits(VOCAB, timing.max_context), placer
        self._router_names = [f"router-{place}" if place else "router" for place in range(routers)]
        self._addresses = [partial(self._at, name) for name in self._router_names]
        self._homes: dict[str, str] = {}  # the router of each open request, by request name
        self._ended_placed: Counter[str] = Counter()  # by routers that are gone
        self._router_turns, self._requests = itertools.count(1), itertools.count(1)
        self.routers: dict[str, SimulatedRouter] = {}  # by name
        for name in self._router_names:
            self.start_router(name)
        self._coming = 0  # later turns of sessions that are planned
        self._fronts = dict.fromkeys(self._router_names, 0.0)  # when they are done with all requests so far
        self._queued: list[int] = []
        self.agenda.after(_BEGIN, self._look)
        for node in nodes:
            self.start_store(node)
        for name in self._places:
            self.start_worker(name)

    # --- starting and ending ------------------------------------------------------------------------------------------

    @property
    def router(self) -> SimulatedRouter:
        """The first live router."""
        return next(iter(self.routers.values()))

    def router_of(self, request: str) -> SimulatedRouter:
        """Return the router of a request that is open, or is ending now."""
        return self.routers[self._homes[request]]

    def start_router(self, name: str) -> None:
        if name in self.routers:
            return
        peer = self._peer("router", name, f"node-{name}")
        place = self._router_names.index(name)
        router = SimulatedRouter(
            place, peer, self.config, self._limits, self._placer, self.agenda, self.network, self,
        )  # fmt: skip
        self.routers[name] = router
        self.network.join(peer.incarnation, router)
        self._again(peer.incarnation, router.tick)

    def end_router(self, name: str) -> None:
        """Kill a router. Its clients' streams break, and they ask any live router again, including its successor."""
        router = self.routers.pop(name, None)
        if router is None:
            return
        self.ends += 1
        self.network.leave(router.incarnation)
        self._ended_placed += Counter(_placed(router))
        for request in sorted(request for request, home in self._homes.items() if home == name):
            del self._homes[request]
            self.agenda.after(_ASK_AGAIN, self._ask_again, request)

    def _at(self, name: str) -> SimulatedRouter | None:
        return self.routers.get(name)

    def start_worker(self, name: str, role: WorkerRole | None = None) -> None:
        """Start a worker in its configured role, or in `role`."""
        if name in self.workers:
            return
        configured, node = self._places[name]
        role = role or configured
        peer = self._peer(role, name, node)
        noise = Noise(self.timing.noise, (self._seed, peer.pid))
        noise.slowness = self._slowness.get(name, 1.0)
        worker = SimulatedWorker(
            role, peer, self._cards[role], self.config, self.timing, self.agenda, self.network, self._addresses,
            self.measures.outputs, noise, partial(self.agenda.after, 0.0, self._change_role, name), runs=self._runs,
            checked=self._checked, groups=self._groups,
        )  # fmt: skip
        self.workers[name] = worker
        self.network.join(peer.incarnation, worker)
        if (store := self.stores.get(node)) is not None:
            worker.store_up(store)
        self._again(peer.incarnation, worker.beat, self._rng.random() * self.config.cluster.heartbeat_ms / 1_000)

    def end_worker(self, name: str) -> None:
        """Kill a worker. The kernel tells its node's store."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self.ends += 1
        self._leave(worker)
        if (store := self.stores.get(worker.peer.node)) is not None:
            store.worker_gone(worker)

    def _change_role(self, name: str, role: WorkerRole) -> None:
        """Replace a worker's incarnation by one of another role. The process keeps its loaded weights."""
        worker = self.workers.get(name)
        if worker is None or worker.role == role:  # a repeated order
            return
        del self.workers[name]
        self._leave(worker)
        if (store := self.stores.get(worker.peer.node)) is not None:
            store.worker_left(worker)
        self.start_worker(name, role)

    def _leave(self, worker: SimulatedWorker) -> None:
        worker.end()
        self.busy[worker.peer.name] += worker.busy
        self.network.leave(worker.peer.incarnation)

    def start_store(self, node: str) -> None:
        if node in self.stores:
            return
        peer = self._peer("store", f"store-{node}", node)
        store = SimulatedStore(
            peer, self.config, self._namespace, self._page_bytes, self.agenda, self.network, self._addresses,
            self._disks[node], PageMemory(self.config.pages.page_size) if self._checked else NoMemory(),
        )  # fmt: skip
        self.stores[node] = store
        self.network.join(peer.incarnation, store)
        for worker in self.workers.values():
            if worker.peer.node == node:
                worker.store_up(store)
        self._again(peer.incarnation, store.beat, self._rng.random() * self.config.cluster.heartbeat_ms / 1_000)

    def end_store(self, node: str) -> None:
        """Kill a store and its arena. Workers of its node notice at once, other processes by missing heartbeats."""
        store = self.stores.pop(node, None)
        if store is None:
            return
        self.ends += 1
        self.network.leave(store.peer.incarnation)
        for worker in self.workers.values():
            if worker.peer.node == node:
                worker.store_lost()

    def slow_down(self, name: str, factor: float) -> None:
        """Multiply the step times of this worker by `factor`, also for its later processes."""
        self._slowness[name] = factor
        if (worker := self.workers.get(name)) is not None:
            worker.slow_down(factor)

    def stop_repeatedly(self, name: str, stopped: float, period: float) -> None:
        """Stop this worker's process, heartbeats included, for the first `stopped` seconds of each period from now on.
        Its steps must not be simulated as runs."""
        self.workers[name].stops = Stops(stopped, period)

    def _peer(self, role: Role, name: str, node: str) -> Peer:
        number = next(self._numbers)
        return Peer(role, name, node, f"{name}-{number}", number)

    def _again(self, incarnation: str, do: Callable[[], float], first: float = 0.0) -> None:
        """Call `do` repeatedly while that process lives. Each call returns the seconds until the next."""

        def once() -> None:
            if self.network.process(incarnation) is not None:
                self.agenda.after(do(), once)

        self.agenda.after(first, once)

    # --- the load -----------------------------------------------------------------------------------------------------

    def run(self, load: Iterator[Arrival], limit: float = float("inf")) -> Measures:
        """Serve the load to its end, or until `limit` seconds have passed."""
        self._exhausted = False
        self._next(load)
        measures = self.measures
        with _rarely_collected():
            self.agenda.run(lambda: self._exhausted and not self._coming and measures.over == measures.arrived, limit)
        return measures

    def advance(self, seconds: float) -> None:
        """Let time pass, beside any load that has been submitted."""
        until = self.agenda.now + seconds
        self.agenda.run(lambda: False, until)

    def _next(self, load: Iterator[Arrival]) -> None:
        arrival = next(load, None)
        if arrival is None:
            self._exhausted = True
        else:
            self.agenda.at(_BEGIN + arrival.at, self._submit, arrival, load)

    def _submit(self, arrival: Arrival, load: Iterator[Arrival]) -> None:
        self.submit(arrival)
        self._next(load)

    def submit(self, arrival: Arrival, router: str = "") -> str:
        """Submit a request now, to that router if it lives; return the request's name."""
        name = f"r{next(self._requests)}"
        self.measures.begin(name, arrival)
        self._ask(name, arrival, router)
        return name

    def _ask(self, name: str, arrival: Arrival, chosen: str = "") -> None:
        """Submit a request to the chosen router or the next live one, or retry later if there is none."""
        if not self.routers:
            self.agenda.after(_ASK_AGAIN, self._ask, name, arrival)
            return
        living = list(self.routers)
        home = living[next(self._router_turns) % len(living)]
        if chosen in self.routers:
            home = chosen
        self._homes[name] = home
        if (front := self.timing.front) is None:
            self._enter(name, arrival, home, self.agenda.now)
            return
        began = max(self.agenda.now, self._fronts[home])
        self._fronts[home] = began + front.request + front.token * arrival.prompt
        self.agenda.at(self._fronts[home], self._enter, name, arrival, home, self.agenda.now)

    def _enter(self, name: str, arrival: Arrival, home: str, received: float) -> None:
        """Hand a request over from the front to its router, which may have died and been replaced meanwhile."""
        router = self.routers.get(home)
        if router is None or self._homes.get(name) != home:
            return  # its client asks again
        router.submit(
            GenerationRequest(
                name=name,
                tokens=arrival.tokens(),
                sampling=_SAMPLING,
                received=received,
                max_tokens=arrival.max_tokens,
                stop_token_ids=_STOPS,
                tenant=arrival.tenant,
                priority=arrival.priority,
                ttft=arrival.ttft,
                tpot=arrival.tpot,
            )
        )

    def _ask_again(self, name: str) -> None:
        again = f"{name}+"
        self._ask(again, self.measures.ask_again(name, again))

    def tokens(self, request: str, tokens: Sequence[int], spacing: float) -> None:
        """Forward to the measures; see `simulator.router.Clients`."""
        if self._checked:
            self.measures.check(request, tokens)
        self.measures.tokens(request, len(tokens), spacing)

    def request_ended(self, end: RequestEnded) -> None:
        """Forward to the measures; see `simulator.router.Clients`."""
        if self._checked:
            self.measures.check_end(end)
        ended = self.measures.request_ended(end)
        self._homes.pop(end.request, None)
        if ended is None or ended[0].play is None:
            return
        following = ended[0].play.next(*ended, self.agenda.now - _BEGIN)
        if following is not None:
            self._coming += 1
            self.agenda.after(following.at, self._follow, following)

    def _follow(self, arrival: Arrival) -> None:
        self._coming -= 1
        self.submit(arrival)

    # --- results -----------------------------------------------------------------------------------------------------

    def queue_lengths(self) -> dict[str, float]:
        """Return mean and maximum of the total length of all routers' queues, sampled once a second."""
        lengths = self._queued or [0]
        return {"mean": sum(lengths) / len(lengths), "most": max(lengths)}

    def _look(self) -> None:
        self._queued.append(sum(router.state.stats().queued for router in self.routers.values()))
        self.agenda.after(1.0, self._look)

    @property
    def placed(self) -> dict[str, int]:
        """Attempts with a prefill worker (`split`) and without (`local`), of all past and present routers."""
        total = Counter(self._ended_placed)
        for router in self.routers.values():
            total.update(_placed(router))
        return {"split": total["split"], "local": total["local"]}

    def utilisation(self) -> dict[str, float]:
        """Return the share of time that workers of each configured role spent in steps, and network cards in
        sending."""
        seconds = max(self.agenda.now - _BEGIN, 1e-9)
        busy: dict[str, list[float]] = {"network": [self.network.busy[node] for node in self._disks]}
        for name, (role, _) in self._places.items():
            live = self.workers[name].busy if name in self.workers else 0.0
            busy.setdefault(role, []).append(self.busy[name] + live)
        return {what: sum(each) / len(each) / seconds for what, each in sorted(busy.items())}


def _placed(router: SimulatedRouter) -> dict[str, int]:
    counts = router.state.stats().counts
    return {"split": counts.split, "local": counts.local}


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Run the garbage collector rarely within this context.

    Millions of objects live as long as the cluster, and scanning them at Python's default rate costs a sixth of the
    time.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
