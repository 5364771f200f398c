"""The file in Q4_K that `bench.engine.formats` measures holds the numbers of the checkpoint, nearly."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from bench.engine.gguf_form import q4_k


@pytest.mark.parametrize("kind", ["random", "zeros", "positive"])
def test_blocks_are_near_their_numbers(kind: str):
    random = np.random.default_rng(3)
    weight = random.normal(size=(3, 512)).astype(np.float32)
    weight = {"random": weight, "zeros": 0 * weight, "positive": abs(weight) + 1}[kind]
    read = dequantize(q4_k(weight), Kind.Q4_K)
    groups, lost = weight.reshape(-1, 32), abs(read - weight).reshape(-1, 32).max(1)
    # Half a step, and what 6 bits of scale and minimum lose of the largest group's.
    spans = groups.max(1) - np.minimum(groups.min(1), 0)
    assert (lost <= spans / 30 + spans.max() / 63 + 1e-6).all()
