"""How many pages a worker's pool has: from its settings, or from what is left of a GPU after the largest steps."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace

from baton.config import DecodeConfig, PrefillConfig
from baton.errors import NotEnoughMemory
from engine.device.gpu_memory import CONTEXT_BYTES, GpuMemory, GpuUse, pool_bytes, worker_bytes
from engine.engine import Engine
from engine.step.batch import Chunk, ComputedMask, LogitsEdits, TokenDraw
from kvstore.layout import PageLayout

PREDECESSOR_PATIENCE = 10.0  # seconds for which a dead process's memory may be missing
_POLL = 0.25
_TOKEN = 1
_ROW_CONTEXT = 4_096  # tokens of each sequence in the largest step of single tokens
_LARGEST_STEP = 0.25  # of what the weights leave, at most for one step

log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """The memory of one GPU, as this process sees it. Bytes."""

    def read(self) -> GpuMemory: ...

    def allocated(self) -> int:
        """What this process's tensors take now."""
        ...

    def begin_peak(self) -> None: ...

    def peak(self) -> int:
        """Return the most that this process's tensors have taken since `begin_peak`."""
        ...

    def give_back(self) -> None:
        """Give what the allocator keeps for later back to the GPU."""
        ...


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def read(self) -> GpuMemory:
        free, total = torch.cuda.mem_get_info(self._device)
        return GpuMemory(total, free)

    def allocated(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)

    def begin_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def pool_pages(kv_cache_bytes: int, layout: PageLayout) -> int:
    """How many pages the pool has. They fill its memory but for less than a page: to within 1 % wherever it holds a
    hundred; where that is not so, the log says what stays unused. Raises NotEnoughMemory for a pool below one page."""
    pages = Engine.pages_for(kv_cache_bytes, layout)
    if pages < 1:
        raise NotEnoughMemory(
            f"a page takes {layout.page_bytes} bytes and the pool {kv_cache_bytes}; raise kv_cache_bytes"
        )
    if (unused := kv_cache_bytes - pages * layout.page_bytes) > kv_cache_bytes / 100:
        log.warning(
            "%d of the pool's %d bytes stay unused: a page takes %d; set kv_cache_bytes to a multiple of that",
            *(unused, kv_cache_bytes, layout.page_bytes),
        )
    return pages


def await_memory(
    needed: int,
    memory: DeviceMemory,
    patience: float = PREDECESSOR_PATIENCE,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until so many bytes of the GPU are free. Return False if they are not after `patience` seconds.

    The driver gives a killed process's memory back some time after the process is gone.
    """
    until = now() + patience
    while (free := memory.read().free) < needed:
        if now() >= until:
            log.warning("%d bytes of the GPU are free; this worker may take %d", free, needed)
            return False
        sleep(_POLL)
    return True


def fitting_pages(
    make: Callable[[int], Engine], memory: DeviceMemory, own: PrefillConfig | DecodeConfig, page_size: int, share: float
) -> int:
    """Run the largest steps once and return how many pages fit beside them.

    `make` returns an engine with so many pages, on weights that are loaded already. Raises NotEnoughMemory if not even
    a step that begins a prompt fits, or no page.
    """
    engine = make(-(-own.max_num_batched_tokens // page_size))
    weights = memory.allocated() - engine.pool.nbytes
    layout = engine.layout
    allowed = worker_bytes(memory.read().total, own.gpu_memory_utilization, share)
    most = max(0, allowed - weights - CONTEXT_BYTES)
    step = _largest_step(engine, memory, own.max_num_batched_tokens, page_size, int(most * _LARGEST_STEP))
    del engine
    memory.give_back()
    now = memory.read()
    size = pool_bytes(now, GpuUse(weights, step), own.gpu_memory_utilization, share)
    log.info(
        "of %d bytes of the GPU %d are free; this worker may use %d: weights %d, the largest step %d, pages %d",
        *(now.total, now.free, allowed, weights, step, size),
    )
    if size < layout.page_bytes:
        raise NotEnoughMemory(
            f"weights of {weights:,} bytes and steps of {step:,} leave no page: of the GPU's {now.total:,} bytes this "
            f"worker may use {allowed:,}, and {now.free:,} are free; raise gpu_memory_utilization, lower "
            "max_num_batched_tokens, or give the worker a GPU of its own"
        )
    return pool_pages(size, layout)


def _largest_step(engine: Engine, memory: DeviceMemory, tokens: int, page_size: int, most: int) -> int:
    """Return the bytes of the largest step, behind the longest context with which it takes at most `most`."""
    context = engine.config.max_positions
    tokens = min(tokens, context)
    vocab = engine.vocab_size if engine.has_lm_head else None
    while True:
        before = context - tokens
        try:
            peak = _measure(engine, memory, largest_steps(tokens, before, page_size, vocab))
        except torch.OutOfMemoryError as error:
            if not before:
                raise NotEnoughMemory(
                    f"a step of {tokens} tokens does not fit: {error}; lower max_num_batched_tokens"
                ) from error
        else:
            if peak <= most or not before:
                return peak
        memory.give_back()
        context = max(tokens, context // 2)
        log.warning(
            "steps of %d tokens take too much memory behind more than %d others; they may be made smaller there",
            *(tokens, context - tokens),
        )


def _measure(engine: Engine, memory: DeviceMemory, steps: Iterator[Sequence[Chunk]]) -> int:
    before = memory.allocated()
    memory.begin_peak()
    for chunks in steps:
        for running in [engine.launch(chunks) for _ in range(2)]:  # logits of one step stay while the next one runs
            running.wait()
    return memory.peak() - before


def largest_steps(tokens: int, context: int, page_size: int, vocab_size: int | None) -> Iterator[list[Chunk]]:
    """Yield the steps that need most memory: a prompt's beginning, its end behind `context` tokens, and, if the worker
    draws from `vocab_size` tokens, as many sequences with one token each. They use few pages, each many times: nothing
    reads what they write. Half of the draws have a mask: those and the others have copies of their logits."""
    pages = range(-(-tokens // page_size))
    yield [Chunk([_TOKEN] * tokens, 0, pages)]
    if context:
        covering = -(-(context + tokens) // page_size)
        yield [Chunk([_TOKEN] * tokens, context, [page % len(pages) for page in range(covering)])]
    if vocab_size is not None:
        length = min(_ROW_CONTEXT, context + 1)
        row = [0] * -(-length // page_size)
        edits = LogitsEdits(forbidden=np.array([_TOKEN]))  # needs a copy of all logits
        for draw in (TokenDraw(edits=edits), TokenDraw(top_p=0.9, edits=edits, logprobs=20)):
            masked = replace(draw, mask=ComputedMask(np.ones(vocab_size, np.bool_)))
            yield [Chunk([_TOKEN], length - 1, row, masked if each % 2 else draw) for each in range(tokens)]
