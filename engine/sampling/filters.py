"""Top-k, top-p and min-p for many rows at once, in torch, without a word to the host.

The same arithmetic as `host_sampler._keep`, with a tensor of rows for every number there. A row's candidates are the
first of its ranked tokens, so filters only count. Nothing here has a shape that depends on a value: that would wait for
the device.
"""

import math

import torch
from msgspec import Struct

from engine.sampling import device_rng

_LOW = (1 << 32) - 1


class FilterRows(Struct, frozen=True, gc=False):
    """What the filters of some rows are, on the device: each [rows]."""

    top_k: torch.Tensor  # int64; 0: no such filter
    top_p_mass: torch.Tensor  # float64; infinity: no such filter
    min_p_logit: torch.Tensor  # float64; minus infinity: no such filter
    keys: torch.Tensor  # int64: the bits of the draws' keys


def rank(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest of each row of `values` [rows, vocab], float32, and their ids. Equals stand by rising
    id, also where they do not all fit. Rows with NaN have some order.

    One integer holds both keys. The bits of a float, those of a negative one flipped, rise with it. Adding zero makes
    the negative zero the plain one.
    """
    bits = (values + 0.0).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(_LOW, _LOW - values.shape[-1], -1, device=values.device)
    keys = (rising << 32).bitwise_or_(ids).topk(count, dim=-1).values
    ranked = _LOW - (keys & _LOW)
    return values.gather(1, ranked), ranked


def draw(
    scaled: torch.Tensor, filters: FilterRows, counters: torch.Tensor, prefix: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token from each row among those that its filters leave.

    `scaled` [rows, vocab], float32, is relative to the row's largest. `counters` [vocab] is `device_rng.counters`. Only
    the likeliest `prefix` tokens are looked at. Returns tokens, and where they are the right ones: a row in which a
    filter might reach beyond the prefix is drawn again with all tokens.
    """
    vocab = scaled.shape[-1]
    count = min(prefix, vocab)
    values, ids = rank(scaled, count)
    logits = values.double()
    width, decided = _keep(logits, filters, scaled.exp().sum(-1, dtype=torch.float64).log(), count == vocab)
    noise = device_rng.gumbel(counters[ids] + filters.keys[:, None])
    inside = torch.arange(count, device=scaled.device) < width
    place = torch.where(inside, logits + noise, -math.inf).argmax(-1, keepdim=True)
    return ids.gather(1, place)[:, 0], decided[:, 0]


def _keep(
    logits: torch.Tensor, filters: FilterRows, log_total: torch.Tensor, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the first tokens of each row pass all filters, at least one, and whether a prefix can tell: both
    [rows, 1]. `logits` [rows, count], float64, fall."""
    count = logits.shape[-1]
    edge = logits[:, -1:]
    # Tokens that are not here may pass too, unless all of those are masked.
    open_end = (edge > -math.inf) if not whole else torch.zeros_like(edge, dtype=torch.bool)
    width = torch.full_like(edge, count, dtype=torch.int64)
    places = torch.arange(count, device=logits.device)
    total = log_total[:, None]

    top_k = filters.top_k[:, None]
    asks = (top_k > 0) & (open_end | (top_k < width))
    kth = logits.gather(1, (top_k - 1).clamp(0, count - 1))
    undecided = asks & open_end & ((top_k > width) | (kth <= edge))
    width = torch.where(asks, (logits >= kth).sum(-1, keepdim=True), width)  # the k-th token's equals pass with it
    left = torch.where(places < width, logits, -math.inf).logsumexp(-1, keepdim=True)
    total = torch.where(asks, left, total)
    open_end = open_end & ~asks

    top_p_mass = filters.top_p_mass[:, None]
    asks = top_p_mass < math.inf
    short = ((logits - total).exp().cumsum(-1) < top_p_mass) & (places < width)
    nucleus = short.sum(-1, keepdim=True) + 1  # the smallest set that reaches it
    undecided |= asks & open_end & (nucleus > width)
    width = torch.where(asks, torch.minimum(nucleus, width), width)
    open_end = open_end & ~asks

    limit = logits[:, :1] + filters.min_p_logit[:, None]
    asks = filters.min_p_logit[:, None] > -math.inf
    undecided |= asks & open_end & (limit <= edge)
    deep = (logits >= limit).sum(-1, keepdim=True).clamp(min=1)
    width = torch.where(asks, torch.minimum(deep, width), width)
    return width, ~(undecided | (open_end & ~asks))
