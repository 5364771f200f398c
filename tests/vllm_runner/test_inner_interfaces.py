"""What of vLLM's inner interfaces this project uses, compared with the release that is installed.

After an upgrade these tests say what has changed before any model is loaded. Nothing here computes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine.vllm_runner import TESTED_ARCHITECTURES, compiling, draw, extension
from engine.vllm_runner.bring_up import _page_bytes, bring_up, engine_arguments
from engine.vllm_runner.child_environment import child_environment
from engine.vllm_runner.device_memory import LACKS
from engine.vllm_runner.layers import of_stages
from engine.vllm_runner.messages import Load
from engine.vllm_runner.pages import FP8
from engine.vllm_runner.requirements import CPU_HEADS, CPU_PAGE, Installation
from kvstore.layout import PageLayout

SOURCES = sorted(Path(extension.__file__).parent.glob("*.py"))
NEWER = hasattr(importlib.import_module("vllm.v1.engine.core"), "get_global_kv_cache_groups")  # 0.33
DRAFTS = {"method": "eagle", "model": "d", "num_speculative_tokens": 2}
LOADS = (Load("m", "auto", 8, 32, 4, 64, 1, drafts=DRAFTS), Load("m", "auto", None, 16, 4, 64, 1, "cuda", 0.5))


def imports() -> Iterator[tuple[str, str]]:
    """What our code imports of vLLM: modules and names."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                yield from ((node.module, alias.name) for alias in node.names)


