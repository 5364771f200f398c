"""The class of the native kernels' arithmetic (`engine.numerics`), measured: a digest of what a fixed input comes to.

So machines whose vectors, compilers and C libraries give the same bits are of one class, and others are not, whatever
their names.
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import torch

from engine.checkpoint.formats.affine_groups import AffineGroups
from engine.cpu.build import Library
from engine.cpu.forward import NativeForward
from engine.cpu.packed_linear import PackedLinears
from engine.cpu.thread_pool import ThreadPool
from engine.models.config import parse_spec
from engine.models.linear import Dense, Grouped, Linear, Weight
from engine.models.weights import LayerWeights, MlpWeights, ModelWeights
from engine.step.batch import Chunk, TokenDraw, flatten
from kvstore.layout import FP8, PageLayout

VERSION = 2
"""Raised whenever the kernels make other bits of the same input."""

_PAGE, _PAGES, _VOCAB, _HIDDEN, _LAYERS = 16, 40, 128, 64, 2
_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": _VOCAB,
    "hidden_size": _HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}


@functools.cache
def probe(library: Library, forms: tuple[str, ...] = ()) -> str:
    """Return the class of the library's arithmetic on this machine. Takes some milliseconds. `forms` are those of the
    model's products beside dense ones: "int8", "int4" and "fp8"."""
    digest = hashlib.blake2b(digest_size=4)
    for form in ("", *forms):
        for dtype in (torch.bfloat16, torch.float32):
            for result in _results(library, dtype, form):
                digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return f"{'-'.join((f'native-{VERSION}', *forms))}/{digest.hexdigest()}"


def _results(library: Library, dtype: torch.dtype, form: str) -> list[torch.Tensor]:
    """Logits and pages of a prompt of two segments, and of one token beside another sequence."""
    spec = parse_spec(_CONFIG)
    name = str(dtype).removeprefix("torch.")
    layout = PageLayout(_LAYERS, spec.num_kv_heads, spec.head_dim, _PAGE, name)
    pool = torch.zeros((_PAGES, *layout.shape), dtype=dtype)
    forward = NativeForward(library, ThreadPool(library, 1), spec, _weights(dtype, form), layout, pool)
    tokens = [(7 * i + i // 3) % _VOCAB for i in range(540)]
    draw, results = TokenDraw(temperature=0), list[torch.Tensor]()
    prompt = Chunk(tokens, 0, range(35), draw)
    beside = [Chunk(tokens[:1], 540, range(35), draw), Chunk(tokens[:3], 0, range(35, 36), draw)]
    for chunks in ([prompt], beside):
        scores = forward.run(flatten(chunks, _PAGE, _PAGES, _VOCAB))
        assert scores is not None
        results.append(scores.logits.clone())
    return [*results, pool]


def _weights(dtype: torch.dtype, form: str) -> ModelWeights:
    """Of random numbers; products are dense, or in codes of a form."""
    maker, generator = PackedLinears(), _Numbers()

    def tensor(*shape: int) -> torch.Tensor:
        return generator.draw(shape).to(dtype)

    def product(outputs: int, inputs: int) -> Weight:
        numbers = generator.draw((outputs, inputs))
        if not form:
            return Dense(numbers.to(dtype), None)
        bits = int(form[-1])
        codes = (numbers * 2**bits).floor().to(torch.int8)
        if form == FP8:
            codes = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)
        scale, minimum = generator.draw((2, outputs, inputs // 32)) * 2**-bits
        return Grouped(AffineGroups(codes, scale, minimum, bits), None, dtype)

    def linear(outputs: int, inputs: int) -> Linear:
        return maker.linear(product(outputs, inputs))

    def layer() -> LayerWeights:
        gate, up, down = (product(*shape) for shape in ((128, _HIDDEN), (128, _HIDDEN), (_HIDDEN, 128)))
        mlp = MlpWeights(*maker.mlp(gate, up, down))
        return LayerWeights(
            1 + tensor(_HIDDEN), linear(256, _HIDDEN), 1 + tensor(6, 32), linear(_HIDDEN, 128), None,
            1 + tensor(_HIDDEN), mlp, None,
        )  # fmt: skip

    layers = tuple(layer() for _ in range(_LAYERS))
    return ModelWeights(tensor(_VOCAB, _HIDDEN), layers, None, 1 + tensor(_HIDDEN), linear(_VOCAB, _HIDDEN))


class _Numbers:
    """Numbers between −0.5 and 0.5 that no release of a library changes: a multiplicative hash of their places."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        mixed = np.arange(self._drawn, self._drawn + count, dtype=np.uint32) * np.uint32(2_654_435_769)
        mixed = (mixed ^ mixed >> 15) * np.uint32(2_246_822_519)
        self._drawn += count
        return torch.from_numpy((mixed ^ mixed >> 13).astype(np.float32) / 2**32 - 0.5).reshape(shape)
