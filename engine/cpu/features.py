"""What the native kernels compute: dense models."""

# pyright: strict

from __future__ import annotations

from engine.spec import ModelSpec


def runs(spec: ModelSpec) -> bool:
    """Whether the kernels compute all that a model of this shape needs.

    They know no mixture of experts. All layers rotate as many elements of a head.
    """
    return (
        all(layer.experts is None for layer in spec.layers) and len({layer.rope.rotated for layer in spec.layers}) == 1
    )