def calls(name: str) -> list[set[str]]:
    """The keywords with which our code calls `name`."""
    return [
        {keyword.arg for keyword in node.keywords if keyword.arg}
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_a_release_that_is_served_is_installed():
    installation = Installation.find()
    assert not installation.is_wrong


@pytest.mark.parametrize(("module", "name"), sorted(set(imports())))
def test_all_that_is_imported_is_there(module: str, name: str):
    loaded = importlib.import_module(module)
    assert hasattr(loaded, name) or importlib.util.find_spec(f"{module}.{name}")


@pytest.mark.parametrize("order", LOADS, ids=["cpu", "cuda"])
def test_options_of_the_engine(order: Load):
    from vllm.engine.arg_utils import EngineArgs

    assert set(engine_arguments(order)) <= {field.name for field in dataclasses.fields(EngineArgs)}


def test_variables_of_the_environment():
    from vllm import envs

    variables = child_environment({}, "cuda", 1) | compiling.environment("cpu") | {"VLLM_RPC_BASE_PATH": ""}
    ours = {name for name in variables if name.startswith("VLLM_")}
    assert ours <= set(envs.environment_variables)


@pytest.mark.parametrize("name", ["SchedulerOutput", "NewRequestData"])
def test_what_a_step_is_made_of(name: str):
    """All fields that we fill in are there, and no other one lacks a default."""
    from vllm.v1.core.sched import output

    fields = dataclasses.fields(getattr(output, name))
    needed = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    keyword_sets = calls(name)
    assert keyword_sets
    for keywords in keyword_sets:
        assert needed <= keywords <= {field.name for field in fields}


def test_rows_that_go_on():
    from vllm.v1.core.sched.output import CachedRequestData

    rows = CachedRequestData.make_empty()
    for name in ("req_ids", "new_token_ids", "num_computed_tokens", "num_output_tokens", "new_block_ids"):
        assert getattr(rows, name) == [], name


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_rows_of_latents():
    from vllm.model_executor.layers.attention import mla_attention

    names = {"block_table_tensor", "seq_lens_device", "query_start_loc_device", "num_decode_tokens"}
    assert names <= set(parameters(mla_attention.MLACommonMetadataBuilder._build_decode))
    assert "decode_threshold" in parameters(mla_attention.split_decodes_and_prefills)
    assert mla_attention.QueryLenSupport.VARLEN


def needed(function: Any) -> set[str]:
    """The parameters that a call has to have."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)
    return {
        name
        for name, one in inspect.signature(function).parameters.items()
        if name != "self" and one.kind in named and one.default is inspect.Parameter.empty
    }


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("get_class", ["vllm_config"]),
        ("get_kv_cache_specs", []),
        ("get_supported_kv_cache_layouts", []),
        ("set_kv_cache_layout", ["layout_name", "cp_kv_cache_interleave_size"][: 1 + NEWER]),
        ("determine_available_memory", []),
        ("initialize_from_config", ["kv_cache_configs"]),
        ("compile_or_warm_up_model", []),
        ("collective_rpc", ["method", "timeout", "args", "kwargs", "non_block"]),
        ("execute_model", ["scheduler_output"]),
        ("sample_tokens", ["grammar_output"]),
    ],
)
def test_calls_of_the_executor(method: str, expected: list[str]):
    from vllm.v1.executor.abstract import Executor

    function = getattr(Executor, method)
    assert parameters(function)[: len(expected)] == expected
    assert needed(function) <= set(expected)


def test_it_notices_a_parameter_more():
    def set_kv_cache_layout(self: object, layout_name: str, size: int, patience: float = 0.0, **more: object): ...

    assert needed(set_kv_cache_layout) == {"layout_name", "size"}


def test_the_order_of_the_bring_up():
    from vllm.v1.engine import core

    assert parameters(core.resolve_kv_cache_layout)[:3] == ["vllm_config", "supported_layouts", "kv_cache_specs"]
    groups = ["global_kv_cache_groups"] * NEWER
    expected = ["vllm_config", "kv_cache_specs", "available_memory", *groups]
    assert parameters(core.get_kv_cache_configs) == expected
    if NEWER:
        assert parameters(core.get_global_kv_cache_groups)[:2] == expected[:2]
    text = inspect.getsource(core.EngineCore._initialize_kv_caches)
    order = [
        "register_all_kvcache_specs(", "get_kv_cache_specs(", "resolve_kv_cache_layout(", "set_kv_cache_layout(",
        "determine_available_memory(", "get_kv_cache_configs(", '"update_max_model_len"',
        "generate_scheduler_kv_cache_config(",
    ]  # fmt: skip
    places = [text.find(call) for call in order]
    assert -1 not in places
    assert places == sorted(places)


def test_what_vllm_says_where_memory_is_lacking():
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker, utils

    plans = importlib.import_module(core.get_kv_cache_configs.__module__)
    sources = " ".join(inspect.getsource(module) for module in (plans, gpu_worker, utils))
    joined = "".join(re.split(r'"\s+f?"', sources))  # texts over several lines
    assert [text for text in LACKS if text not in joined] == []


def test_what_is_read_and_replaced_in_the_model_runners():
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import input_batch, model_runner
    from vllm.v1.worker.gpu_input_batch import InputBatch

    read = ("sampler", "kv_caches", "device", "model", "execute_model_state")
    staged = ("input_batch", "intermediate_tensors", "max_num_tokens", "dtype")
    for module, more in ((gpu_model_runner, staged), (model_runner, ())):
        source = inspect.getsource(module.GPUModelRunner)
        for attribute in read + more:
            assert f"self.{attribute} = " in source or f"self.{attribute}: " in source, (module, attribute)
        assert "hidden_states" in module.ExecuteModelState._fields
    assert "req_ids" in dir(InputBatch)
    assert "input_batch" in model_runner.ExecuteModelState._fields
    assert "req_ids" in {field.name for field in dataclasses.fields(input_batch.InputBatch)}


def test_a_worker_knows_its_configuration_and_which_model_runner_it_has():
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase

    source = inspect.getsource(WorkerBase.__init__)
    configs = ("vllm_config", "model_config", "cache_config", "parallel_config")
    for attribute in (*configs, "rank", "distributed_init_method"):
        assert f"self.{attribute} = " in source, attribute

    assert "self.use_v2_model_runner = vllm_config.use_v2_model_runner" in inspect.getsource(Worker.__init__)


def calls_of_the_sampler(function: Any, name: str = "sampler") -> Iterator[tuple[list[str], set[str | None]]]:
    """The arguments and keywords with which vLLM's function calls its sampler."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{name}":
            yield [ast.unparse(one) for one in node.args], {keyword.arg for keyword in node.keywords}


def test_how_the_first_model_runner_calls_its_sampler():
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert parameters(draw.FirstDraw.__call__) == ["logits", "sampling_metadata"]
    assert {field.name for field in dataclasses.fields(SamplerOutput)} >= {"sampled_token_ids", "logprobs_tensors"}
    assert list(calls_of_the_sampler(GPUModelRunner._sample)) == [([], {"logits", "sampling_metadata"})]


def test_how_the_first_model_runner_calls_its_draft():
    """`accept` stands in the place of the rejection sampler, and `Guesses` in that of the draft's own draws."""
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1 import outputs
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.spec_decode.medusa import MedusaProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    ((accepted, keywords),) = calls_of_the_sampler(GPUModelRunner._sample, "rejection_sampler")
    assert (len(accepted), accepted[2], keywords) == (4, "logits", set())
    assert len(parameters(draw.FirstDraw.accept)) == 4
    assert parameters(SpecDecodeBaseProposer._greedy_sample) == ["hidden_states"]
    assert parameters(MedusaProposer.propose)[:2] == ["num_speculative_tokens", "target_hidden_states"]
    assert "self._greedy_sample(hidden_states)" in inspect.getsource(SpecDecodeBaseProposer._sample_draft_tokens)
    assert "self.drafter.propose" in inspect.getsource(GPUModelRunner.propose_draft_token_ids)
    assert not needed(GPUModelRunner.take_draft_token_ids)
    assert {"req_ids", "draft_token_ids"} <= set(inspect.signature(outputs.DraftTokenIds).parameters)
    assert not needed(SpeculativeConfig.uses_draft_kv_cache)
    assert isinstance(VllmConfig.num_speculative_tokens, property)


def test_our_draw_is_what_vllms_profile_measures():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    rows = torch.rand(6, 8)
    runner: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None)),
        model=SimpleNamespace(compute_logits=lambda hidden: hidden), device=torch.device("cpu"),
        sampler=SimpleNamespace(logprobs_mode="raw_logprobs"), input_batch=SimpleNamespace(req_ids=[]),
        speculative_config=None,
    )  # fmt: skip
    runner.sampler = ours = draw.FirstDraw(runner)
    output = GPUModelRunner._dummy_sampler_run.__wrapped__(runner, rows)
    assert output.sampled_token_ids.shape == (6, 1)
    assert len(ours.drawn) == 6
    order = inspect.getsource(bring_up)
    assert order.index('"baton_take_draws"') < order.index("determine_available_memory()")


