"""The runner of a worker: our own engine, or vLLM's model runner."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import msgspec

from baton.checkpoint_files import read_config
from baton.checkpoints import hub
from baton.config import Config, DecodeConfig, PrefillConfig
from baton.errors import NotEnoughMemory
from baton.messages import WorkerRole
from baton.system_memory import available_memory
from engine.device.gpu_memory import worker_bytes
from engine.device.gpus import resolve_device, visible_gpus
from engine.engine import Engine, FittingPages, dtype_of, layout_of, linear_maker
from engine.models.config import load_spec
from engine.models.memory import weight_bytes
from engine.models.weights import TORCH_DTYPES
from engine.runner import Runner
from engine.vllm_runner import compiling
from engine.vllm_runner.pages import largest_page, vllm_kv_dtype
from engine.vllm_runner.runner import VllmRunner
from kvstore.layout import PageLayout
from worker.draft import page_layers
from worker.engine_choice import devices_of, engine_of
from worker.pool_size import CudaMemory, await_memory, fitting_pages, pool_pages

log = logging.getLogger(__name__)

_PROMPT_TOKENS = 256  # that a step has beside as many rows as it may have; or two pages


def load(config: Config, role: WorkerRole) -> Runner:
    """The model with a page pool, as a worker needs them that begins as `role`. Raises ModelError, NotEnoughMemory, or
    StartupError for a CUDA device that is not here or a process that ends too early."""
    path = hub.resolve(config.model.path, say=log.info)
    gpus = visible_gpus()
    device = resolve_device(config.device_of(role), gpus)
    choice = engine_of(config, path, {device, *devices_of(config, gpus).values()})
    log.info("the engine is %s: %s", choice.engine, choice.why)
    return _vllm(config, role, device) if choice.engine == "vllm" else _native(config, role)


def reload(runner: Runner, config: Config, role: WorkerRole) -> Runner:
    """Return a runner with the weights in `model.path`, which are others of the same model. The one before is not to be
    called any more. Raises as `load` does.

    vLLM's process is replaced, and not told to load them in place. On a CPU vLLM 0.32 keeps packed copies of some old
    weights then: of experts, and of an output head that is the embedding."""
    if isinstance(runner, Engine):
        runner.reload(hub.resolve(config.model.path))
        return runner
    runner.close()
    return load(config, role)


def _vllm(config: Config, role: WorkerRole, device: str) -> VllmRunner:
    """vLLM in a child process. On a GPU whose pool has no size of its own, vLLM finds out how many pages fit."""
    own, page_size = config.worker(role), config.pages.page_size
    path = hub.resolve(config.model.path)
    raw, held = read_config(path), config.model.kv_cache_dtype
    draft = config.model.speculative_config
    if draft is not None and draft.model:
        draft = msgspec.structs.replace(draft, model=str(hub.resolve(draft.model)))
    num_pages: int | None = None
    if device == "cpu" or own.kv_cache_bytes:
        size = _room_for(own.kv_cache_bytes.on_cpu) if device == "cpu" else int(own.kv_cache_bytes)
        page = largest_page(raw, config.model.dtype, page_size, held, config.stage_ranks_of(role))
        num_pages = pool_pages(size, replace(page, num_layers=page.num_layers + page_layers(config.model, raw)))
    share = 1.0 if own.num_gpus == "auto" else own.num_gpus
    tokens = max(config.prefill.max_num_batched_tokens, config.decode.max_num_batched_tokens)  # it may change its role
    eager = config.model.enforce_eager
    if not eager and (problem := compiling.problem(device)):
        log.warning("vLLM runs the model without compiling it, which is slower: %s", problem)
        eager = True
    return VllmRunner.load(
        path,
        config.model.dtype,
        num_pages,
        page_size,
        max_rows=max(config.prefill.max_num_seqs, config.decode.max_num_seqs),
        max_tokens=tokens + max(_PROMPT_TOKENS, 2 * page_size),
        threads=own.threads or len(os.sched_getaffinity(0)),
        device=device,
        memory_share=own.gpu_memory_utilization * share,
        lora_modules=config.model.lora_modules,
        max_loras=config.model.max_loras,
        max_lora_rank=config.model.max_lora_rank,
        ranks=config.ranks_of(role),
        eager=eager,
        deadline=config.cluster.step_timeout_ms / 1_000,
        kv_cache_dtype=vllm_kv_dtype(raw, held),
        exact=config.model.numerics == "exact",
        max_model_len=config.model.max_model_len,
        quantization=config.model.quantization,
        expert_parallel=config.model.enable_expert_parallel,
        stages=config.stages_of(role),
        drafts={} if draft is None else draft.arguments(),
    )


def _native(config: Config, role: WorkerRole) -> Engine:
    """Our own engine, on a CPU or a GPU."""
    own = config.worker(role)
    page_size = config.pages.page_size
    head = role == "decode" or config.prefill.lm_head
    path = hub.resolve(config.model.path)
    model = load_spec(path)
    layout = layout_of(model, config.model.dtype, page_size, config.model.kv_cache_dtype)
    gpus = visible_gpus()
    device = resolve_device(config.device_of(role), gpus)
    num_pages: int | FittingPages
    if device == "cpu":
        if gpus.problem and gpus.wasted:
            log.warning("computes on the CPU: %s", gpus.problem)
        num_pages = pool_pages(_room_for(own.kv_cache_bytes.on_cpu), layout)
    else:
        weights = weight_bytes(
            model,
            TORCH_DTYPES[dtype_of(model, config.model.dtype)],
            linear_maker(device, model, config.model.quantization),
            head,
        )
        num_pages = _pages_on_gpu(device, own, weights, layout)
    settings = config.model
    return Engine.load(
        path,
        settings.dtype,
        device,
        num_pages,
        page_size,
        head,
        own.threads or None,
        settings.native,
        settings.kv_cache_dtype,
        settings.quantization,
    )


def _room_for(size: int) -> int:
    """Return the size of a pool that the machine's memory has room for. Raises NotEnoughMemory."""
    room = available_memory()
    if size > room.available:
        raise NotEnoughMemory(
            f"the page pool takes {size} bytes and {room.bound} leaves {room.available}; lower kv_cache_bytes"
        )
    return size


def _pages_on_gpu(
    device: str, own: PrefillConfig | DecodeConfig, weights: int, layout: PageLayout
) -> int | FittingPages:
    """Wait for the memory of a predecessor that has died, and return how many pages there will be."""
    memory = CudaMemory(device)
    share = 1.0 if own.num_gpus == "auto" else own.num_gpus
    if own.kv_cache_bytes:
        await_memory(weights + own.kv_cache_bytes, memory)
        return pool_pages(own.kv_cache_bytes, layout)
    await_memory(worker_bytes(memory.read().total, own.gpu_memory_utilization, share), memory)
    return lambda make: fitting_pages(make, memory, own, layout.page_size, share)
