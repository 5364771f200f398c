"""Pages of int8 as tests read them, with torch alone."""

import torch

from kvstore.layout import INT8, PageLayout


def parts(pages: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """[pages, *layout.shape] → codes [pages, kv_heads, layers, 2, page_size, head_dim] and scales [..., page_size]."""
    rows = 2, layout.page_size
    codes, scales = pages.split([2 * layout.page_size * layout.head_dim, 2 * layout.page_size * 4], -1)
    return codes.unflatten(-1, (*rows, -1)), scales.contiguous().view(torch.float32).unflatten(-1, rows)


def token_rows(pages: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """[pages, *layout.shape] of form `split` → [tokens, kv_heads, layers, 2, bytes]."""
    if layout.dtype == INT8:
        codes, scales = parts(pages, layout)
        pages = torch.cat([codes, scales[..., None].view(torch.int8)], -1)
    return pages.view(torch.uint8).movedim(4, 1).flatten(0, 1)


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] → int8 codes, and scales [...] by which they are multiplied: the largest number is ±127."""
    scales = rows.float().abs().amax(-1) / 127
    return (rows.float() * (1 / scales)[..., None]).round().to(torch.int8), scales
