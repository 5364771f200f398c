"""vLLM's executor with a model and empty pages, without vLLM's own engine and scheduler. For the child alone.

The order is that of the engine core of vLLM 0.32 and 0.33: configuration, executor, KV cache specs and layout, memory,
caches, warm-up.
"""

# pyright: reportMissingImports=false

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.errors import UnsupportedModel
from engine.vllm_runner.device_memory import await_memory
from engine.vllm_runner.latent_rows import take_several_rows
from engine.vllm_runner.layers import STATE_WINDOW
from engine.vllm_runner.lora_on_cpu import use_the_cpu
from engine.vllm_runner.messages import Load
from engine.vllm_runner.pages import group_layers, largest_page
from engine.vllm_runner.products_on_cpu import take_products
from engine.vllm_runner.ranks import fork_ranks
from engine.vllm_runner.requirements import STAGED_GROUPS, Installation, wrong_version

EXTENSION = "engine.vllm_runner.extension.BatonExtension"
_BLOCKWISE = "BHLNC"  # a block is one range, KV heads outermost. Kernels for CUDA take it, those for a CPU don't
_ONLINE = {"int8": "int8_per_channel_weight_only"}
"""What vLLM calls a quantization of `model.quantization`, where it is another name."""
_MLA_ON_CPU = {
    "attention_backend": "CPU_MLA",  # the same on every processor; AMX has another one with other bits
    # vLLM's own operation for rotary embeddings leaves the strided tensors of MLA as they are: wrong tokens, no error.
    "compilation_config": {"custom_ops": ["none"]},
}
NULL_BLOCKS = 1  # vLLM keeps its first block for padding; page i is block i + 1


