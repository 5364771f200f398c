"""How much memory a worker needs, from the model's config alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from engine.models.linear import Linear, LinearMaker
from engine.models.weights import ModelWeights, outline
from engine.spec import ModelSpec

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


def weight_bytes(config: ModelSpec, dtype: torch.dtype, maker: LinearMaker, head: bool = True) -> int:
    """Return the bytes of the weights as the engine holds them on the device that `maker` makes products for.

    Without `head`, as in a prefill worker with prefill.lm_head false, what only makes tokens is left out.
    """
    weights = outline(config, dtype, head, maker)
    parts = [
        part for field in fields(ModelWeights) if field.name != "head" for part in _parts(getattr(weights, field.name))
    ]
    if weights.head is not None and (maker.copies(dtype) or not config.tied_embeddings):
        parts.append(weights.head)
    return sum(part.nbytes for part in parts)


def activation_bytes(config: ModelSpec, dtype: torch.dtype, step_tokens: int, logit_rows: int) -> int:
    """Return about how many bytes the largest step needs: its widest layer, the residual stream, and its logits."""
    queries = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # Of a mixture of experts, all that one token goes through at most.
    inner = max(
        config.intermediate_size if layer.experts is None else layer.experts.top_k * layer.experts.intermediate_size
        for layer in config.layers
    )
    width = 3 * config.hidden_size + max(3 * inner, 2 * queries)
    return step_tokens * width * dtype.itemsize + logit_rows * config.vocab_size * LOGIT_BYTES


def _parts(value: Any) -> list[torch.Tensor | Linear]:
    """Return the tensors and products of a part of the weights."""
    match value:
        case None:
            return []
        case _ if hasattr(value, "nbytes"):
            return [value]
        case tuple():
            return [part for each in value for part in _parts(each)]
        case _:
            return [part for field in fields(value) for part in _parts(getattr(value, field.name))]
