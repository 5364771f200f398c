"""Workers of one machine share its cores."""

import os

import msgspec
import pytest

from baton.config import Config, FurtherModel, ModelConfig, load
from baton.errors import StartupError
from deploy.control_plane import preflight
from deploy.placement.desired import ClusterScale, plan, workers_on
from deploy.processes import share_cores
from engine.device.gpus import VisibleGpus


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 2, 1), (8, 3, 2), (2, 1, 2), (1, 4, 1), (4, 0, 4)])
def test_each_gets_its_share(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    shared = share_cores(Config(), workers)
    assert (shared.prefill.threads, shared.decode.threads) == (threads, threads)


def test_what_is_set_stays() -> None:
    shared = share_cores(load(None, {"decode.threads": 7}), 1)
    assert shared.decode.threads == 7


def test_only_workers_of_the_node_count() -> None:
    specs = plan(load(None, {"router.host": "10.0.0.1"}), ClusterScale(2, 1), ["a", "b"])
    assert workers_on("a", specs) + workers_on("b", specs) == 3
    assert workers_on("c", specs) == 0


def test_doctor_counts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    config = load(None, {"cluster.prefill": 1, "cluster.decode": 1, "model.device": "cpu"})
    assert (preflight.cores(config).level, preflight.cores(config).text) == ("ok", "3 for 2 workers")
    ranks = load(None, {"decode.tensor_parallel_size": 3, "prefill.device": "cpu", "decode.device": "cpu"})
    assert (preflight.cores(ranks).level, preflight.cores(ranks).text) == ("warn", "3 for 2 workers of 4 ranks in all")
    several = msgspec.structs.replace(config, models=(FurtherModel(model=config.model, prefill=0, decode=2),))
    assert (preflight.cores(several).level, preflight.cores(several).text) == ("warn", "3 for 4 workers")


def test_doctor_looks_for_the_device_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: VisibleGpus())
    large = ModelConfig(path="/large", device="cuda")
    config = msgspec.structs.replace(load(None, {"model.device": "cpu"}), models=(FurtherModel(model=large),))
    with pytest.raises(StartupError, match="cuda"):
        preflight.check_device(config)
