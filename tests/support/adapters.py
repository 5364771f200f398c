"""Small random LoRA adapters in PEFT's format, and transformers with their weights merged into the model's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoints

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_ALPHA, _SCALE = 16, 0.2  # weights large enough to change tokens


def make(
    path: Path,
    model: Path,
    seed: int,
    rank: int = 8,
    products: Sequence[str] = ATTENTION,
    scale: float = _SCALE,
    **settings: Any,
) -> Path:
    """Write an adapter for `products` of all layers of a checkpoint. `settings` go into its config. `scale` is the
    deviation of its weights."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in products:
            rows, columns = weight.shape
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = (
                    torch.randn(shape, generator=generator) * scale
                )
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": _ALPHA, "bias": "none", "target_modules": list(products)}
    (path / "adapter_config.json").write_text(json.dumps(config | settings))
    return path


def merged(model: Path, adapter: Path) -> checkpoints.Reference:
    """The model with the adapter's products added to its weights."""
    reference = checkpoints.reference(model)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                b = tensors[name.replace("lora_A", "lora_B")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weight = reference.model.get_parameter(f"{module}.weight")
                weight += b @ a * (config["lora_alpha"] / config["r"])
    return reference


def add(reference: checkpoints.Reference, adapter: Path) -> checkpoints.Reference:
    """Compute the adapter beside the products of a model, from their inputs as they are before the model's own hooks
    change them: a model with quantized inputs does not quantize those of its adapter."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            b = tensors[name.replace("lora_A", "lora_B")] * (config["lora_alpha"] / config["r"])
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            _add(reference.model.get_submodule(module), a, b)
    return reference


def _add(product: torch.nn.Module, a: torch.Tensor, b: torch.Tensor) -> None:
    inputs: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs.append(arguments[0])

    def change(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + inputs.pop() @ a.T @ b.T

    product.register_forward_pre_hook(keep, prepend=True)
    product.register_forward_hook(change)
