"""How much memory a worker needs, from the model's config alone: no weights are read."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from engine.models import mlp
from engine.models.linear import Linear, LinearMaker
from engine.models.weights import ModelWeights, outline
from engine.spec import ExpertsSpec, ModelSpec

LOGIT_BYTES = 4
_WORKER_BYTES = 300 * 2**20  # of a process with torch and its other libraries, before it loads a model; measured


@dataclass(frozen=True)
class WorkerMemory:
    """The parts of one worker's memory, in bytes."""

    weights: int
    pages: int
    activations: int  # the largest step's, about
    process: int = _WORKER_BYTES
    draft: int = 0  # its weights, and its pages on our own engine

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.activations + self.process + self.draft


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


def activation_bytes(
    config: ModelSpec, dtype: torch.dtype, step_tokens: int, logit_rows: int, maker: LinearMaker
) -> int:
    """Return about how many bytes the largest step needs on the device that `maker` makes products for: its widest
    layer, the residual stream, and its logits."""
    hidden, size = config.hidden_size, dtype.itemsize
    queries = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

    def mlp_bytes(experts: ExpertsSpec | None) -> int:
        if experts is None:
            return mlp.dense_bytes(step_tokens, config.intermediate_size, size)
        way = mlp.way_on_device(experts, hidden, dtype) if maker.stacks_experts else "host"
        return mlp.mixed_bytes(experts, step_tokens, hidden, size, way)

    widest = max(mlp_bytes(experts) for experts in {layer.experts for layer in config.layers})
    parts = step_tokens * 3 * hidden * size, max(step_tokens * 2 * queries * size, widest)
    return sum(parts) + logit_rows * config.vocab_size * LOGIT_BYTES


def _parts(value: Any) -> list[torch.Tensor | Linear]:
    match value:
        case None:
            return []
        case _ if hasattr(value, "nbytes"):
            return [value]
        case tuple():
            return [part for each in value for part in _parts(each)]
        case _:
            return [part for field in fields(value) for part in _parts(getattr(value, field.name))]
