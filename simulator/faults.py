"""Faults at random times from a seed: process deaths, network partitions, message loss, slow workers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulator.cluster import SimulatedCluster


@dataclass(frozen=True)
class Faults:
    """Fault rates of the whole cluster. A dead process is restarted at once, and is up after `timing.start`."""

    worker_deaths: float = 0.0  # a minute
    store_deaths: float = 0.0  # a minute
    router_deaths: float = 0.0  # a minute
    splits: float = 0.0  # a minute: partitions between a router and half of the workers and stores
    split_seconds: float = 10.0  # on average
    loss: float = 0.0  # of messages to and from routers
    slow: float = 0.0  # share of the workers whose steps take twice as long
    calm: float = 5.0  # seconds at the start without faults other than loss

    def inject(self, cluster: SimulatedCluster, seed: int) -> None:
        """Plan all faults. Call before the cluster runs."""
        rng = random.Random(seed + 2)
        cluster.network.loss = self.loss
        for name in sorted(cluster.workers):
            if rng.random() < self.slow:
                cluster.slow_down(name, 2.0)
        workers, stores, routers = sorted(cluster.workers), sorted(cluster.stores), sorted(cluster.routers)
        self._kill(cluster, self.worker_deaths, workers, cluster.end_worker, cluster.start_worker, rng)
        self._kill(cluster, self.store_deaths, stores, cluster.end_store, cluster.start_store, rng)
        self._kill(cluster, self.router_deaths, routers, cluster.end_router, cluster.start_router, rng)

        def split() -> None:
            others = sorted(workers + [store.peer.name for store in cluster.stores.values()])
            router = rng.choice(routers)
            cut = {(router, other) for other in rng.sample(others, len(others) // 2)}
            cluster.network.cuts |= cut
            cluster.agenda.after(rng.expovariate(1 / self.split_seconds), cluster.network.cuts.difference_update, cut)

        self._strikes(cluster, self.splits, split, rng)

    def _kill(
        self, cluster: SimulatedCluster, rate: float, names: Sequence[str], end: Callable[[str], None],
        start: Callable[[str], None], rng: random.Random,
    ) -> None:  # fmt: skip
        """Kill processes of these names at random, one at a time. A process that is already dead is not affected."""

        def strike() -> None:
            name = rng.choice(names)
            end(name)
            cluster.agenda.after(cluster.timing.start, start, name)

        self._strikes(cluster, rate, strike, rng)

    def _strikes(self, cluster: SimulatedCluster, rate: float, strike: Callable[[], None], rng: random.Random) -> None:
        """Call `strike` as a Poisson process of `rate` a minute."""
        if not rate:
            return

        def again() -> None:
            strike()
            cluster.agenda.after(rng.expovariate(rate / 60), again)

        cluster.agenda.after(self.calm + rng.expovariate(rate / 60), again)
