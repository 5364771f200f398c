"""Workers of a simulated cluster change their roles as its load asks for it, and no request is lost by that."""

import numpy as np
import pytest

from deploy.load.workload import Lengths
from simulator.cluster import SimulatedCluster
from simulator.faults import Faults
from simulator.workloads import Random, Wishes
from tests.simulator.simulated import cluster, serve

pytestmark = pytest.mark.slow


def load(prompt: int, output: int, rate: float) -> Random:
    """Every request has these lengths, and nothing is cached."""
    return Random(rate, Lengths("uniform", prompt, prompt), Lengths("uniform", output, output))


PROMPTS = load(4_000, 4, 2.7)  # 1.2 prefill workers' time, and hardly any of a decode worker's
OUTPUTS = load(600, 400, 1.0)  # nearly all of a decode worker's time, and hardly any of a prefill worker's


def world(layout: str, roles: str = "auto") -> SimulatedCluster:
    return cluster(layout, router__roles=roles, router__disaggregation="always")


def roles(world: SimulatedCluster) -> list[str]:
    return sorted(worker.role for worker in world.workers.values())


def test_a_decode_worker_turns_to_prompts_where_those_are_too_many_for_the_others() -> None:
    last: dict[str, float] = {}
    for wish in ("manual", "auto"):
        served = world("1P+3D", wish)
        measures = serve(served, PROMPTS.arrivals(400, Wishes(), 1))
        assert measures.ends == {"finished": 400}
        assert (roles(served).count("prefill") > 1) == (wish == "auto")
        last[wish] = float(np.median(measures.table()["ttft"][-100:]))
    assert last["auto"] < last["manual"] / 10


def test_a_prefill_worker_turns_to_outputs_where_those_are_too_many() -> None:
    served = world("3P+1D")
    measures = serve(served, OUTPUTS.arrivals(150, Wishes(), 1))
    assert measures.ends == {"finished": 150}
    assert roles(served).count("decode") > 1


@pytest.mark.parametrize("seed", range(2))
def test_workers_may_die_while_they_change(seed: int) -> None:
    served = world("1P+3D")
    Faults(worker_deaths=10, store_deaths=3, calm=2.5).inject(served, seed)
    assert serve(served, PROMPTS.arrivals(250, Wishes(), seed)).ends == {"finished": 250}
    assert served.ends > 5
