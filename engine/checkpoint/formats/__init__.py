"""How checkpoints store the matrices of their layers, and how each way becomes dense numbers.

A new format is one file here and its name below. Norms, embedding, output head and routers are stored plain in all.
"""

from typing import Any

from baton.errors import UnsupportedModel
from engine.checkpoint.formats.format import WeightFormat
from engine.checkpoint.formats.fp8_block import Fp8Block
from engine.checkpoint.formats.plain import Plain

FORMATS: dict[str, WeightFormat] = {"plain": Plain(), "fp8_block": Fp8Block()}


def name_of(quantization: Any) -> str:
    """The format that a config's `quantization_config` describes. Raises UnsupportedModel, naming the method."""
    if quantization is None:
        return "plain"
    settings: dict[str, Any] = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    method = settings.get("quant_method")
    if method == "fp8" and settings.get("weight_block_size") == [128, 128]:
        return "fp8_block"
    raise UnsupportedModel(
        f"quantization_config {method!r} is not supported; serve an unquantized checkpoint, or one in fp8 with blocks "
        "of 128 x 128"
    )
