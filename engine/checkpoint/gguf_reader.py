"""The tensors of a GGUF file, by their names in Hugging Face's layout, told as `safetensors.safe_open` tells its own.

Codes stay as they are, [rows, bytes], for `formats.gguf`. All else is dense: floats, the embedding, and types that the
format does not know.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from baton.checkpoints import from_gguf

_EMBEDDING, _HEAD = "model.embed_tokens.weight", f"{from_gguf.HEAD}.weight"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}


class _Slice(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return _NAMES[self.dtype]


class GgufTensors:
    """One file. Raises CorruptWeights if it can't be read, UnsupportedModel for tensors that have no place."""

    def __init__(self, path: Path) -> None:
        reader, self._fields = from_gguf.read_gguf(path)
        self._tensors = {tensor.name: tensor for tensor in from_gguf.tensors(reader, self._fields)}
        embedding = self._tensors.get(_EMBEDDING)
        if embedding is not None and embedding.in_codes:
            self._tensors.setdefault(_HEAD, embedding)

    def names(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _Slice:
        tensor = self._tensors[name]
        if name != _EMBEDDING and tensor.in_codes:
            return _Slice(tensor.data.shape, torch.uint8)
        dtype = _FLOATS.get(tensor.kind, torch.float32)
        if from_gguf.has_one_added(tensor.source, self._fields):
            dtype = torch.float32
        return _Slice(tensor.shape, dtype)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor, like = self._tensors[name], self.get_slice(name)
        if like.dtype == torch.float32:
            data = tensor.numbers(self._fields)
        else:
            data = from_gguf.as_published(tensor.source, tensor.data, self._fields)
        return torch.from_numpy(np.array(data)).view(like.dtype).reshape(like.shape)
