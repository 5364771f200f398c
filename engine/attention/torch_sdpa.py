"""Attention over K and V that lie in pages.

A back end owns nothing but views of the page pool. For each step it is told the batch once (`begin`), so that what all
layers share (indices, masks) is made once; then each layer writes its new K and V and attends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from engine.device.uploads import upload
from engine.step.batch import Batch, Ints, Span
from kvstore.layout import INT8, PageLayout

SMALLEST_BUCKET = 3
"""Sequences of up to 2³ pages are padded to one another: below that, one more call costs more than the padding."""

CPU_GATHER_BYTES = 4 * 2**20
"""Bytes gathered at once. They should still be in the cache when they are attended to. Memory that the allocator
must map afresh for every layer costs more than the copy: with 32 contexts of 1,024 tokens, 16 MiB take twice as
long."""
CUDA_GATHER_BYTES = 2**30


class AttentionStep(Protocol):
    """One step's attention. Every layer calls `write` before `attend`."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the batch's new K and V, both [tokens, kv_heads, head_dim], into their pages."""
        ...

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        """[tokens, heads, head_dim] → the same: each token over itself and what precedes it in its sequence.

        With a window, over the last `window` positions only, its own included.
        """
        ...


class AttentionBackend(Protocol):
    """A way to attend on some kind of device."""

    def begin(self, batch: Batch) -> AttentionStep: ...


class TorchAttention:
    """Plain torch, one code for CPU and CUDA: gathers each sequence's pages and gives them to SDPA.

    Gathering copies the context once a layer. Where there are native kernels, they read pages where they lie instead.
    cuDNN is taken out of SDPA for the whole process: on Hopper and newer torch asks it first, and it builds a plan for
    every new shape. Shapes here change with each page and each number of rows, and a plan takes 23 to 37 ms on an H100
    (others' figure, not run here). The remaining backends have no plans.
    """

    def __init__(self, pool: torch.Tensor, layout: PageLayout, scale: float | None = None) -> None:
        """`pool` is [pages, *layout.shape], contiguous. Scores are multiplied by `scale`; None: head_dim^-0.5."""
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.scale = scale
        self.pool = pool
        self.layout = layout
        self.codes = _Codes(pool, layout) if layout.coded else None
        if self.codes is None:
            self.token_rows = pool.view(-1, layout.head_dim)
            self.page_rows = pool.view(-1, layout.page_size * layout.head_dim)
        gather_bytes = CPU_GATHER_BYTES if pool.device.type == "cpu" else CUDA_GATHER_BYTES
        self.gather_pages = gather_bytes * layout.num_layers // layout.page_bytes  # of one layer's K and V

    def begin(self, batch: Batch) -> TorchStep:
        return TorchStep(self, batch)

    def page_row(self, pages: Ints) -> Ints:
        """Where K of layer 0 begins in `page_rows`, for each head of each page: [..., pages] → [..., heads, pages].

        V follows one row later, the next layer two rows later.
        """
        heads = np.arange(self.layout.num_kv_heads)[:, None]
        return (pages[..., None, :] * self.layout.num_kv_heads + heads) * (2 * self.layout.num_layers)


class _Codes:
    """The codes and the scales of pages that have these. Rows are counted as `TorchAttention` counts them."""

    def __init__(self, pool: torch.Tensor, layout: PageLayout) -> None:
        self._whole = layout.dtype == INT8
        self._kind, self._largest = (torch.int8, 127) if self._whole else (torch.float8_e4m3fn, 448)
        parts = pool.view(-1, layout.shape[-1])
        end = 2 * layout.page_size * layout.head_dim
        self._codes = parts[:, :end].view(len(parts), 2 * layout.page_size, layout.head_dim)
        self._scales = parts[:, end:].view(torch.float32)
        self._page_size = layout.page_size

    def write(self, rows: torch.Tensor, x: torch.Tensor) -> None:
        """Quantise `x`, [rows, head_dim]. The largest number of each row becomes the largest code, or minus that."""
        x = x.float()
        scale = x.abs().amax(1) / self._largest
        at = rows // (2 * self._page_size), rows % (2 * self._page_size)
        inverse = torch.where(scale > 0, scale.reciprocal(), 0)
        x = x * inverse[:, None]
        self._codes[at] = (x.round() if self._whole else x).to(self._kind).view(torch.int8)
        self._scales[at] = scale

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """[...] → [..., page_size, head_dim]"""
        codes = self._codes.unflatten(1, (2, self._page_size))[pages // 2, pages % 2]
        return (
            codes.view(self._kind).float()
            * self._scales.unflatten(1, (2, self._page_size))[pages // 2, pages % 2][..., None]
        )


@dataclass(frozen=True)
class _Singles:
    """Sequences with one new token each, of similar context: attended together, padded to the longest."""

    rows: torch.Tensor  # [sequences], in the batch
    gather: torch.Tensor  # [2 (K, V), sequences, heads, pages], rows of the pool for layer 0
    mask: torch.Tensor  # [sequences, 1, 1, pages · page_size], added to the scores


@dataclass(frozen=True)
class _PageRange:
    """Several new tokens of one sequence."""

    rows: slice
    gather: torch.Tensor  # [2 (K, V), heads, pages]
    mask: torch.Tensor | None  # [tokens, pages · page_size]; None where plain causal order is enough


class TorchStep:
    """One step of `TorchAttention`."""

    def __init__(self, backend: TorchAttention, batch: Batch) -> None:
        self._backend = backend
        self._batch = batch
        self._plans: dict[int | None, list[_Singles | _PageRange]] = {}
        layout = backend.layout
        rows = backend.page_row(batch.write_pages[:, None])[..., 0] * layout.page_size + batch.write_offsets[:, None]
        self._slots = self._tensor(rows.reshape(-1))  # [tokens · kv_heads], rows of `token_rows` for K of layer 0
        # A page that is used again still holds its last owner's values behind the new ones. They are masked, but a mask
        # doesn't hide a NaN, and one sequence's overflow must not reach another.
        if len(batch.fresh_pages):
            backend.pool.index_fill_(0, self._tensor(batch.fresh_pages), 0)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        layout, codes = self._backend.layout, self._backend.codes
        slots = self._slots + layer * 2 * layout.page_size
        for at, new in ((slots, keys), (slots + layout.page_size, values)):
            rows = new.reshape(-1, layout.head_dim)
            if codes is None:
                self._backend.token_rows.index_copy_(0, at, rows.to(self._backend.token_rows.dtype))
            else:
                codes.write(at, rows)

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        if window not in self._plans:
            self._plans[window] = list(self._plan(window, queries.dtype))
        output, scale = torch.empty_like(queries), self._backend.scale
        for part in self._plans[window]:
            keys, values = self._gather(part.gather, layer).to(queries.dtype)
            rows = queries[part.rows]
            if isinstance(part, _Singles):
                output[part.rows] = _attend_singles(rows, keys, values, part.mask, scale)
            else:
                output[part.rows] = _attend_run(rows, keys, values, part.mask, scale)
        return output

    def _gather(self, rows: torch.Tensor, layer: int) -> torch.Tensor:
        """K and V of one layer: [2, ..., heads, pages] → [2, ..., heads, pages · page_size, head_dim]."""
        rows = rows + 2 * layer
        codes = self._backend.codes
        pages = functional.embedding(rows, self._backend.page_rows) if codes is None else codes.read_pages(rows)
        return pages.view(*rows.shape[:-1], -1, self._backend.layout.head_dim)

    def _plan(self, window: int | None, dtype: torch.dtype) -> Iterator[_Singles | _PageRange]:
        singles: list[Span] = []
        for span in self._batch.spans:
            if len(span) == 1:
                singles.append(span)
            else:
                yield self._run(span, window, dtype)
        for group in _alike(singles, lambda span: len(self._visible(span, window)), self._backend.gather_pages):
            yield self._singles(group, window, dtype)

    def _visible(self, span: Span, window: int | None) -> Ints:
        """The pages that some token of the span attends to."""
        pages = self._batch.pages_of(span)
        return pages[self._first_visible(span, window) // self._backend.layout.page_size :]

    def _first_visible(self, span: Span, window: int | None) -> int:
        """The position at which the first of those pages begins."""
        first = 0 if window is None else max(0, span.start - window + 1)
        return first - first % self._backend.layout.page_size

    def _singles(self, spans: Sequence[Span], window: int | None, dtype: torch.dtype) -> _Singles:
        visible = [self._visible(span, window) for span in spans]
        width = max(map(len, visible))
        pages = np.stack([np.pad(own, (0, width - len(own)), mode="edge") for own in visible])
        tokens = np.array([span.start for span in spans])
        firsts = np.array([self._first_visible(span, window) for span in spans])
        return _Singles(
            rows=self._tensor(np.array([span.first for span in spans])),
            gather=self._kv_rows(pages),
            mask=self._mask(tokens, firsts, width, window, dtype)[:, None, None],
        )

    def _run(self, span: Span, window: int | None, dtype: torch.dtype) -> _PageRange:
        pages = self._visible(span, window)
        plain = span.start == 0 and (window is None or span.end <= window)
        mask = None
        if not plain:
            firsts = np.array([self._first_visible(span, window)])
            mask = self._mask(np.arange(span.start, span.end), firsts, len(pages), window, dtype)
        return _PageRange(slice(span.first, span.last), self._kv_rows(pages), mask)

    def _kv_rows(self, pages: Ints) -> torch.Tensor:
        keys = self._backend.page_row(pages)
        return self._tensor(np.stack((keys, keys + 1)))

    def _mask(self, tokens: Ints, firsts: Ints, width: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[tokens, width · page_size]: 0 where the token at a position sees a key, −∞ where it does not.

        Token i looks at `width` pages, the first of which begins at position `firsts[i]`.
        """
        positions = self._tensor(tokens)[:, None]
        keys = self._tensor(firsts)[:, None] + torch.arange(
            width * self._backend.layout.page_size, device=positions.device
        )
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))

    def _tensor(self, values: Ints) -> torch.Tensor:
        return upload(values, self._backend.pool.device)


