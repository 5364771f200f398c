"""The shape of one KV page, in bytes. Nothing else knows it.

A page is one contiguous blob, heads outermost, so that a tensor-parallel rank's heads are one contiguous byte range,
whatever the degree on the other side of a hand-off. Behind the head, its numbers lie as the kernels that compute with
them keep them. That order is the page's *form*:

    split       [kv_head, layer, 2 (K then V), page_size, head_dim]     our own engine
    paired      [kv_head, layer, page_size, 2 · head_dim]               vLLM on CUDA: K and V of a token side by side
    cpu-…       [kv_head, layer, 2 · page_size · head_dim]              vLLM on a CPU, packed for an instruction set
    latent      [1, layer, page_size, head_dim]                         vLLM, models with latent attention (MLA)
    states      [1, layer, head_dim]                                    vLLM, models whose layers all keep states

Pages of int8 and fp8 have form `split` too. They hold codes of one byte: whole numbers, or E4M3. Behind those of a
layer lie the scales of its rows, in float32: [kv_head, layer, codes [2, page_size, head_dim], scales [2, page_size]]. A
row is K or V of one token and head. Its numbers are its codes times its scale. vLLM's `float8_…` pages have no such
scales.

A latent stands for the keys and values of all heads: a compressed part and a rotated one, side by side. It counts as
one head, which every rank has whole.

A state stands for all tokens up to the page's end: `head_dim` elements, whatever `page_size` is.

So a page moves between device, arena and disk with plain copies. Pages of different forms never meet: the form is part
of every page key's namespace.

This module imports no torch: the store and the router use it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

LAYOUT_VERSION = 2
"""Raised whenever the meaning of a page's bytes or of its checksum changes; part of every page key's namespace."""

INT8, FP8 = "int8", "fp8"
CODES: Mapping[str, str] = {"int8": INT8, "fp8": FP8, "fp8_e4m3": FP8}
"""The dtypes of codes that our own engine keeps, by `model.kv_cache_dtype`."""
DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, INT8: 1, FP8: 1
}  # fmt: skip
"""Element types that a page may hold, with their size in bytes."""

SPLIT, PAIRED, LATENT, STATES = "split", "paired", "latent", "states"
_PACKED = "cpu-"
_ISAS = ("amx", "neon", "rvv", "vec", "vec16", "vsx", "vxe")
FORMS = (SPLIT, PAIRED, LATENT, STATES, *(_PACKED + isa for isa in _ISAS))
"""What a page's form may be."""


@dataclass(frozen=True)
class PageLayout:
    """How `page_size` tokens' keys and values lie in one page.

    Raises ValueError for a dimension below one, or a dtype or form that no page has, or not together.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    form: str = SPLIT

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"page layout: {name} is {value!r}; it must be a whole number above zero")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"page layout: dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if self.form not in FORMS:
            raise ValueError(f"page layout: form {self.form!r} is none of {', '.join(FORMS)}")
        if self.coded and (self.form != SPLIT or self.head_dim % 2):
            raise ValueError(
                f"page layout: {self.dtype} needs form split and an even head_dim, not {self.form}, {self.head_dim}"
            )

    @property
    def coded(self) -> bool:
        """Whether it holds codes, and scales behind them."""
        return self.dtype in (INT8, FP8)

    @property
    def version(self) -> int:
        return LAYOUT_VERSION

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the form, in elements; KV heads first, then layers."""
        outer = (self.num_kv_heads, self.num_layers)
        if self.coded:
            return (*outer, 2 * self.page_size * self._row_bytes)
        if self.form == SPLIT:
            return (*outer, 2, self.page_size, self.head_dim)
        if self.form == PAIRED:
            return (*outer, self.page_size, 2 * self.head_dim)
        if self.form == LATENT:
            return (*outer, self.page_size, self.head_dim)
        if self.form == STATES:
            return (*outer, self.head_dim)
        return (*outer, 2 * self.page_size * self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token's keys and values take, all layers and heads together; or a state."""
        kinds = 1 if self.form in (LATENT, STATES) else 2
        return self.num_kv_heads * self.num_layers * kinds * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        """Of K or V of one token, head and layer."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + (DTYPE_BYTES["float32"] if self.coded else 0)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * (1 if self.form == STATES else self.page_size)
