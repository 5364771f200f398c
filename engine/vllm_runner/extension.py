"""What Baton adds to vLLM's worker: its pages in and out, and its draw. vLLM mixes this class into its own.

Pages in the arena have the form of `PageLayout`: [kv_heads, layers, 2, page_size, head_dim]. vLLM's kernels on a CPU
keep, of a block and a head, K transposed, [head_dim, page_size], and then V. On a GPU each token's K and V lie side by
side. So a copy rearranges, all pages of an order at once.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from baton.messages import PromptTokenLogprob
from engine.sampling.sampler import Sampler, sampler_for
from engine.step.batch import Sampled, TokenDraw
from engine.vllm_runner.messages import Row


class BatonExtension:
    """The names begin with `baton_`, so that none is one of vLLM's worker."""

    model_runner: Any

    def baton_prepare(self) -> Mapping[str, Any]:
        """Take over the draw. Return the shape of pages."""
        caches = self._baton_caches()
        _, heads, page_size, width = caches[0].shape
        for cache in caches:
            cache.zero_()
        self.baton_draw = BatonDraw(self.model_runner)
        self.model_runner.sampler = self.baton_draw
        return {
            "num_layers": len(caches),
            "num_kv_heads": heads,
            "page_size": page_size,
            "head_dim": width // 2,
            "dtype": str(caches[0].dtype).removeprefix("torch."),
        }

    def baton_attach(self, view: memoryview, page_bytes: int) -> None:
        """Copies are from and to these slots."""
        cache = self._baton_caches()[0]
        _, heads, page_size, width = cache.shape
        slots = torch.frombuffer(view, dtype=cache.dtype)
        self._baton_slots = slots.view(-1, heads, len(self._baton_caches()), 2, page_size, width // 2)
        assert self._baton_slots[0].nbytes == page_bytes

    def baton_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks into slots."""
        where, into = torch.tensor(blocks), torch.tensor(slots)
        for layer, cache in enumerate(self._baton_caches()):
            keys, values = self._baton_parts(cache[where.to(cache.device)])
            self._baton_slots[into, :, layer, 0] = keys.to(self._baton_slots.device)
            self._baton_slots[into, :, layer, 1] = values.to(self._baton_slots.device)

    def baton_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots into blocks."""
        taken = self._baton_slots[torch.tensor(slots)]
        where = torch.tensor(blocks)
        for layer, cache in enumerate(self._baton_caches()):
            parts = torch.empty((len(blocks), *cache.shape[1:]), dtype=cache.dtype)
            keys, values = self._baton_parts(parts)
            keys.copy_(taken[:, :, layer, 0])
            values.copy_(taken[:, :, layer, 1])
            cache[where.to(cache.device)] = parts.to(cache.device)

    def baton_duplicate(self, source: int, dest: int) -> None:
        for cache in self._baton_caches():
            cache[dest] = cache[source]

    def baton_zero(self, blocks: Sequence[int]) -> None:
        """Zero blocks that a step begins and leaves part empty: a NaN behind their end would spoil its tokens."""
        for cache in self._baton_caches():
            cache[torch.tensor(blocks, device=cache.device)] = 0

    def _baton_caches(self) -> Sequence[torch.Tensor]:
        """[blocks, kv_heads, page_size, 2 · head_dim] of each layer. On a CPU the last two lie otherwise than they
        say."""
        return self.model_runner.kv_caches

    def _baton_parts(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of blocks [blocks, kv_heads, page_size, 2 · head_dim], contiguous, as views [blocks, kv_heads,
        page_size, head_dim]."""
        count, heads, page_size, width = blocks.shape
        dim = width // 2
        if self._baton_caches()[0].device.type == "cpu":
            halves = blocks.view(count, heads, 2, page_size * dim)
            keys = halves[:, :, 0].view(count, heads, dim, page_size).transpose(2, 3)
            return keys, halves[:, :, 1].view(count, heads, page_size, dim)
        return blocks[..., :dim], blocks[..., dim:]


class BatonDraw(torch.nn.Module):
    """Stands in the place of vLLM's sampler. The tokens of rows without a draw mean nothing; vLLM forgets them."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner
        self._own = runner.sampler
        self._sampler: Sampler = sampler_for(runner.device)
        self.draws: Mapping[str, tuple[TokenDraw, int]] = {}  # of the step, by request: and the new token's position
        self.drawn: dict[str, Sampled] = {}
        self.logprobs_mode = runner.sampler.logprobs_mode

    def compute_logprobs(self, *args: Any) -> Any:
        return self._own.compute_logprobs(*args)

    def gather_logprobs(self, *args: Any) -> Any:
        return self._own.gather_logprobs(*args)

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *_: Any, **__: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        names: Sequence[str] = self._runner.input_batch.req_ids
        rows = [row for row, name in enumerate(names) if name in self.draws]
        tokens = torch.zeros((len(names), 1), dtype=torch.int32, device=logits.device)
        if rows:
            wanted = logits if len(rows) == len(names) else logits[rows]
            draws = [self.draws[names[row]] for row in rows]
            sampled = self._sampler.sample(wanted, [draw for draw, _ in draws], [at for _, at in draws], None)
            self.drawn = {names[row]: one for row, one in zip(rows, sampled, strict=True)}
            tokens[rows, 0] = torch.tensor([one.token for one in sampled], dtype=torch.int32, device=logits.device)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    def score(self, hidden: torch.Tensor, row: Row, first: int) -> list[PromptTokenLogprob]:
        """Log-probabilities of a row's targets. `hidden` is [tokens, hidden] of the step, `first` the row's first."""
        begin = first + row.first
        logits = self._runner.model.compute_logits(hidden[begin : begin + len(row.targets)])
        return self._sampler.score(logits, row.targets, row.top)
