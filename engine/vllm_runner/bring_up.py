"""vLLM's executor with a model and empty pages, without vLLM's own engine and scheduler. For the child alone.

The order is that of vLLM 0.32's engine core: configuration, executor, KV cache specs and layout, memory, caches,
warm-up.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from baton.errors import UnsupportedModel
from engine.vllm_runner.messages import Load
from engine.vllm_runner.requirements import Installation, wrong_version

EXTENSION = "engine.vllm_runner.extension.BatonExtension"
_CHECKED = 0.05  # of the memory must be free at the start; how much pages take is Baton's decision
NULL_BLOCKS = 1  # vLLM keeps its first block for padding; page i is block i + 1


def bring_up(order: Load) -> tuple[Any, Any]:
    """Return vLLM's configuration and its executor, which holds the loaded model. Raises UnsupportedModel for a model
    whose layers keep other K and V than one kind of pages, and for a page size that vLLM's kernels don't take."""
    import vllm

    if Installation(vllm.__version__).is_wrong:
        raise UnsupportedModel(wrong_version(vllm.__version__, "cpu"))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        get_kv_cache_configs,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.engine import core
    from vllm.v1.executor.abstract import Executor

    load_general_plugins()
    arguments: dict[str, Any] = {
        "model": order.path,
        "dtype": order.dtype,
        "block_size": order.page_size,
        "num_gpu_blocks_override": order.num_pages + NULL_BLOCKS,
        "max_num_seqs": order.max_rows,
        "max_num_batched_tokens": order.max_tokens,
        "worker_extension_cls": EXTENSION,
        "gpu_memory_utilization": _CHECKED,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_hybrid_kv_cache_manager": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    config = EngineArgs(**arguments).create_engine_config()
    if config.model_config.max_model_len > (longest := order.num_pages * order.page_size):
        # vLLM wants room for one sequence of the model's full length.
        config = EngineArgs(**arguments, max_model_len=longest).create_engine_config()
    executor = Executor.get_class(config)(config)
    core.register_all_kvcache_specs(config)
    specs = executor.get_kv_cache_specs()
    supported = executor.get_supported_kv_cache_layouts()
    layout = core.resolve_kv_cache_layout(config, supported, [one for worker in specs for one in worker.values()])
    executor.set_kv_cache_layout(layout.name)
    caches = get_kv_cache_configs(config, specs, executor.determine_available_memory())
    for cache in caches:
        cache.kv_cache_layout = config.cache_config.kv_cache_layout
    whole = generate_scheduler_kv_cache_config(caches)
    if len(whole.kv_cache_groups) != 1:
        raise UnsupportedModel(f"vLLM keeps {len(whole.kv_cache_groups)} kinds of pages for this model; one is served")
    block_size = whole.kv_cache_groups[0].kv_cache_spec.block_size
    if block_size != order.page_size:
        raise UnsupportedModel(f"vLLM's kernels take pages of {block_size} tokens; set pages.page_size to that")
    config.cache_config.num_gpu_blocks = whole.num_blocks
    config.cache_config.block_size = block_size
    _, hash_block_size = resolve_kv_cache_block_sizes(whole, config)
    for cache in caches:
        cache.hash_block_size = hash_block_size
    executor.initialize_from_config(caches)
    executor.compile_or_warm_up_model()
    return config, executor
