"""Which GPU, and how much of it, each worker gets; and the nodes of a role."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from baton.config import Config, load
from baton.errors import StartupError
from deploy import local
from deploy.control_plane import preflight
from deploy.control_plane.actor_registry import hardware_of
from deploy.control_plane.reports import gpu_text
from deploy.placement.desired import ClusterScale, ProcessSpec, plan, worker_role
from deploy.placement.gpu_sharing import (
    GpuShare,
    NodeHardware,
    actor_options,
    nodes_for,
    share_gpus,
    wanted_gpus,
    with_share,
)
from engine.device.gpus import Gpu, VisibleGpus

OPEN = {"router.host": "0.0.0.0"}
H100 = {"ray.io/accelerator-type": "H100"}
H200 = {"ray.io/accelerator-type": "H200"}

parts = st.one_of(st.none(), st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0]))
workers = st.dictionaries(st.sampled_from([f"w{i}" for i in range(8)]), parts, max_size=8)


def fits(shares: dict[str, GpuShare], gpus: int) -> bool:
    """Whether each share lies on one GPU, or on as many as it has, and no GPU is lent more than once."""
    sums: dict[int, float] = defaultdict(float)
    for share in shares.values():
        assert share.index is not None
        whole = max(1, round(share.share))
        assert 0 <= share.index <= gpus - whole
        for index in range(share.index, share.index + whole):
            sums[index] += min(1.0, share.share)
    return all(total < 1 + 1e-9 for total in sums.values())


@pytest.mark.parametrize(
    ("workers", "gpus", "share"),
    [(1, 1, 1.0), (2, 1, 0.5), (3, 1, 0.3333), (2, 2, 1.0), (3, 2, 0.5), (8, 8, 1.0), (9, 8, 0.5), (2, 8, 1.0)],
)
def test_equal_shares(workers: int, gpus: int, share: float) -> None:
    shares = share_gpus(dict.fromkeys(map(str, range(workers))), gpus)
    assert {each.share for each in shares.values()} == {share}
    assert len(shares) == workers
    assert fits(shares, gpus)


def test_a_share_that_was_asked_for_leaves_the_rest_to_the_others() -> None:
    shares = share_gpus({"small": 0.25, "other": None}, 1)
    assert (shares["small"].share, shares["other"].share) == (0.25, 0.5)


@given(workers, st.integers(1, 4))
def test_no_gpu_is_lent_twice_and_nothing_changes_when_asked_again(demand: dict[str, float | None], gpus: int) -> None:
    shares = share_gpus(demand, gpus)
    assert fits(shares, gpus)
    assert set(shares) <= set(demand)
    assert share_gpus(demand, gpus, shares) == shares
    if all(share is None for share in demand.values()):
        assert set(shares) == set(demand)
        assert len({share.share for share in shares.values()}) <= 1


@given(workers, workers, st.integers(1, 4), st.booleans())
def test_running_workers_keep_what_they_have(
    before: dict[str, float | None], after: dict[str, float | None], gpus: int, known: bool
) -> None:
    held = share_gpus(before, gpus)
    if not known:  # as Ray, which chooses the GPU itself
        held = {name: GpuShare(share.share) for name, share in held.items()}
    shares = share_gpus(before | after, gpus, held)
    assert held.items() <= shares.items()
    if known:
        assert fits(shares, gpus)


def test_a_newcomer_gets_what_is_left_or_nothing() -> None:
    half = {"a": GpuShare(0.5)}
    assert share_gpus({"a": None, "b": None}, 1, half)["b"].share == 0.5
    full = {"a": GpuShare(0.5), "b": GpuShare(0.5)}
    assert set(share_gpus({"a": None, "b": None, "c": None}, 1, full)) == {"a", "b"}


# --- nodes -----------------------------------------------------------------------------------------------------------


def placed(settings: dict[str, Any], hardware: dict[str, NodeHardware], scale: ClusterScale) -> dict[str, ProcessSpec]:
    specs = plan(load(None, OPEN | settings), scale, list(hardware), hardware=hardware)
    return {spec.name: spec for spec in specs if spec.role in ("prefill", "decode")}


def test_each_role_goes_to_its_kind_of_gpu() -> None:
    """As Splitwise has it: prompts on one kind, decoding on another."""
    hardware = {"head": NodeHardware(), "p": NodeHardware(2, H100), "d": NodeHardware(2, H200)}
    selectors = {"prefill.node_selector": H100, "decode.node_selector": H200}
    workers = placed(selectors, hardware, ClusterScale(2, 2))
    places = [(name, spec.node, spec.gpu and spec.gpu.share) for name, spec in workers.items()]
    assert places == [(f"{role}-{n}", role[0], 1.0) for role in ("prefill", "decode") for n in range(2)]


def test_a_selector_that_no_node_meets_is_told() -> None:
    workers = placed({"decode.node_selector": H200}, {"a": NodeHardware(1, H100)}, ClusterScale(1, 1))
    assert workers["decode-0"].node == ""
    assert workers["decode-0"].blocked == (
        "no node has the labels of decode.node_selector: ray.io/accelerator-type=H200"
    )
    assert workers["prefill-0"].blocked == ""
    specs = plan(load(None, {"decode.node_selector": H200}), ClusterScale(0, 1), ["a"])
    assert [spec.name for spec in specs] == ["router", "decode-0"], "no store for a worker that is nowhere"


def test_workers_go_where_the_fewest_share_a_gpu() -> None:
    hardware = {"cpu": NodeHardware(), "small": NodeHardware(1), "large": NodeHardware(4)}
    workers = placed({}, hardware, ClusterScale(2, 3))
    assert sorted(spec.node for spec in workers.values()) == ["large"] * 4 + ["small"]
    assert {spec.gpu.share for spec in workers.values() if spec.gpu} == {1.0}


def test_roles_may_compute_on_different_devices() -> None:
    hardware = {"cpu": NodeHardware(), "gpu": NodeHardware(1)}
    workers = placed({"prefill.device": "cuda", "decode.device": "cpu"}, hardware, ClusterScale(1, 2))
    assert (workers["prefill-0"].node, workers["prefill-0"].gpu) == ("gpu", GpuShare(1.0, 0))
    assert {workers["decode-0"].node, workers["decode-1"].node} == {"cpu", "gpu"}
    assert workers["decode-1"].gpu is None
    missing = placed({"decode.device": "cuda"}, {"cpu": NodeHardware()}, ClusterScale(0, 1))
    assert missing["decode-0"].blocked == "the device of decode workers is cuda, and Ray knows no GPU on cpu"


def test_one_worker_too_many_is_told() -> None:
    hardware = {"a": NodeHardware(1)}
    running = {"decode-0": GpuShare(1.0)}
    specs = plan(Config(), ClusterScale(0, 2), ["a"], {"decode-0": "a"}, hardware=hardware, held=running)
    workers = {spec.name: spec for spec in specs}
    assert (workers["decode-0"].gpu, workers["decode-0"].blocked) == (GpuShare(1.0), "")
    assert "other workers hold the 1 GPUs of a" in workers["decode-1"].blocked


@given(
    st.integers(0, 4), st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.sampled_from(["auto", "cpu", "cuda", "cuda:1"]), st.sampled_from(["", "cpu", "cuda"]),
)  # fmt: skip
def test_plans_are_stable(prefill: int, decode: int, gpus: list[int], device: str, prefill_device: str) -> None:
    config = load(None, OPEN | {"model.device": device, "prefill.device": prefill_device})
    hardware = {f"n{i}": NodeHardware(count) for i, count in enumerate(gpus)}
    scale = ClusterScale(prefill, decode)
    specs = plan(config, scale, list(hardware), hardware=hardware)
    nodes = {spec.name: spec.node for spec in specs if spec.node}
    shares = {spec.name: spec.gpu for spec in specs if spec.gpu is not None}
    assert plan(config, scale, list(hardware), nodes, hardware=hardware, held=shares) == specs
    for node, has in hardware.items():
        assert fits({name: share for name, share in shares.items() if nodes[name] == node}, has.gpus)
    if not any(gpus):
        on_cpus = plan(config, scale, list(hardware))
        assert specs == on_cpus, "GPUs change nothing where there are none"
        assert all(not spec.blocked for spec in specs if config.device_of("prefill") != "cuda" != device)


def test_nodes_of_a_role_without_selector_are_all() -> None:
    assert nodes_for(Config(), "decode", ["a", "b"], {}) == (["a", "b"], "")


# --- what a worker is told -------------------------------------------------------------------------------------------


def test_the_configuration_of_a_worker_with_a_share() -> None:
    config = with_share(load(None, {"prefill.device": "cuda:3"}), GpuShare(0.5, 1))
    assert (config.decode.device, config.decode.num_gpus) == ("cuda:1", 0.5)
    assert config.prefill.device == "cuda:3", "chosen by hand"
    assert with_share(Config(), GpuShare(1.0)).decode.device == "cuda"
    assert with_share(Config(), None).decode.device == "cpu", "Ray may let it see GPUs that others have"
    assert with_share(load(None, {"model.device": "cuda"}), None).decode.device == "cuda"


def test_options_of_actors() -> None:
    assert actor_options("auto", 0.0, node_gpus=0) == {}
    assert actor_options("auto", 0.5, node_gpus=1)["num_gpus"] == 0.5
    for device, variable, value in (
        ("cpu", "CUDA_VISIBLE_DEVICES", ""),
        ("cuda:1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
    ):
        options = actor_options(device, 0.0, node_gpus=2)
        assert (options["num_gpus"], options["runtime_env"]["env_vars"]) == (0, {variable: value})


def test_every_ray_sets_the_gpus_of_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's environment says. Ray 2.50 takes any text for true, later ones read it."""
    for name, value in actor_options("auto", 0.5, node_gpus=1)["runtime_env"]["env_vars"].items():
        monkeypatch.setenv(name, value)
        assert not os.environ.get(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_what_ray_says_of_a_node() -> None:
    node = {"NodeID": "1", "Resources": {"CPU": 8.0, "GPU": 2.0}, "Labels": H100}
    assert hardware_of(node) == NodeHardware(2, H100)
    assert hardware_of({"NodeID": "2", "Resources": {}, "Labels": None}) == NodeHardware()


@pytest.mark.parametrize(
    ("share", "ids", "text"), [(0.0, (), ""), (1.0, ("3",), "3"), (0.5, ("0",), "0.5 of 0"), (0.3333, (), "0.33 of ?")]
)
def test_what_status_says_of_a_gpu(share: float, ids: tuple[str, ...], text: str) -> None:
    assert gpu_text(share, ids) == text


def test_a_cluster_without_ray_shares_the_gpus_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over nodes that are only names, and a worker that is started again keeps its own."""
    monkeypatch.setattr(local, "visible_gpus", lambda: VisibleGpus((Gpu("H100", 2**36),)))
    cluster = local.LocalCluster(Config(), tmp_path, nodes=["a", "b"])
    specs = {spec.name: spec for spec in cluster._specs.values()}
    assert cluster._gpu_of(specs["prefill-0"]) == cluster._gpu_of(specs["decode-0"]) == GpuShare(0.5, 0)
    cluster._place("decode-1", "")
    with pytest.raises(StartupError, match="decode-1 has no room: other workers hold the 1 GPUs"):
        cluster._gpu_of(next(spec for spec in cluster._specs.values() if spec.name == "decode-1"))
    assert cluster._gpu_of(specs["decode-0"]) == GpuShare(0.5, 0)
    cluster.close()
    on_cpu = local.LocalCluster(load(None, {"decode.device": "cpu"}), tmp_path)
    assert on_cpu._gpu_of(on_cpu._specs["decode-0"]) is None
    assert on_cpu._gpu_of(on_cpu._specs["prefill-0"]) == GpuShare(1.0, 0)
    on_cpu.close()


def test_a_worker_with_ranks_has_as_many_whole_gpus_side_by_side() -> None:
    shares = share_gpus({"a": 2.0, "b": None, "c": None}, 4)
    assert shares == {"a": GpuShare(2.0, 0), "b": GpuShare(1.0, 2), "c": GpuShare(1.0, 3)}
    assert share_gpus({"a": 2.0, "b": 2.0, "c": None}, 4, {"c": GpuShare(0.5, 1)}) == {
        "a": GpuShare(2.0, 2),
        "c": GpuShare(0.5, 1),
    }
    assert share_gpus({"a": 4.0}, 2) == {}
    assert set(share_gpus({"a": 2.0, "b": 2.0}, 4, {"a": GpuShare(2.0)})) == {"a", "b"}


def test_ranks_decide_how_many_gpus_a_worker_wants() -> None:
    config = load(None, {"model.tensor_parallel_size": 2, "prefill.tensor_parallel_size": 1, "prefill.num_gpus": 0.5})
    assert (wanted_gpus(config, "prefill"), wanted_gpus(config, "decode")) == (0.5, 2.0)
    own = with_share(config, GpuShare(2.0, 1)).decode
    assert (own.device, own.num_gpus) == ("cuda:1", 1.0)


def place_of(spec: ProcessSpec) -> tuple[str, GpuShare | None, str]:
    return spec.node, spec.gpu, spec.blocked


RANKS = {"model.engine": "vllm", "decode.tensor_parallel_size": 2}


def test_no_node_has_a_gpu_for_each_rank() -> None:
    """There are enough of them in all, but a worker is on one node."""
    hardware = {"a": NodeHardware(1), "b": NodeHardware(1), "c": NodeHardware()}
    workers = placed(RANKS, hardware, ClusterScale(1, 1))
    assert workers["decode-0"].node == ""
    assert workers["decode-0"].blocked == (
        "the 2 ranks of a decode worker need 2 GPUs of one node, and there are 1 on a, 1 on b; lower "
        "decode.tensor_parallel_size, or add a node with 2 GPUs"
    )
    assert place_of(workers["prefill-0"]) == ("a", GpuShare(1.0, 0), "")
    on_cpus = placed(RANKS | {"decode.device": "cpu"}, hardware, ClusterScale(1, 1))
    assert place_of(on_cpus["decode-0"]) == ("a", None, "")


def test_ranks_find_the_node_that_is_large_enough_however_small_workers_are_placed() -> None:
    hardware = {"large": NodeHardware(4), "small": NodeHardware(1)}
    settings = RANKS | {"decode.tensor_parallel_size": 1, "prefill.tensor_parallel_size": 4}
    workers = placed(settings, hardware, ClusterScale(1, 1))
    assert {name: (spec.node, spec.gpu) for name, spec in workers.items()} == {
        "prefill-0": ("large", GpuShare(4.0, 0)),
        "decode-0": ("small", GpuShare(1.0, 0)),
    }
    two = placed(RANKS, {"a": NodeHardware(2), "b": NodeHardware(3)}, ClusterScale(1, 2))
    assert {name: (spec.node, spec.gpu and spec.gpu.share) for name, spec in two.items()} == {
        "prefill-0": ("b", 1.0),
        "decode-0": ("b", 2.0),
        "decode-1": ("a", 2.0),
    }


def test_one_worker_with_ranks_too_many_is_told() -> None:
    workers = placed(RANKS, {"a": NodeHardware(3), "b": NodeHardware(2)}, ClusterScale(0, 3))
    assert [workers[name].blocked for name in ("decode-0", "decode-1")] == ["", ""]
    assert workers["decode-2"].blocked == (
        "its ranks need 2 GPUs of one node, and other workers hold too many of the GPUs (3 of a, 2 of b); lower "
        "decode.tensor_parallel_size or the number of workers, or add a node"
    )


def test_a_worker_with_ranks_is_replaced_where_there_is_room() -> None:
    """Its node has gone; of those that are left, one has lent its GPUs to others, and one has too few."""
    hardware = {"few": NodeHardware(1), "lent": NodeHardware(4, lent=3.0), "free": NodeHardware(2)}
    specs = plan(
        load(None, OPEN | RANKS), ClusterScale(0, 2), list(hardware), {"decode-0": "gone", "decode-1": "lent"},
        hardware=hardware, held={"decode-1": GpuShare(2.0)},
    )  # fmt: skip
    workers = {spec.name: spec for spec in specs}
    assert (workers["decode-1"].node, workers["decode-1"].gpu) == ("lent", GpuShare(2.0))
    assert place_of(workers["decode-0"]) == ("free", GpuShare(2.0, 0), "")


@given(
    st.integers(0, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4),
    st.lists(st.integers(0, 8), min_size=1, max_size=4),
)  # fmt: skip
def test_each_worker_with_ranks_has_its_gpus_on_one_node_or_a_reason(
    prefill: int, decode: int, prefill_ranks: int, decode_ranks: int, gpus: list[int]
) -> None:
    ranks = {"prefill.tensor_parallel_size": prefill_ranks, "decode.tensor_parallel_size": decode_ranks}
    config = load(None, OPEN | ranks | {"model.engine": "vllm", "model.device": "cuda"})
    hardware = {f"n{i}": NodeHardware(count) for i, count in enumerate(gpus)}
    specs = plan(config, ClusterScale(prefill, decode), list(hardware), hardware=hardware)
    workers = [spec for spec in specs if spec.role in ("prefill", "decode")]
    for spec in workers:
        assert bool(spec.blocked) == (spec.gpu is None)
        if spec.gpu is not None and config.ranks_of(worker_role(spec.role)) > 1:
            assert spec.gpu.share == config.ranks_of(worker_role(spec.role))
    for node, has in hardware.items():
        assert fits({spec.name: spec.gpu for spec in workers if spec.gpu and spec.node == node}, has.gpus)


@pytest.mark.parametrize(
    ("device", "gpus", "lack"),
    [
        ("cuda", 2, ""),
        ("cuda:1", 3, ""),
        ("cpu", 0, ""),
        ("cuda", 1, "the 2 ranks of a decode worker need 2 GPUs of one machine, and this one has 1"),
        ("cuda:1", 2, "need 2 GPUs of one machine, from cuda:1 on, and this one has 2"),
    ],
)
def test_preflight_counts_the_gpus_of_ranks(device: str, gpus: int, lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: VisibleGpus((Gpu("H100", 2**36),) * gpus, problem="none"))
    config = load(None, RANKS | {"decode.device": device, "prefill.device": "cpu"})
    if not lack:
        preflight.check_device(config)
        return
    with pytest.raises(StartupError, match=lack):
        preflight.check_device(config)
    preflight.check_device(msgspec.structs.replace(config, router=load(None, OPEN).router))  # others may have them


def test_a_cluster_without_ray_has_too_few_gpus_for_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "visible_gpus", lambda: VisibleGpus((Gpu("H100", 2**36),)))
    cluster = local.LocalCluster(load(None, RANKS), tmp_path)
    with pytest.raises(StartupError, match=r"its 2 ranks need 2 GPUs .* and this machine has 1"):
        cluster._gpu_of(cluster._specs["decode-0"])
    cluster.close()
