"""Small simulated clusters, on a machine whose figures make sums that can be done by hand."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvstore.window_groups import NO_GROUPS, WindowGroups
from simulator.cluster import Layout, SimulatedCluster
from simulator.measure import Measures
from simulator.timing import DiskTimes, ModelTiming, StepTimes
from simulator.workloads import Arrival

PAGE = 512
STEP = StepTimes(fixed=0.01, token=1e-4, pair=0.0, row=0.001, context=1e-6)
COPY = 0.002  # seconds a page
MESSAGE, CALL = 0.001, 0.0001


def timing(
    disk: DiskTimes | None = None, start: float = 3.0, noise: float = 0.0, layers: int | None = None
) -> ModelTiming:
    return ModelTiming(
        about="round figures",
        token_bytes=1_000,
        max_context=100_000,
        kv_cache_bytes="100MB",
        host_cache_bytes="200MB",
        prefill=STEP,
        decode=STEP,
        copy=PAGE * 1_000 / COPY,
        network=1e9,
        network_latency=0.0005,
        message=MESSAGE,
        call=CALL,
        start=start,
        noise=noise,
        disk=disk,
        layers=layers,
        config={
            "prefill.max_num_batched_tokens": 4_096,
            "prefill.step_ms": 100,
            "decode.max_num_batched_tokens": 2_048,
        },
    )


def cluster(
    layout: str,
    *,
    per_node: int = 1,
    seed: int = 1,
    runs: bool = True,
    routers: int = 1,
    model: ModelTiming | None = None,
    checked: bool = False,
    groups: WindowGroups = NO_GROUPS,
    **settings: Any,
) -> SimulatedCluster:
    model = model or timing()
    config = model.configuration(PAGE, {name.replace("__", "."): value for name, value in settings.items()})
    return SimulatedCluster(
        Layout.parse(layout, per_node), model, config, seed, runs=runs, routers=routers, checked=checked, groups=groups
    )


def request(at: float, prompt: int, output: int, blocks: Sequence[int] = (1, 2, 3, 4)) -> Arrival:
    return Arrival(at, blocks, prompt, output, max_tokens=output + 100)


def serve(cluster: SimulatedCluster, load: Iterable[Arrival], limit: float = 600.0) -> Measures:
    """Serve the load. Every request must end once, and no process may hold anything afterwards."""
    measures = cluster.run(iter(load), limit)
    assert not measures.waiting
    assert not measures.ended_twice
    return measures
