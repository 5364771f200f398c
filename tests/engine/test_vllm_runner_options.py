"""What vLLM's runner is started with, on a CPU and on a GPU. Neither vLLM nor a GPU is needed."""

import json
import stat
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from baton.config import load as config_of
from baton.errors import FolderUntrusted, StartupError
from engine.vllm_runner import child_environment as environment
from engine.vllm_runner import compiling
from engine.vllm_runner.bring_up import NULL_BLOCKS, engine_arguments
from engine.vllm_runner.child_environment import child_environment
from engine.vllm_runner.messages import Load
from worker import load_runner

CPU = Load("m", "auto", 100, 32, 8, 64, 2)
GPU = Load("m", "auto", None, 16, 8, 64, 2, "cuda", 0.45)


def test_on_a_cpu_pages_are_counted_here():
    arguments = engine_arguments(CPU)
    assert arguments["num_gpu_blocks_override"] == 100 + NULL_BLOCKS
    assert not {"max_model_len", "quantization", "enable_expert_parallel"} & arguments.keys()
    more = {"max_model_len": 128, "quantization": "fp8", "expert_parallel": True}
    own = {"max_model_len": 128, "quantization": "fp8", "enable_expert_parallel": True}
    assert engine_arguments(structs.replace(CPU, **more)) == arguments | own


def test_compiled_models_lie_in_a_folder_of_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/true")
    folder = tmp_path / "baton" / "vllm"
    variables = {"VLLM_CACHE_ROOT": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    assert compiling.environment("cpu") == variables | {"CXX": "/bin/true", "VLLM_USE_AOT_COMPILE": "0"}
    assert compiling.environment("cuda") == variables
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(FolderUntrusted, match=r"vllm belongs to user \d+ with mode 777"):
        compiling.environment("cuda")


def test_without_a_compiler_or_headers_nothing_is_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/true")
    assert not compiling.problem("cpu")
    (tmp_path / "Python.h").unlink()
    assert "headers of Python" in compiling.problem("cpu")
    monkeypatch.setenv("CXX", "/no/compiler")
    assert "/no/compiler" in compiling.problem("cpu")
    assert not compiling.problem("cuda")


def test_on_a_gpu_vllm_finds_out_how_many_pages_and_positions_fit():
    arguments = engine_arguments(GPU)
    assert "num_gpu_blocks_override" not in arguments
    assert arguments["max_model_len"] == -1
    assert arguments["gpu_memory_utilization"] == 0.45
    assert not arguments["enforce_eager"]


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [("cuda", None, "0"), ("cuda:1", None, "1"), ("cuda:1", "4,6", "6"), ("cuda", "GPU-ab, GPU-cd", "GPU-ab")],
)
def test_a_child_sees_one_gpu(device: str, visible: str | None, seen: str):
    environ = {"PATH": "/bin"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    variables = child_environment(environ, device, 3)
    assert variables["CUDA_VISIBLE_DEVICES"] == seen
    assert (variables["OMP_NUM_THREADS"], variables["PATH"]) == ("3", "/bin")
    assert "CUDA_VISIBLE_DEVICES" not in child_environment({}, "cpu", 1)


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [("cuda", "2,3", "2,3"), ("cuda", "GPU-ab,GPU-cd,GPU-ef", "GPU-ab,GPU-cd"), ("cuda:1", None, "1,2")],
)
def test_ranks_see_the_gpus_that_their_worker_was_lent(device: str, visible: str | None, seen: str):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert child_environment(environ, device, 4, 2)["CUDA_VISIBLE_DEVICES"] == seen
    with pytest.raises(StartupError, match="cuda and 1 more and CUDA_VISIBLE_DEVICES is 4"):
        child_environment({"CUDA_VISIBLE_DEVICES": "4"}, "cuda", 1, 2)


def test_vllm_chooses_its_model_runner_on_a_gpu_alone_unless_the_user_says_otherwise():
    name = "VLLM_USE_V2_MODEL_RUNNER"
    assert child_environment({}, "cpu", 1)[name] == "0"
    assert name not in child_environment({}, "cuda:1", 1)
    for device in ("cpu", "cuda"):
        assert child_environment({name: "1"}, device, 1)[name] == "1"


def test_bits_must_not_depend_on_other_rows_unless_they_may():
    exact, free = child_environment({}, "cuda", 1), child_environment({}, "cuda", 1, exact=False)
    assert exact["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in free
    exact, free = child_environment({}, "cpu", 1), child_environment({}, "cpu", 1, exact=False)
    assert exact["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert "VLLM_CPU_ATTN_SPLIT_KV" not in free


def test_on_a_cpu_intels_openmp_is_loaded_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(environment, "OPENMP", tmp_path / "libiomp5.so")
    assert "LD_PRELOAD" not in child_environment({}, "cpu", 1)
    (tmp_path / "libiomp5.so").touch()
    variables = child_environment({"LD_PRELOAD": "/lib/libtcmalloc.so"}, "cpu", 1)
    assert variables["LD_PRELOAD"] == f"/lib/libtcmalloc.so:{tmp_path}/libiomp5.so"
    assert variables["KMP_BLOCKTIME"] == "1"
    assert child_environment({"KMP_BLOCKTIME": "5"}, "cpu", 1)["KMP_BLOCKTIME"] == "5"
    chosen = {"LD_PRELOAD": "/opt/libiomp5.so"}
    assert child_environment(chosen, "cpu", 1)["LD_PRELOAD"] == chosen["LD_PRELOAD"]
    assert "LD_PRELOAD" not in child_environment({}, "cuda", 1)


def test_a_gpu_that_is_hidden_is_told():
    with pytest.raises(StartupError, match=r"cuda:2 .*4,6"):
        child_environment({"CUDA_VISIBLE_DEVICES": "4,6"}, "cuda:2", 1)


@pytest.mark.parametrize(
    ("device", "settings", "pages", "share"),
    [
        ("cpu", {"decode.kv_cache_bytes": "1MiB"}, 16, 0.9),
        ("cuda", {}, None, 0.9),
        ("cuda:1", {"decode.num_gpus": 0.5, "decode.gpu_memory_utilization": 0.8}, None, 0.4),
        ("cuda", {"decode.kv_cache_bytes": "2MiB"}, 32, 0.9),
    ],
)
def test_a_workers_settings_reach_its_runner(
    device: str, settings: dict[str, object], pages: int | None, share: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"torch_dtype": "float16"}))
    options: dict[str, Any] = {}
    monkeypatch.setattr(
        load_runner.VllmRunner, "load", lambda *values, **named: options.update(named, num_pages=values[2])
    )
    config = config_of(overrides={"model.path": str(tmp_path), "pages.page_size": 32} | settings)
    load_runner._vllm(config, "decode", device)
    assert (options["num_pages"], options["device"]) == (pages, device)
    assert options["memory_share"] == pytest.approx(share)
    assert options["max_rows"] == 256
    more = config_of(overrides={"model.path": str(tmp_path), "pages.page_size": 32, "prefill.max_num_seqs": 300})
    load_runner._vllm(more, "decode", device)
    assert options["max_rows"] == 300, "it may become a prefill worker"
