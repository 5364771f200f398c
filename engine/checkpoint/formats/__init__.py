"""How checkpoints store the matrices of their layers, and how each way becomes numbers: dense ones, or codes in
groups (`affine_groups`).

A new format is one file here and its name below. Norms, embedding, output head and routers are stored plain in all.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import ValidationError

from baton.errors import UnsupportedModel
from engine.checkpoint.formats import awq, compressed_tensors, fp8_block, gguf, gptq
from engine.checkpoint.formats.format import Matrix, Shape, Take, WeightFormat
from engine.checkpoint.formats.plain import Plain
from engine.spec import WeightSpec

_METHODS: Mapping[str, tuple[Callable[[Mapping[str, Any]], WeightSpec], Callable[[WeightSpec], WeightFormat]]] = {
    "awq": (awq.describe, awq.Awq),
    "compressed-tensors": (compressed_tensors.describe, compressed_tensors.CompressedTensors),
    "fp8": (fp8_block.describe, fp8_block.Fp8Block),
    "gguf": (gguf.describe, gguf.Gguf),
    "gptq": (gptq.describe, gptq.Gptq),
}


def describe(quantization: Any) -> WeightSpec:
    """Return the format that a config's `quantization_config` describes. Raises UnsupportedModel, naming the method."""
    if quantization is None:
        return WeightSpec()
    settings: dict[str, Any] = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModel(
            f"quantization_config {method!r} is not supported; known: {', '.join(_METHODS)}. Or serve an unquantized "
            "checkpoint"
        )
    try:
        spec = _METHODS[method][0](settings)
        for pattern in spec.plain:
            re.compile(pattern.removeprefix("re:"))
    except (ValidationError, re.error) as error:
        raise UnsupportedModel(f"quantization_config of {method} is not supported: {error}") from None
    return spec


def format_of(spec: WeightSpec, name: str) -> WeightFormat:
    if spec.types and gguf.type_name(name) not in dict(spec.types):
        return Plain(spec)
    if spec.method == "plain" or any(_means(pattern, name) for pattern in spec.plain):
        return Plain(spec)
    return _METHODS[spec.method][1](spec)


def read_matrix(spec: WeightSpec, name: str, shape: Shape, take: Take) -> Matrix:
    """Return the matrix `name`. Raises CorruptWeights, naming a tensor, and UnsupportedModel for a shape that the
    format can't hold."""
    matrix = format_of(spec, name).read_matrix(name, shape, take)
    if tuple(matrix.shape) != shape:
        raise UnsupportedModel(f"{name} is {list(shape)}, which {spec} can't hold; quantize it in another form")
    return matrix


def _means(pattern: str, name: str) -> bool:
    regular = pattern.removeprefix("re:")
    return pattern == name if regular == pattern else re.match(regular, name) is not None
