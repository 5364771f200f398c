"""FP8 pages as vLLM's kernels for CPUs make them, with torch alone; and checkpoints that bring scales for them.

Those kernels round toward zero, and numbers beyond the largest become the largest.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from tests.support import checkpoints


class Scales(NamedTuple):
    """What a layer's K and V are divided by."""

    k: float
    v: float


NONE: Sequence[Scales] = ()
_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def codes(numbers: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes that the kernels make of float32 numbers."""
    largest = torch.finfo(dtype).max
    scaled = (numbers / scale).clamp(-largest, largest)
    nearest = scaled.to(dtype)
    too_large = nearest.float().abs() > scaled.abs()
    return nearest.view(torch.uint8) - too_large.to(torch.uint8)  # a smaller code is nearer to zero


def meant(bytes_: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 numbers that the kernels read from bytes."""
    return bytes_.view(dtype).float() * scale


class Fp8Cache(DynamicCache):
    """Holds what the kernels would read. `scales` are those of each layer; empty: 1."""

    def __init__(self, dtype: torch.dtype, scales: Sequence[Scales]) -> None:
        super().__init__()
        self._dtype, self._scales = dtype, scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self._scales[layer_idx] if self._scales else Scales(1.0, 1.0)
        keys, values = self._held(key_states, scales.k), self._held(value_states, scales.v)
        return super().update(keys, values, layer_idx, *args, **kwargs)

    def _held(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        return meant(codes(numbers, scale, self._dtype), scale, self._dtype)


def reference(
    path: Path, dtype: torch.dtype = torch.float8_e4m3fn, scales: Sequence[Scales] = NONE
) -> checkpoints.Reference:
    """Load a checkpoint with transformers, in float32, and have its attention read FP8."""
    return replace(checkpoints.reference(path), cache=lambda: Fp8Cache(dtype, scales))


def bring(path: Path, scales: Sequence[Scales], strategy: str = "tensor") -> Path:
    """Rewrite the plain checkpoint in `path` as llm-compressor does one of which it quantized K and V alone."""
    tensors = load_file(path / "model.safetensors")
    for layer, scale in enumerate(scales):
        for name, value in scale._asdict().items():
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor([value])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": _SCHEME | {"strategy": strategy},
    }
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return path