def test_how_the_second_model_runner_calls_its_sampler():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    assert list(calls_of_the_sampler(GPUModelRunner.sample)) == [(["logits", "input_batch"], set())]
    arguments = {"sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"}
    needed = {one.name for one in dataclasses.fields(SamplerOutput) if one.default is dataclasses.MISSING}
    assert needed == arguments


def test_how_steps_of_the_second_model_runner_are_collected():
    """Executors know our `LaunchedStep` by its class. Steps take tokens from where we put those that we are told."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor
    from vllm.v1.worker.gpu import buffer_utils, model_runner, states

    for module in (uniproc_executor, multiproc_executor):
        assert "isinstance(output, AsyncModelRunnerOutput)" in inspect.getsource(module).replace("result,", "output,")
    assert "self.use_async_scheduling = scheduler_config.async_scheduling" in inspect.getsource(multiproc_executor)
    assert {"req_id_to_index", "last_sampled_tokens"} <= set(re.findall(r"self\.(\w+)", inspect.getsource(states)))
    assert "self.req_states.last_sampled_tokens" in inspect.getsource(model_runner.GPUModelRunner.prepare_inputs)
    assert buffer_utils._DEFAULT_MAX_CONCURRENCY == 2, "so many steps may be under way"


def test_what_our_extension_adds_has_no_name_of_vllms_workers():
    from vllm.v1.worker.gpu_worker import Worker

    ours = {name for name in vars(extension.BatonExtension) if not name.startswith("__")}
    assert not ours & set(dir(Worker))


@pytest.mark.parametrize(("held", "dtype"), [("auto", "bfloat16"), ("fp8", "float8_e4m3fn")])
def test_the_bytes_of_a_page(held: str, dtype: str):
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        use_mla=False,
        is_attention_free=False,
        get_total_num_kv_heads=lambda: 2,
        get_total_num_hidden_layers=lambda: 3,
        get_head_size=lambda: 64,
    )
    caches = SimpleNamespace(cache_dtype=held, block_size=32)
    config = SimpleNamespace(model_config=model, cache_config=caches, speculative_config=None)
    assert _page_bytes(config) == PageLayout(3, 2, 64, 32, dtype).page_bytes
    config.speculative_config = SimpleNamespace(draft_model_config=model, uses_draft_kv_cache=lambda: True)
    assert _page_bytes(config) == PageLayout(6, 2, 64, 32, dtype).page_bytes


def test_what_a_layer_with_states_says_of_them():
    """`bring_up` marks some by a field that only several ranks look at."""
    from vllm.v1.kv_cache_interface import MambaSpec

    assert {"shapes", "dtypes", "tp_replicated"} <= {field.name for field in dataclasses.fields(MambaSpec)}


def test_what_the_kernels_for_cpus_take():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEADS
    assert set(FP8) <= set(CPUAttentionBackend.supported_kv_cache_dtypes)
    (sizes,) = CPUAttentionBackend.get_supported_kernel_block_sizes()
    assert getattr(sizes, "base", sizes) == CPU_PAGE
    assert [layout.name for layout in CPUAttentionBackend.supported_kv_cache_layouts()] == ["LBHNC"]


def test_what_asks_a_product_for_its_device():
    """`lora_on_cpu` replaces it: the int8 kernel for CPUs leaves no weight to ask."""
    from vllm.lora.layers import base_linear, utils

    assert parameters(base_linear._get_lora_device) == ["base_layer"]
    assert "self.device = _get_lora_device(self.base_layer)" in inspect.getsource(base_linear)
    assert "base_layer.weight.device" in inspect.getsource(utils._get_lora_device)


def test_how_products_on_a_cpu_are_made():
    """`products_on_cpu` replaces the function. It is looked up in its module once weights have been loaded."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    assert parameters(utils.dispatch_cpu_unquantized_gemm) == ["layer", "remove_weight"]
    for module in (linear, vocab_parallel_embedding):
        lines = [line.strip() for line in inspect.getsource(module).splitlines()]
        assert "from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm" in lines
    assert "return layer.cpu_linear(x, weight, bias)" in inspect.getsource(utils.cpu_unquantized_gemm)


def test_how_layers_are_divided_among_stages():
    from vllm.distributed.utils import get_pp_indices

    for count in range(1, 13):
        for stages in range(1, count + 1):
            expected = [range(*get_pp_indices(count, stage, stages)) for stage in range(stages)]
            assert of_stages(count, stages) == expected


def test_the_registry_of_architectures_is_read_from_its_source():
    from vllm.model_executor.models import registry

    installation = Installation.find()
    assert installation.architectures is not None
    assert installation.architectures <= set(registry._VLLM_MODELS)
    assert installation.architectures >= TESTED_ARCHITECTURES