def bring_up(order: Load) -> tuple[Any, Any, int, Sequence[int]]:
    """Return vLLM's configuration, its executor, which holds the loaded model, the model's context in tokens, and the
    windows of its groups of layers, 0 for the group without one. The configuration names a shorter context where there
    are fewer pages. Raises UnsupportedModel for a model whose layers keep other K and V than pages have, and for a page
    size that vLLM's kernels don't take."""
    import torch
    import vllm

    if Installation(vllm.__version__).is_wrong:
        raise UnsupportedModel(wrong_version(vllm.__version__, "cpu"))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
    from vllm.v1.engine import core
    from vllm.v1.executor.abstract import Executor

    load_general_plugins()
    arguments = engine_arguments(order)
    config = EngineArgs(**arguments).create_engine_config()
    if config.model_config.use_mla and order.device == "cpu":
        arguments |= _MLA_ON_CPU
        if order.drafts:  # a draft has a backend of its own
            arguments["speculative_config"]["attention_backend"] = _MLA_ON_CPU["attention_backend"]
        config = EngineArgs(**arguments).create_engine_config()
        take_several_rows()
    context: int = config.model_config.max_model_len
    if order.num_pages is not None:
        if context > (longest := order.num_pages * order.page_size):
            # vLLM wants room for one sequence of the model's full length.
            config = EngineArgs(**arguments | {"max_model_len": longest}).create_engine_config()
        # Else vLLM measures what is free and refuses a model whose weights take more than `memory_share` of all memory.
        config.cache_config.kv_cache_memory_bytes = (order.num_pages + NULL_BLOCKS) * _page_bytes(config)
    elif order.device == "cuda":
        await_memory(order.gpus, order.memory_share)
    if not config.model_config.use_mla and (heads := config.model_config.get_total_num_kv_heads()) % order.stage_ranks:
        raise UnsupportedModel(
            f"{heads} KV heads can't be shared evenly by {order.stage_ranks} ranks; lower tensor_parallel_size"
        )
    if order.stages > 1 and config.use_v2_model_runner:
        raise UnsupportedModel(
            "pipeline stages run with the first of vLLM's model runners; unset VLLM_USE_V2_MODEL_RUNNER"
        )
    if order.ranks > 1 and order.device == "cpu":
        fork_ranks()
    if order.max_loras and order.device == "cpu":
        use_the_cpu()
    if order.companion and config.model_config.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        take_products()
    if order.device == "cpu" and config.model_config.dtype == torch.float32:
        from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_products

        # Those for AMX in int8 take inputs of 16 bits alone, and vLLM looks at the weights only.
        scaled_products.check_cpu_sgl_kernel = lambda *_: False
    if order.ranks > 1 and config.use_v2_model_runner:
        config.scheduler_config.async_scheduling = True  # each rank answers a step on a thread beside the next one
    executor = Executor.get_class(config)(config)
    executor.collective_rpc("baton_take_draws")
    core.register_all_kvcache_specs(config)
    specs = [_divided(one) for one in executor.get_kv_cache_specs()]
    supported = executor.get_supported_kv_cache_layouts()
    if order.device == "cuda" and all(_BLOCKWISE in names for names in supported):
        # What VLLM_KV_CACHE_LAYOUT would do; without it vLLM prefers other layouts.
        config.cache_config.kv_cache_layout = _BLOCKWISE
    layout = core.resolve_kv_cache_layout(config, supported, [one for worker in specs for one in worker.values()])
    layers = {name: spec for worker in specs for name, spec in worker.items()}
    has_groups = order.device == "cpu" and (_has_windows(layers) or _has_states(layers))
    if has_groups and order.stages > 1:
        raise UnsupportedModel(STAGED_GROUPS)
    config.scheduler_config.disable_hybrid_kv_cache_manager = not has_groups
    more: list[Any] = []
    if hasattr(core, "get_global_kv_cache_groups"):  # 0.33
        more.append(groups := core.get_global_kv_cache_groups(config, specs))
        config.adjust_dcp_kv_cache_interleave_size(groups)
        executor.set_kv_cache_layout(layout.name, config.parallel_config.cp_kv_cache_interleave_size)
    else:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

        groups = get_kv_cache_groups(config, layers)
        executor.set_kv_cache_layout(layout.name)
    if order.num_pages is not None:
        config.cache_config.num_gpu_blocks_override = order.num_pages * len(groups) + NULL_BLOCKS
    before = config.model_config.max_model_len
    caches = core.get_kv_cache_configs(config, specs, executor.determine_available_memory(), *more)
    if (fitting := config.model_config.max_model_len) != before:
        executor.collective_rpc("update_max_model_len", args=(fitting,))
    for cache in caches:
        cache.kv_cache_layout = config.cache_config.kv_cache_layout
    whole = generate_scheduler_kv_cache_config(caches)
    if len(whole.kv_cache_groups) != 1 and not has_groups:
        raise UnsupportedModel(f"vLLM keeps {len(whole.kv_cache_groups)} kinds of pages for this model; one is served")
    windows = _windows(whole.kv_cache_groups)
    main = whole.kv_cache_groups[windows.index(0)].kv_cache_spec
    block_size = order.page_size if _is_state(main) else main.block_size
    if block_size != order.page_size:
        raise UnsupportedModel(f"vLLM's kernels take pages of {block_size} tokens; set pages.page_size to that")
    config.cache_config.num_gpu_blocks = whole.num_blocks
    config.cache_config.block_size = block_size
    _, hash_block_size = resolve_kv_cache_block_sizes(whole, config)
    for cache in caches:
        cache.hash_block_size = hash_block_size
    executor.initialize_from_config(caches)
    executor.compile_or_warm_up_model()  # it drops all adapters
    for request in lora_requests(order).values():
        if request is not None:
            add_adapter(executor, request)
    return config, executor, context, windows


def _has_windows(specs: Mapping[str, Any]) -> bool:
    """Whether layers with one window stand beside at most as many layers without one, and all keep K and V of one size.
    Then vLLM makes groups of them, one without a window, each with blocks of its own."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    count = Counter(specs.values())
    main = sum(layers for kind, layers in count.items() if isinstance(kind, FullAttentionSpec))
    windowed = sum(layers for kind, layers in count.items() if isinstance(kind, SlidingWindowSpec))
    alike = len({(kind.page_size_bytes, kind.block_size) for kind in count}) == 1
    return alike and len(count) == 2 and 0 < main <= windowed


def _has_states(specs: Mapping[str, Any]) -> bool:
    """Whether layers with recurrent states stand beside at most as many main ones: those that attend to all positions,
    or of `_divided`. vLLM must keep each state in as many bytes as a block of these."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    count = Counter(specs.values())
    main = sum(layers for kind, layers in count.items() if isinstance(kind, FullAttentionSpec) or _is_main_state(kind))
    states = sum(layers for kind, layers in count.items() if _is_state(kind) and not _is_main_state(kind))
    alike = len({kind.page_size_bytes for kind in count}) == 1
    return alike and len(count) == 2 and 0 < main <= states and states % main == 0


def _windows(groups: Sequence[Any]) -> Sequence[int]:
    """The window of each of vLLM's groups of layers, 0 for the one without; of a single group that is left to vLLM."""
    if len(groups) == 1:
        return (0,)
    return [_window(group.kv_cache_spec) for group in groups]


def _window(spec: Any) -> int:
    if _is_state(spec):
        return 0 if _is_main_state(spec) else STATE_WINDOW
    return getattr(spec, "sliding_window", None) or 0


