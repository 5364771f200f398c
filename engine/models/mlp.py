"""What follows attention in a layer: one MLP, or a mixture of experts, on a host or on a device.

A host reads which experts were chosen and computes those, one after the other. On a device that would wait for it in
every layer. There, rows are sorted by expert, and every shape follows from the number of rows alone. So nothing is read
back, and a step is launched whole.
"""

from functools import cache
from typing import Literal, TypeAlias

import torch
from torch.nn import functional

from engine.models.weights import ExpertsWeights, MlpWeights, StackedExperts
from engine.spec import Activation, ExpertsSpec

Way: TypeAlias = Literal["host", "groups", "blocks"]
"""How experts are multiplied: one after the other, in one kernel, or in blocks of rows."""

_MOST_GROUPS = 1_023  # that torch's kernel takes
_ALIGNED = 8  # elements of bfloat16 in 16 bytes, of which that kernel wants its rows to be multiples
_BLOCK = 16, 256  # rows of an expert that are multiplied together, at least and at most; powers of two
_GATHERED_BYTES = 2**28
"""Copies of experts' weights that exist at a time, where no kernel reads them in place. One expert may take more."""


def dense(w: MlpWeights, activation: Activation, x: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] → the same, through one MLP."""
    return w.down(_gated(w.gate_up(x), activation))


def mixed(w: ExpertsWeights, experts: ExpertsSpec, activation: Activation, x: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] → the same: each row through its `top_k` experts, weighted by the router's probabilities."""
    likely = functional.linear(x, w.router).softmax(dim=-1, dtype=torch.float32)
    shares, chosen = likely.topk(experts.top_k, dim=-1)
    if experts.renormalise:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    if isinstance(w.experts, StackedExperts):
        return _mixed_on_device(w.experts, activation, x, shares.to(x.dtype), chosen)
    return _mixed_on_host(w.experts, activation, x, shares, chosen)


def dense_bytes(rows: int, inner: int, itemsize: int) -> int:
    """Return the most bytes that `dense` takes beside its input: gate and up, what the activation makes of gate, and
    their product."""
    return rows * 4 * inner * itemsize


def way_on_device(experts: ExpertsSpec, hidden: int, dtype: torch.dtype) -> Way:
    """Return how experts are going to be multiplied on the GPU of this machine. If there is none, one is assumed that
    has a kernel for it."""
    here = torch.cuda.is_available()
    kernel = _has_kernel(torch.device("cuda"), dtype) if here else dtype == torch.bfloat16
    return "groups" if kernel and _kernel_takes(experts.count, hidden, experts.intermediate_size) else "blocks"


