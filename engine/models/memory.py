"""How much memory a worker needs, from the model's config alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from engine.layers.linear import TILE, Linear
from engine.models.config import ModelSpec
from engine.models.weights import ModelWeights, outline

LOGIT_BYTES = 4
_WORKER_BYTES = 300 * 2**20  # of a process with torch and its other libraries, before it loads a model; measured


@dataclass(frozen=True)
class WorkerMemory:
    """The parts of one worker's memory, in bytes."""

    weights: int
    pages: int
    activations: int  # the largest step's, about
    process: int = _WORKER_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.activations + self.process


def weight_bytes(config: ModelSpec, dtype: torch.dtype, on_cpu: bool, head: bool = True) -> int:
    """Return the bytes of the weights as the engine holds them.

    On a CPU, products of float32 and bfloat16 are held in tiles: outputs are padded to whole ones, and a head that is
    tied to the embedding is a copy. Without `head`, as in a prefill worker with prefill.lm_head false, what only makes
    tokens is left out.
    """
    weights = outline(config, dtype, head)
    in_tiles = on_cpu and dtype != torch.float16
    parts = [
        part for field in fields(ModelWeights) if field.name != "head" for part in _parts(getattr(weights, field.name))
    ]
    if weights.head is not None and (in_tiles or not config.tied_embeddings):
        parts.append(weights.head)
    return sum(_bytes(part, in_tiles) for part in parts)


def activation_bytes(config: ModelSpec, dtype: torch.dtype, step_tokens: int, logit_rows: int) -> int:
    """Return about how many bytes the largest step needs: its widest layer, the residual stream, and its logits."""
    queries = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = 3 * config.hidden_size + max(3 * config.intermediate_size, 2 * queries)
    return step_tokens * width * dtype.itemsize + logit_rows * config.vocab_size * LOGIT_BYTES


def _parts(value: Any) -> list[torch.Tensor | Linear]:
    """Return the tensors and products of a part of the weights."""
    match value:
        case None:
            return []
        case torch.Tensor() | Linear():
            return [value]
        case tuple():
            return [part for each in value for part in _parts(each)]
        case _:
            return [part for field in fields(value) for part in _parts(getattr(value, field.name))]


def _bytes(part: torch.Tensor | Linear, in_tiles: bool) -> int:
    if isinstance(part, torch.Tensor):
        return part.nbytes
    outputs = part.out_size + (-part.out_size % TILE if in_tiles else 0)
    return outputs * part.in_size * part.dtype.itemsize + (part.bias.nbytes if part.bias is not None else 0)