def _is_state(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec)


def _is_main_state(spec: Any) -> bool:
    """Whether it is of the main group of a model whose layers all keep states, as `_divided` marks it."""
    return _is_state(spec) and spec.tp_replicated


def _divided(specs: Mapping[str, Any]) -> dict[str, Any]:
    """The layers of a model, of which those of the main group are marked if all keep states. vLLM then makes groups of
    as many others. Nothing but vLLM's transfers between its own processes reads the mark, and those are not used."""
    if not specs or not all(map(_is_state, specs.values())):
        return dict(specs)
    main = group_layers(len(specs))
    return {name: replace(spec, tp_replicated=number < main) for number, (name, spec) in enumerate(specs.items())}


def engine_arguments(order: Load) -> dict[str, Any]:
    """Return what vLLM's `EngineArgs` are made of. Nothing of vLLM is imported here.

    vLLM compiles the model, and on a GPU captures graphs. Where it finds out how many pages fit, it also
    finds out how long a sequence may be (-1).
    """
    rows = order.max_rows + order.companion
    arguments: dict[str, Any] = {
        "model": order.path,
        "dtype": order.dtype,
        "kv_cache_dtype": order.kv_cache_dtype,
        "block_size": order.page_size,
        "max_num_seqs": rows,
        # A draft model takes each row's next token besides.
        "max_num_batched_tokens": order.max_tokens + order.companion + (rows if order.drafts else 0),
        "worker_extension_cls": EXTENSION,
        "gpu_memory_utilization": order.memory_share,
        "enforce_eager": order.eager,
        "enable_prefix_caching": False,
        "disable_hybrid_kv_cache_manager": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "seed": 0,
        "tensor_parallel_size": order.stage_ranks,
        "pipeline_parallel_size": order.stages,
    }
    if order.max_loras:
        # A step may have requests of all of them. On a CPU vLLM computes rows without an adapter with what lies in the
        # last place, which has to stay empty.
        places = order.max_loras + 1
        arguments |= {
            "enable_lora": True,
            "max_loras": places,
            "max_cpu_loras": places,
            "max_lora_rank": order.max_lora_rank,
        }
    if order.device == "cpu":
        # vLLM's choice depends on the CPU: this one with AVX512-BF16, else the model's dtype.
        arguments["mamba_ssm_cache_dtype"] = "float32"
    if order.attention_backend:
        arguments["attention_backend"] = order.attention_backend
    if order.ranks > 1:
        arguments["distributed_executor_backend"] = "mp"
    if order.quantization:
        arguments["quantization"] = _ONLINE.get(order.quantization, order.quantization)
    if order.drafts:
        arguments["speculative_config"] = dict(order.drafts)
    if order.expert_parallel:
        arguments["enable_expert_parallel"] = True
    if order.max_model_len:
        arguments["max_model_len"] = order.max_model_len
    if order.num_pages is None:
        return {"max_model_len": -1} | arguments
    return arguments | {"num_gpu_blocks_override": order.num_pages + NULL_BLOCKS}


def _page_bytes(config: Any) -> int:
    """At most what a page takes of one of vLLM's processes: K and V of all layers and heads, or one latent a layer."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model = config.model_config
    if model.is_attention_free:
        dtype = str(model.dtype).removeprefix("torch.")
        return largest_page(model.hf_config.to_dict(), dtype, config.cache_config.block_size, "auto").page_bytes
    held = kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model)
    parts = 1 if model.use_mla else 2 * model.get_total_num_kv_heads()
    layers = model.get_total_num_hidden_layers()
    if (drafts := config.speculative_config) is not None and drafts.uses_draft_kv_cache():
        layers += drafts.draft_model_config.get_total_num_hidden_layers()
    return parts * layers * model.get_head_size() * held.itemsize * config.cache_config.block_size


def add_adapter(executor: Any, request: Any) -> None:
    """Load an adapter into all ranks, and keep vLLM from removing it by itself."""
    if not executor.add_lora(request):
        raise UnsupportedModel(f"vLLM did not load the LoRA adapter {request.lora_name}")
    executor.pin_lora(request.lora_int_id)


def lora_requests(order: Load) -> dict[int, Any]:
    """Return what vLLM calls the adapters of rows, by their numbers; number 0 is none."""
    requests = {number: lora_request(name, number, path) for number, (name, path) in enumerate(order.adapters, 1)}
    return {0: None, **requests}


def lora_request(name: str, number: int, path: str) -> Any:
    """Return what vLLM calls an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, path)