def _alike(spans: Sequence[Span], pages: Callable[[Span], int], most: int) -> Iterator[list[Span]]:
    """Groups of spans whose page counts round up to the same power of two, each of at most `most` pages when padded."""

    def bucket(span: Span) -> int:
        return max(SMALLEST_BUCKET, (pages(span) - 1).bit_length())

    for exponent, members in groupby(sorted(spans, key=bucket), key=bucket):
        while group := list(islice(members, max(1, most >> exponent))):
            yield group


def _attend_singles(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """[n, heads, head_dim] over [n, kv_heads, context, head_dim] → [n, heads, head_dim].

    The query heads that share a KV head stand where SDPA expects query positions, so that K and V are read once.
    """
    grouped = queries.view(len(queries), keys.shape[1], -1, queries.shape[-1])
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(queries.shape)


def _attend_run(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """[tokens, heads, head_dim] over [kv_heads, context, head_dim] → [tokens, heads, head_dim].

    KV heads stand where SDPA expects the batch, and K and V are repeated over a group by a stride of zero, not copied.
    """
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    grouped = queries.view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    if mask is None:
        keys, values = keys[:, :tokens], values[:, :tokens]
    shape = (kv_heads, heads // kv_heads, keys.shape[1], head_dim)
    attended = functional.scaled_dot_product_attention(
        grouped,
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return attended.permute(2, 0, 1, 3).reshape(queries.shape)
