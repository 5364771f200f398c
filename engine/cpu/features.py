"""What the native kernels compute."""

# pyright: strict

from __future__ import annotations

from engine.spec import ModelSpec


def runs(spec: ModelSpec) -> bool:
    """Whether the kernels compute all that a model of this shape needs.

    All its layers must rotate as many elements of a head. All its experts must be of one size, without biases and
    without norms of what they add.
    """
    experts = [layer.experts for layer in spec.layers if layer.experts is not None]
    return (
        len({layer.rope.rotated for layer in spec.layers}) == 1
        and len({one.intermediate_size for one in experts}) < 2
        and not (experts and (spec.output_norms or spec.mlp_bias))
    )
