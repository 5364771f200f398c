"""How fast a case could be at best: what must be read and multiplied, at the speeds that the machine has.

The roofline of Williams et al. (CACM 2009): a step takes at least as long as reading its bytes, and at least as long as
its arithmetic.

The machine's speeds are measured with the fastest routines among the libraries at hand. Bandwidth is torch's sum of
integers over a buffer far larger than any cache. Of eleven loops tried on two cores (libc's memchr, sums, maxima and
dot products of numpy and torch) it was the fastest, at 93 GB/s. memchr, which hardly does more than read, reached 87.
Arithmetic is a large matrix product, plain or with a packed weight, whichever is faster. On a CPU without bfloat16
instructions the product is in float32, since such a CPU multiplies bfloat16 that way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.peers.cases import Case

_BYTES = 2**29
_SIZE = 2_048  # of square matrices; those of 4,096 came out slower
_TRIES = 5

_buffer = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Limits:
    """The machine's limits: bytes read, and floating point operations, per second."""

    read: float
    compute: float

    def __str__(self) -> str:
        return f"read {self.read / 1e9:.1f} GB/s, {self.compute / 1e12:.2f} TFLOP/s"

    def best(self, other: Limits) -> Limits:
        """Of the machine's speeds before and after something, the one that was there to be used."""
        return Limits(max(self.read, other.read), max(self.compute, other.compute))

    def seconds(self, read_bytes: float, operations: float) -> float:
        return max(read_bytes / self.read, operations / self.compute)


@dataclass(frozen=True)
class Shape:
    """The properties of a model that decide its roofline."""

    layers: int  # parameters of the matrices of all layers, which every token is multiplied with
    head: int  # those of the head's, which only tokens are multiplied with that another one is drawn from
    attention: int  # operations for one query over one key, in all layers and heads
    kv_bytes: int  # K and V of one token in all layers
    width: int  # bytes of one parameter

    @classmethod
    def of(cls, config: Mapping[str, Any], width: int) -> Shape:
        """Of a Llama, from its `config.json`; K and V are as wide as the weights."""
        hidden, layers, size = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        queries, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        matrices = hidden * (queries + 2 * kv) + queries * hidden + 3 * hidden * config["intermediate_size"]
        return cls(
            layers=layers * matrices,
            head=hidden * config["vocab_size"],
            attention=layers * 4 * queries,  # a multiplication and an addition for the score, and for the value
            kv_bytes=layers * 2 * kv * width,
            width=width,
        )


def seconds(case: Case, shape: Shape, limits: Limits) -> float:
    """The least time for a case: all prompts in one step, then a step for every further token.

    Chunks would read the weights more often, and each prompt's keys again; that is not needed, so it is not counted.
    """
    pairs = case.prompt * (case.prompt + 1) // 2  # of a query and a key, causal
    total = limits.seconds(
        (shape.layers + shape.head) * shape.width,
        case.sequences * (2 * shape.layers * case.prompt + 2 * shape.head + shape.attention * pairs),
    )
    for context in range(case.prompt + 1, case.prompt + case.output):
        total += decode_step(case.sequences, context, shape, limits)
    return total


def decode_step(sequences: int, context: int, shape: Shape, limits: Limits) -> float:
    """One token for each sequence, over `context` tokens, the new one included."""
    return limits.seconds(
        (shape.layers + shape.head) * shape.width + sequences * context * shape.kv_bytes,
        sequences * (2 * (shape.layers + shape.head) + shape.attention * context),
    )


def rate(case: Case, shape: Shape, limits: Limits) -> float:
    """What of the case is counted, a second."""
    return case.rate(seconds(case, shape, limits))


def machine_limits(threads: int, dtype: torch.dtype) -> Limits:
    """Return the limits; takes about a quarter of a second. torch's number of threads stays changed."""
    global _buffer
    torch.set_num_threads(threads)
    if not len(_buffer):
        # numpy asks for huge pages, torch does not: worth 5 %.
        _buffer = torch.from_numpy(np.ones(_BYTES // 8, dtype=np.int64))
    read = _BYTES / _shortest(lambda: _buffer.sum())
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtype = torch.float32
    left, right = (torch.randn(_SIZE, _SIZE).to(dtype) for _ in range(2))
    spent = _shortest(lambda: left @ right)
    if dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(right)
        spent = min(spent, _shortest(lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")))
    return Limits(read, 2 * _SIZE**3 / spent)


def _shortest(work: Callable[[], object]) -> float:
    """Return the shortest of several tries after a warm-up, in seconds: a limit is the best case, not the usual one."""
    work()
    times: list[float] = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)
