"""In the place of vLLM's compiled operations: the few that a dense model takes on its way, in torch.

Python prefers a compiled module of this name, so this one is idle once that lies beside it. Its numbers are those of
vLLM's kernels up to rounding, and it is slow: it is here to show that steps, pages and draws are right.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn import functional

_compiled, _caches = torch.library.Library("_C", "FRAGMENT"), torch.library.Library("_C_cache_ops", "FRAGMENT")


def _operation(schema: str, library: torch.library.Library = _compiled) -> Callable[[Callable[..., None]], None]:
    def define(function: Callable[..., None]) -> None:
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")

    return define


def _gated(name: str, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    @_operation(f"{name}(Tensor! result, Tensor input) -> ()")
    def compute(result: torch.Tensor, input: torch.Tensor) -> None:
        gate, up = input.chunk(2, -1)
        result.copy_(activation(gate) * up)


_gated("silu_and_mul", functional.silu)
_gated("gelu_and_mul", functional.gelu)
_gated("gelu_tanh_and_mul", lambda gate: functional.gelu(gate, approximate="tanh"))


def _normed(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return x if weight is None else x * weight.float()


@_operation("rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()")
def _(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    result.copy_(_normed(input, weight, epsilon))


@_operation("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()")
def _(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    residual.copy_(input.float() + residual.float())
    input.copy_(_normed(residual, weight, epsilon))


@_operation(
    "rotary_embedding(Tensor positions, Tensor! query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
)
def _(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    assert is_neox, "not written"
    assert not rope_dim_offset, "not written"
    assert not inverse, "not written"
    cos, sin = (half.unsqueeze(1).float() for half in cos_sin_cache[positions.flatten()].chunk(2, -1))
    width = cos.shape[-1]
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(positions.numel(), -1, head_size)
        first, second = heads[..., :width].float(), heads[..., width : 2 * width].float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)  # before either is overwritten
        heads[..., : 2 * width] = turned.to(states.dtype)


@_operation(
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()",
    _caches,
)
def _(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    triton_reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def _view(pinned: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the GPU."""
    if not pinned.numel():
        return torch.empty_like(pinned, device="cuda")
    assert pinned.is_pinned()
    assert pinned.is_contiguous()
    held = {"shape": (pinned.nbytes,), "typestr": "|u1", "data": (pinned.data_ptr(), False), "version": 3}
    seen = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=held, pinned=pinned), device="cuda")
    return seen.view(pinned.dtype).view(pinned.shape)


# As attributes of the name space: an operation of torch may not return what it was given.
torch.ops._C.get_cuda_view_from_cpu_tensor = _view
torch.ops._C.weak_ref_tensor = lambda tensor: tensor  # it stays alive longer
for _name in (
    "cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
):  # fmt: skip
    setattr(torch.ops._C, _name, lambda capability: False)
torch.ops._C_cuda_utils.get_max_shared_memory_per_block_device_attribute = lambda device: (
    torch.cuda.get_device_properties(device).shared_memory_per_block_optin
)
