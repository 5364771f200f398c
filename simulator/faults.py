"""What goes wrong, at random times from a seed: deaths, lost messages, slow workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulator.cluster import Cluster


@dataclass(frozen=True)
class Faults:
    """Rates are of the whole cluster. What dies is started again at once, and takes `timing.start` to be there."""

    worker_deaths: float = 0.0  # a minute
    store_deaths: float = 0.0  # a minute
    loss: float = 0.0  # of messages to and from the router
    slow: float = 0.0  # share of the workers that take twice as long for everything
    calm: float = 5.0  # seconds at the start in which nobody dies

    def inject(self, cluster: Cluster, seed: int) -> None:
        """Plan all that goes wrong. Call before the cluster runs."""
        rng = random.Random(seed + 2)
        cluster.network.loss = self.loss
        for name in sorted(cluster.workers):
            if rng.random() < self.slow:
                cluster.slow_down(name, 2.0)
        workers, stores = sorted(cluster.workers), sorted(cluster.stores)
        self._kill(cluster, self.worker_deaths, workers, cluster.end_worker, cluster.start_worker, rng)
        self._kill(cluster, self.store_deaths, stores, cluster.end_store, cluster.start_store, rng)

    def _kill(
        self, cluster: Cluster, rate: float, names: Sequence[str], end: Callable[[str], None],
        start: Callable[[str], None], rng: random.Random,
    ) -> None:  # fmt: skip
        """One after the other, as a Poisson process; who is dead already is spared."""
        if not rate:
            return

        def strike() -> None:
            name = rng.choice(names)
            end(name)
            cluster.agenda.after(cluster.timing.start, start, name)
            cluster.agenda.after(rng.expovariate(rate / 60), strike)

        cluster.agenda.after(self.calm + rng.expovariate(rate / 60), strike)
