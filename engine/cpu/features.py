"""What the native kernels compute: dense models of Llama's shape."""

# pyright: strict

from __future__ import annotations

from engine.spec import ModelSpec


def runs(spec: ModelSpec) -> bool:
    """Whether both sets of kernels compute all that a model of this shape needs. What they don't know is a mixture of
    experts, another activation than SiLU, norms of outputs, norms with one added, scaled embeddings and scores,
    rotations that differ between layers, and heads that are rotated in part."""
    return (
        all(layer.experts is None for layer in spec.layers)
        and spec.activation == "silu"
        and not spec.output_norms
        and not spec.norms_add_one
        and spec.embedding_scale == 1
        and spec.query_scale is None
        and spec.rope is not None
        and not spec.rope.rotated
    )
