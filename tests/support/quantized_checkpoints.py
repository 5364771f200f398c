"""Small quantized checkpoints, written by each format's definition, and transformers with the numbers that they mean.

`make` rewrites a checkpoint of `tests.support.checkpoints`: products of attention and MLP are quantized, all else
stays. Beside it lies the plain checkpoint that the quantized numbers stand for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoints

Tensors = dict[str, torch.Tensor]

_GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLAIN = "plain"


@dataclass(frozen=True)
class Format:
    """`encode` returns a product's tensors by their endings, and the weight [out, in] that they mean."""

    config: Mapping[str, Any]
    encode: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    activations: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What becomes of the inputs of products, if they are quantized too."""


def make(format_name: str, path: Path, recipe: str = "qwen3", **settings: Any) -> Path:
    """Write a quantized checkpoint into `path`."""
    chosen = FORMATS[format_name]
    checkpoints.make(recipe, path, **settings)
    checkpoints.make(recipe, plain(path), **settings)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if "_proj." not in name:
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = chosen.encode(tensor)
        stored |= {f"{name.removesuffix('weight')}{ending}": part.contiguous() for ending, part in parts.items()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    save_file(meant, plain(path) / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": chosen.config}))
    return path


def plain(path: Path) -> Path:
    """Return where the plain checkpoint of the quantized one in `path` is."""
    return path / _PLAIN


def reference(format_name: str, path: Path) -> checkpoints.Reference:
    """What the quantized checkpoint in `path` means, computed in float32."""
    result = checkpoints.reference(plain(path))
    if (change := FORMATS[format_name].activations) is not None:
        for name, module in result.model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]),))
    return result


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for each row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scale).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def _int8_rows(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / 127
    return (x / scale).round().clamp(-128, 127) * scale


def _fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for each row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def _fp8_rows(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for each block of 128 x 128, of which the last ones are smaller."""
    scale = torch.nn.functional.max_pool2d(weight.abs()[None], 128, ceil_mode=True)[0] / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def _fp8_block_scales(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts, meant = _fp8_blocks(weight)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, meant


def _grouped(weight: torch.Tensor, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4-bit codes [in, out], and scales and zeros [groups, out]."""
    columns = weight.T.reshape(-1, _GROUP, len(weight))  # [groups, group, out]
    if symmetric:
        scale = columns.abs().amax(dim=1) / 7
        zero = torch.full_like(scale, 8)
    else:
        low, high = columns.amin(dim=1).clamp(max=0), columns.amax(dim=1).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round()
    scale = scale.to(torch.float16).float()
    codes = (columns / scale[:, None] + zero[:, None]).round().clamp(0, 15)
    return codes.reshape(-1, len(weight)), scale, zero


def _meant(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((codes - zero.repeat_interleave(_GROUP, 0)) * scale.repeat_interleave(_GROUP, 0)).T


def _packed(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight 4-bit numbers of the last dimension in an int32 each; place i has the one at `order[i]`."""
    parts = codes.to(torch.int64).reshape(*codes.shape[:-1], -1, 8)
    whole = torch.stack([parts[..., at] << (4 * place) for place, at in enumerate(order)]).sum(dim=0)
    return (whole - ((whole >> 31) << 32)).to(torch.int32)


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale, zero = _grouped(weight, symmetric=True)
    parts = {
        "qweight": _packed(codes.T).T,
        "qzeros": _packed(zero - 1),
        "scales": scale.half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // _GROUP,
    }
    return parts, _meant(codes, scale, zero)


def _gptq_act_order(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Groups are made of inputs in another order. Codes stand in the order of the inputs."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    codes, scale, zero = _grouped(weight[:, order], symmetric=False)
    zero = zero.clamp(min=1)  # writers of this form can't say 0
    place = order.argsort()
    parts = {
        "qweight": _packed(codes[place].T).T,
        "qzeros": _packed(zero - 1),
        "scales": scale.half(),
        "g_idx": (place // _GROUP).int(),
    }
    return parts, _meant(codes, scale, zero)[:, place]


def _int8_groups(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.unflatten(1, (-1, _GROUP))
    scale = (groups.abs().amax(dim=2) / 127).bfloat16()
    codes = (groups / scale.float()[:, :, None]).round().clamp(-128, 127)
    parts = {"weight": codes.flatten(1).to(torch.int8), "weight_scale": scale}
    return parts, (codes * scale.float()[:, :, None]).flatten(1)


def _int4(weight: torch.Tensor, *, symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    codes, scale, zero = _grouped(weight, symmetric=symmetric)
    parts = {
        "weight_packed": _packed(codes.T),
        "weight_scale": scale.T.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = _packed(zero).T
    return parts, _meant(codes, scale, zero)


def _int4_act_order(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(2))
    codes, scale, zero = _grouped(weight[:, order], symmetric=True)
    place = order.argsort()
    parts = {
        "weight_packed": _packed(codes[place].T),
        "weight_scale": scale.T.half(),
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": (place // _GROUP).int(),
    }
    return parts, _meant(codes, scale, zero)[:, place]


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _fp4(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of E2M1, two in a byte, and what they mean; `scale` is of groups [out, groups]."""
    groups = weight.unflatten(1, (scale.shape[1], -1)) / scale[:, :, None]
    codes = (groups.abs()[..., None] - _E2M1).abs().argmin(dim=-1)
    meant = _E2M1[codes] * groups.sign() * scale[:, :, None]
    codes = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, meant.flatten(1)


def _mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    exponent = weight.unflatten(1, (-1, 32)).abs().amax(dim=2).log2().floor() - 2
    packed, meant = _fp4(weight, exponent.exp2())
    return {"weight_packed": packed, "weight_scale": (exponent + 127).to(torch.uint8)}, meant


def _nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    whole = 448 * 6 / weight.abs().amax()
    scale = (weight.unflatten(1, (-1, 16)).abs().amax(dim=2) / 6 * whole).to(torch.float8_e4m3fn)
    packed, meant = _fp4(weight, scale.float() / whole)
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole[None]}, meant


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale, zero = _grouped(weight, symmetric=False)
    parts = {"qweight": _packed(codes, _AWQ_ORDER), "qzeros": _packed(zero, _AWQ_ORDER), "scales": scale.half()}
    return parts, _meant(codes, scale, zero)


def _compressed(kind: str, layout: str) -> Mapping[str, Any]:
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers | {"strategy": "channel", "dynamic": False},
                "input_activations": numbers | {"strategy": "token", "dynamic": True},
            }
        },
    }


def _in_groups(bits: int, layout: str, **settings: Any) -> Mapping[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | settings}},
    }


_GPTQ: Mapping[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False}
FORMATS: Mapping[str, Format] = {
    "int8": Format(_compressed("int", "int-quantized"), _int8, _int8_rows),
    "fp8": Format(_compressed("float", "float-quantized"), _fp8, _fp8_rows),
    "fp8-blocks": Format({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8_blocks),
    "fp8-blocks-ct": Format(
        _in_groups(8, "float-quantized", type="float", strategy="block", block_structure=[128, 128], group_size=None),
        _fp8_block_scales,
    ),
    "int8-groups": Format(_in_groups(8, "int-quantized"), _int8_groups),
    "int4": Format(_in_groups(4, "pack-quantized"), _int4),
    "int4-zeros": Format(
        _in_groups(4, "pack-quantized", symmetric=False), lambda weight: _int4(weight, symmetric=False)
    ),
    "int4-act-order": Format(_in_groups(4, "pack-quantized", actorder="group"), _int4_act_order),
    "mxfp4": Format(_in_groups(4, "mxfp4-pack-quantized", type="float", group_size=32), _mxfp4),
    "nvfp4": Format(
        _in_groups(4, "nvfp4-pack-quantized", type="float", group_size=16, strategy="tensor_group"), _nvfp4
    ),
    "gptq": Format(_GPTQ, _gptq),
    "gptq-act-order": Format({**_GPTQ, "sym": False, "desc_act": True}, _gptq_act_order),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"}, _awq
    ),
}
