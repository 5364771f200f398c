"""How fast a case could be at best: what must be read and multiplied, at the speeds that the machine has.

The roofline of Williams et al. (CACM 2009): a step takes at least as long as reading its bytes, and at least as long as
its arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.peers.cases import Case


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
