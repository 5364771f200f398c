"""What the native kernels compute: dense models of Llama's shape."""

# pyright: strict

from __future__ import annotations

from engine.spec import ModelSpec


def runs(spec: ModelSpec) -> bool:
    """Whether the kernels compute all that a model of this shape needs.

    They know no mixture of experts, no activation but SiLU, and neither norms of outputs nor norms with one added.
    Embeddings and scores have no scales of their own. All layers rotate whole heads alike.
    """
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
