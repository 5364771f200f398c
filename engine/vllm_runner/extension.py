"""What Baton adds to vLLM's worker: its pages in and out, and its steps. vLLM mixes this class into its own.

A page in the arena has the form in which the kernels here keep K and V of a block (`kvstore.layout`), heads outermost.
So a copy is a plain one: on a GPU, whose blocks lie as pages do, one move of contiguous bytes; on a CPU, whose layers
lie apart, one move for each head and layer. There NumPy copies. torch takes 1.4 times as long, and divides a page among
threads whose meeting costs more.
"""

# pyright: reportMissingImports=false

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch

from baton.errors import UnsupportedModel
from engine.cuda.copies import CudaCopies
from engine.cuda.mover import OverlappedMover
from engine.vllm_runner.draw import make_draw
from engine.vllm_runner.guesses import Guesses
from engine.vllm_runner.leftovers import unlink_shared_memory
from engine.vllm_runner.messages import Row
from engine.vllm_runner.pages import FP8
from engine.vllm_runner.ranks import die_with_parent, serve_beside
from kvstore.arena.memory import Arena
from kvstore.checksum import checksum, head_checksums
from kvstore.client.transfer import CopyIn, CopyOut
from kvstore.layout import LATENT, PAIRED, STATES

_Page: TypeAlias = tuple[Any, Any, Any]
"""A copy on a CPU: destination and source of all heads, and those to hash, each while the cache still has it."""

_PART = 2**22  # bytes that a thread copies at least: less takes as long as handing it over
_STATE = torch.int8
"""What recurrent states lie in: as bytes, one row to a block. K and V are in no such dtype."""


