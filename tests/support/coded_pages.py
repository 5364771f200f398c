"""Pages of codes as tests read them, with torch alone."""

import torch

from kvstore.layout import FP8, INT8, PageLayout

KINDS = {INT8: (torch.int8, 127), FP8: (torch.float8_e4m3fn, 448)}
"""What codes are, and the largest."""


def parts(pages: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """[pages, *layout.shape] → codes [pages, kv_heads, layers, 2, page_size, head_dim] and scales [..., page_size]."""
    rows = 2, layout.page_size
    codes, scales = pages.split([2 * layout.page_size * layout.head_dim, 2 * layout.page_size * 4], -1)
    codes = codes.contiguous().view(KINDS[layout.dtype][0])
    return codes.unflatten(-1, (*rows, -1)), scales.contiguous().view(torch.float32).unflatten(-1, rows)


def token_rows(pages: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """[pages, *layout.shape] of form `split` → [tokens, kv_heads, layers, 2, bytes]."""
    if layout.coded:
        codes, scales = parts(pages, layout)
        pages = torch.cat([codes.view(torch.int8), scales[..., None].view(torch.int8)], -1)
    return pages.view(torch.uint8).movedim(4, 1).flatten(0, 1)


def quantised(rows: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] → codes, and scales [...] that multiply them. The largest number of a row is the largest code."""
    kind, largest = KINDS[dtype]
    scales = rows.float().abs().amax(-1) / largest
    scaled = rows.float() * (1 / scales)[..., None]
    return (scaled.round() if dtype == INT8 else scaled).to(kind), scales