def mixed_bytes(experts: ExpertsSpec, rows: int, hidden: int, itemsize: int, way: Way) -> int:
    """Return about the most bytes that `mixed` takes beside its input. On a host an expert may have all rows."""
    inner, routed = experts.intermediate_size, rows * experts.top_k
    router = rows * experts.count * (4 + itemsize)
    if way == "host":
        return router + dense_bytes(rows, inner, itemsize) + rows * 3 * hidden * itemsize
    sorting = routed * 4 * 8  # order, experts and places, int64
    if way == "groups":
        widest = max(hidden + 4 * inner, 2 * hidden + 3 * inner, 3 * hidden)
        return router + sorting + (routed * widest + rows * hidden) * itemsize
    size, blocks = _blocks(routed, experts.count)
    filled, weight = blocks * size * hidden, 2 * inner * hidden  # one expert's gate and up
    at_once = min(blocks, max(1, _GATHERED_BYTES // (weight * itemsize)))
    part = at_once * size
    multiplied = max(at_once * weight + part * 2 * inner, part * 4 * inner, part * inner + at_once * weight // 2)
    return router + sorting + (routed * hidden + 2 * filled + max(multiplied, filled)) * itemsize


def _mixed_on_host(
    experts: tuple[MlpWeights, ...], activation: Activation, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """In the experts' order, so that sums are the same in every run. `shares` and `chosen` are [rows, top_k]."""
    out = torch.zeros_like(x)
    for number in chosen.unique().tolist():
        rows, place = torch.where(chosen == number)
        expert = dense(experts[number], activation, x[rows])
        out.index_add_(0, rows, expert * shares[rows, place, None].to(x.dtype))
    return out


def _mixed_on_device(
    experts: StackedExperts, activation: Activation, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """As `_mixed_on_host`, without a word to the host. An *assignment* is a row and one of its experts."""
    rows, top_k = chosen.shape
    numbers = chosen.flatten()
    order = numbers.argsort(stable=True)  # of the assignments, by expert
    numbers = numbers.index_select(0, order)
    inputs = x.index_select(0, order // top_k)
    counted = torch.arange(len(experts.down), device=x.device)
    ends = torch.searchsorted(numbers, counted, right=True, out_int32=True)  # of each expert's assignments
    if _multiplies_groups(experts):
        outputs, places = _grouped(experts, activation, inputs, ends), torch.arange(len(order), device=x.device)
    else:
        outputs, places = _in_blocks(experts, activation, inputs, numbers, ends.long())
    place_of = torch.empty_like(order).index_copy_(0, order, places)
    # Sums of one row lie in one order, where adding into rows would take that in which the device gets there.
    return torch.bmm(shares.unsqueeze(1), outputs.index_select(0, place_of).view(rows, top_k, -1)).squeeze(1)


def _grouped(experts: StackedExperts, activation: Activation, inputs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply `inputs`, sorted by expert. The kernel reads on the device where each expert's rows end."""
    inner = functional.grouped_mm(inputs, experts.gate_up.transpose(1, 2), offs=ends)
    return functional.grouped_mm(_gated(inner, activation), experts.down.transpose(1, 2), offs=ends)


def _in_blocks(
    experts: StackedExperts, activation: Activation, inputs: torch.Tensor, numbers: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply `inputs`, sorted by expert, of which `numbers` are the experts, in blocks of rows of one expert each.

    The last block of an expert is filled up with zeros. Only the device knows how many blocks that makes, so there are
    as many as the worst choice of experts would need. Returns the blocks' rows, and where those of `inputs` are among
    them.
    """
    count, total = len(experts.down), len(inputs)
    size, blocks = _blocks(total, count)
    counts = ends.diff(prepend=ends.new_zeros(1))
    blocks_of = (counts + size - 1) // size
    block_ends = blocks_of.cumsum(0)
    shifts = (block_ends - blocks_of) * size - (ends - counts)
    places = shifts.index_select(0, numbers) + torch.arange(total, device=inputs.device)
    filled = inputs.new_zeros(blocks * size, inputs.shape[1]).index_copy_(0, places, inputs).view(blocks, size, -1)
    block_numbers = torch.arange(blocks, device=inputs.device)
    # A block that is none's has zeros only, and any expert computes it.
    expert_of = torch.searchsorted(block_ends, block_numbers, right=True).clamp_(max=count - 1)
    at_once = max(1, _GATHERED_BYTES * count // experts.gate_up.nbytes)
    outputs = [
        torch.bmm(
            _gated(torch.bmm(part, experts.gate_up.index_select(0, which).transpose(1, 2)), activation),
            experts.down.index_select(0, which).transpose(1, 2),
        )
        for part, which in zip(filled.split(at_once), expert_of.split(at_once), strict=True)
    ]
    return torch.cat(outputs).flatten(0, 1), places


def _blocks(assignments: int, experts: int) -> tuple[int, int]:
    """Return the rows of a block, and as many blocks as the worst choice of experts needs."""
    size = _block_size(assignments, experts)
    used = min(experts, assignments)
    return size, used + (assignments - used) // size


def _block_size(assignments: int, experts: int) -> int:
    """About as many rows as an expert has. Each block costs a copy of its expert, and each row of zeros a product."""
    least, most = _BLOCK
    return min(most, max(least, 1 << (assignments // experts).bit_length()))


def _gated(products: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[..., 2 · inner] → [..., inner], from gate and up side by side."""
    gate, up = products.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up


def _multiplies_groups(experts: StackedExperts) -> bool:
    """Whether torch multiplies groups of rows in one kernel here. Elsewhere `grouped_mm` copies their ends to the host,
    which waits for the device."""
    weight, inner = experts.gate_up, experts.down.shape[-1]
    return _kernel_takes(len(weight), weight.shape[-1], inner) and _has_kernel(weight.device, weight.dtype)


def _kernel_takes(count: int, hidden: int, inner: int) -> bool:
    return hidden % _ALIGNED == 0 and inner % _ALIGNED == 0 and count <= _MOST_GROUPS


@cache
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Torch has that kernel for bfloat16, and for compute capabilities 9.x and 10.x (2.11 to 2.13)."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)