class BatonExtension:
    """The names begin with `baton_`, so that none is one of vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    use_v2_model_runner: bool
    rank: int
    parallel_config: Any
    model_config: Any
    cache_config: Any
    _baton_copies: CudaCopies | None = None  # of pages on a GPU: by DMA
    _baton_mover: OverlappedMover | None = None  # around them: it pins the arena, and hashes on threads
    _baton_guesses: Guesses | None = None  # of vLLM's draft
    _baton_stage, _baton_stages = 0, 1  # this rank's pipeline stage, and how many there are
    execute_model: Callable[[Any], Any]
    sample_tokens: Callable[[Any], Any]

    def baton_take_draws(self) -> None:
        """Draw in the place of vLLM's sampler from now on. At first vLLM measures what that takes."""
        self.baton_draw = make_draw(self.model_runner, second=self.use_v2_model_runner)
        self.model_runner.sampler = self.baton_draw
        if self.vllm_config.speculative_config is not None:
            self.model_runner.rejection_sampler = self.baton_draw.accept
            self._baton_guesses = Guesses(self.model_runner.drafter, self.baton_draw)

    def baton_prepare(self) -> Mapping[str, Any]:
        """Steps come from now on. Return the shape and form of this rank's part of pages."""
        ranks, stages = self.parallel_config.tensor_parallel_size, self.parallel_config.pipeline_parallel_size
        if ranks * stages > 1:
            die_with_parent()
        self._baton_stages = stages
        self._baton_stage, self._baton_place = divmod(self.rank, ranks)
        if self._baton_stage and (runner := self.model_runner).intermediate_tensors is None:
            # vLLM makes them as it warms up a model that it compiles, and a step needs them in any case.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
        caches = self._baton_caches()
        _, heads, page_size, width = caches[0].shape
        latent = self._baton_latent = self.model_config.use_mla
        self._baton_copies_out = not (latent and self._baton_place)  # each rank of a stage has whole latents
        self._baton_place *= not latent
        self._baton_blocks = _blocks(caches)
        self._baton_blocks.zero_()
        self._baton_threads = torch.get_num_threads()
        self._baton_pool = ThreadPoolExecutor(self._baton_threads, "copies")
        if (copies := _copies(self._baton_blocks)) is not None:
            self._baton_copies, part = copies, self._baton_part_of(len(caches))
            self._baton_mover = OverlappedMover(copies, lambda: None, heads, verify=True, part=part)
        if self.rank == 0 and "VLLM_DIST_IDENT" in os.environ:
            unlink_shared_memory(os.environ["VLLM_DIST_IDENT"])  # all have opened it
        self.baton_draw.measured = False
        computed_in, held = self.model_config.dtype, self.cache_config.cache_dtype
        if caches[0].dtype == _STATE:
            kind = {"head_dim": width // computed_in.itemsize, "dtype": _name(computed_in), "form": STATES}
        else:
            form = LATENT if latent else _form(caches[0], computed_in, held)
            kind = {"head_dim": width if latent else width // 2, "dtype": _dtype(caches[0], held), "form": form}
        return {
            "beside": self._baton_mover is not None,
            # Rows of latents on a GPU take another kernel than a single one. Stages were not tried.
            "verifies": not (self.use_v2_model_runner or stages > 1 or (latent and caches[0].is_cuda)),
            "num_layers": len(caches),
            "num_kv_heads": heads,
            "page_size": page_size,
            **kind,
        }

    def baton_serve_beside(self, address: str) -> None:
        """Attach and copy by orders from `address` from now on, beside steps."""
        serve_beside(self, self.rank, address)

    def baton_attach(self, path: str, slots: int, page_bytes: int, layers: Sequence[int]) -> None:
        """Copies are from and to the slots of the arena whose descriptor `path` names. Each rank has its KV heads of a
        page, which lie outermost, or all of latents; and of them the layers of its stage, which has so many."""
        arena = Arena.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC), slots, page_bytes)
        self._baton_arena, self._baton_part = arena, self._baton_part_of(sum(layers))
        _, heads, own, _ = self._baton_blocks.shape
        first = sum(layers[: self._baton_stage])
        if self._baton_mover is not None:
            self._baton_mover.attach(arena)
            return
        self._baton_host = self._baton_blocks.view(torch.uint8).numpy()
        pages = np.frombuffer(arena.view, np.uint8).reshape(slots, -1, heads, sum(layers), self._baton_host.shape[-1])
        self._baton_slots = pages[:, self._baton_place, :, first : first + own]

    def baton_out(self, blocks: Sequence[int], slots: Sequence[int]) -> list[list[int]]:
        """Copy this rank's part of blocks into slots. Return the checksums of each slot's heads there, as `baton_hash`.
        Of latents, the first rank of a stage copies for all. Stages leave the checksums to a second call."""
        if not self._baton_copies_out:
            return [[] for _ in slots]
        if self._baton_mover is not None:
            pairs = enumerate(zip(blocks, slots, strict=True))
            return self._baton_mover.copy([CopyOut(0, index, block, slot) for index, (block, slot) in pairs])
        whole = self._baton_stages == 1
        pairs = [(self._baton_slots[slot], self._baton_host[block]) for block, slot in zip(blocks, slots, strict=True)]
        return self._baton_copy([(slot, block, slot if whole else ()) for slot, block in pairs])

    def baton_hash(self, slots: Sequence[int]) -> list[list[int]]:
        """Return the checksums of this rank's heads in each slot, with the layers of all stages: by the ranks of the
        first stage, and of latents by the first rank alone. Others return none."""
        if self._baton_stage or not self._baton_copies_out:
            return [[] for _ in slots]
        heads = self._baton_blocks.shape[1]
        return [head_checksums(self._baton_arena.slot(slot)[self._baton_part], heads) for slot in slots]

    def baton_in(self, slots: Sequence[int], blocks: Sequence[int], check: bool) -> list[list[int]]:
        """Copy this rank's part of slots into blocks. Return the checksums of each slot's heads there; none without
        `check`."""
        check = check and self._baton_copies_out  # all ranks of a stage read one slot of latents
        if self._baton_mover is not None:
            pairs = enumerate(zip(slots, blocks, strict=True))
            copies = [CopyIn(0, index, slot, block, 0) for index, (slot, block) in pairs]
            return self._baton_mover.copy(copies, verify=check)
        whole = check and self._baton_stages == 1  # else the rank of the first stage hashes all layers
        pairs = [(self._baton_slots[slot], self._baton_host[block]) for slot, block in zip(slots, blocks, strict=True)]
        sums = self._baton_copy([(block, slot, slot if whole else ()) for slot, block in pairs])
        return self.baton_hash(slots) if check and not whole else sums

    def _baton_copy(self, pages: Sequence[_Page]) -> list[list[int]]:
        """Copy pages on all threads, each a part of them. Return the checksums of the heads that are to be hashed."""
        share = max(-(-len(pages) // self._baton_threads), -(-_PART // self._baton_host[0].nbytes), 1)
        parts = [pages[at : at + share] for at in range(0, len(pages), share)]
        each = map if len(parts) == 1 else self._baton_pool.map
        return [sums for part in each(_copy, parts) for sums in part]

    def baton_duplicate(self, source: int, dest: int) -> None:
        if self._baton_copies is not None:
            self._baton_copies.duplicate(source, dest)
            return
        self._baton_blocks[dest].copy_(self._baton_blocks[source])

    def baton_zero(self, blocks: Sequence[int]) -> None:
        """Zero blocks that a step begins and leaves part empty: a NaN behind their end would spoil its tokens."""
        for block in blocks:
            self._baton_blocks[block].zero_()

    def baton_step(
        self, order: Any, fresh: Sequence[int], states: Sequence[tuple[int, int]], rows: Mapping[str, Row]
    ) -> Any:
        """Run a step: zero the blocks `fresh`, copy `states` from block to block, compute the rows, score, draw. Return
        the tokens and the scores by request, the requests with another token on the device than was drawn, by request
        what vLLM's draft proposes, and the seconds that it took for that. Every rank of the last stage draws: a draw is
        a pure function of logits that all of them have. With vLLM's second model runner, return a `LaunchedStep`, which
        waits for that, while the next step may be launched."""
        self.baton_zero(fresh)
        for source, dest in states:
            self.baton_duplicate(source, dest)
        draw = self.baton_draw
        draw.tell(rows)
        draw.hidden = None
        try:
            output = self.execute_model(order)
            is_last = self._baton_stage == self._baton_stages - 1
            if is_last and any(row.targets or row.verify for row in rows.values()):
                draw.hidden = self.model_runner.execute_model_state.hidden_states
            scores = draw.scores() if is_last else {}
            if output is None:
                output = self.sample_tokens(None)
        except BaseException:
            self.model_runner.execute_model_state = None
            raise
        if self.use_v2_model_runner:
            from engine.vllm_runner.launched_step import LaunchedStep

            return LaunchedStep(output, draw.launched, scores)
        return draw.drawn, scores, (), *self._baton_drafts()

    def _baton_drafts(self) -> tuple[Mapping[str, Sequence[int]], float]:
        if self._baton_guesses is None or (drafts := self.model_runner.take_draft_token_ids()) is None:
            return {}, 0.0
        pairs = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        return {name: each for name, each in pairs if name in self.baton_draw.drawn}, self._baton_guesses.seconds

    def _baton_part_of(self, layers: int) -> slice:
        """The bytes of this rank's heads in a page of so many layers."""
        share = layers * self._baton_blocks[0, :, 0].nbytes
        return slice(self._baton_place * share, (self._baton_place + 1) * share)

    def _baton_caches(self) -> Sequence[torch.Tensor]:
        """[blocks, kv_heads, page_size, 2 · head_dim] of each layer of a group: all groups share this memory, and each
        block is one group's. On a CPU the last two dimensions lie otherwise than they say."""
        caches = self.model_runner.kv_caches
        attending = [cache for cache in caches if cache.dtype != _STATE]
        distinct = {cache.data_ptr(): cache for cache in attending or caches}
        return [distinct[address] for address in sorted(distinct)]


def _blocks(caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """All layers as one view, [blocks, kv_heads, layers, page_size · 2 · head_dim]. Raises UnsupportedModel where they
    lie otherwise than alike and at equal distances."""
    first = caches[0]
    count, heads, page_size, width = first.shape
    distance = caches[1].storage_offset() - first.storage_offset() if len(caches) > 1 else 0
    for number, cache in enumerate(caches):
        alike = (cache.shape, cache.stride(), cache.dtype) == (first.shape, first.stride(), first.dtype)
        there = cache.data_ptr() == first.data_ptr() + number * distance * first.element_size()
        if not alike or not there or cache.stride()[2:] != (width, 1):
            raise UnsupportedModel(f"vLLM keeps K and V of layer {number} otherwise than those of layer 0")
    shape = (count, heads, len(caches), page_size * width)
    return first.as_strided(shape, (first.stride(0), first.stride(1), distance, 1), first.storage_offset())


def _copy(pages: Sequence[_Page]) -> list[list[int]]:
    sums: list[list[int]] = []
    for dest, source, hashed in pages:
        sums.append([])
        if not len(hashed):
            np.copyto(dest, source)
        for place, head in enumerate(hashed):
            np.copyto(dest[place], source[place])
            sums[-1].append(checksum(head.data))
    return sums


def _copies(blocks: torch.Tensor) -> CudaCopies | None:
    return CudaCopies(blocks) if blocks.is_cuda else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(cache: torch.Tensor, held: str) -> str:
    """The name of the dtype of K and V in a layer, which vLLM calls `held`: it keeps FP8 as bytes."""
    if cache.dtype != torch.uint8:
        return _name(cache.dtype)
    if held not in FP8:
        raise UnsupportedModel(f"vLLM keeps K and V as {held}; Baton's pages take {', '.join(FP8)}")
    return FP8[held]


def _form(cache: torch.Tensor, computed_in: torch.dtype, held: str) -> str:
    """The name of the form in which a layer's kernels keep K and V of a block and head. For FP8 they are chosen by the
    dtype that the model is computed in."""
    if cache.device.type != "cpu":
        return PAIRED
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    _, _, page_size, width = cache.shape
    return f"cpu-{_get_attn_isa(computed_in, page_size, width // 2, held)}"
