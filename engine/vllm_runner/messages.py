"""What a worker and its vLLM child say to each other: msgpack over a socket pair, answers in the order of orders."""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from baton.messages import PromptTokenLogprob
from engine.step.batch import Bits, Floats, Ints, LogitsEdits, Sampled, TokenDraw, TokenMask


class SentMask(Struct, frozen=True, gc=False):
    """A token mask that was ready when its step was sent."""

    packed: bytes  # the allowed tokens, one bit for each
    count: int  # of them; 0: there is no mask
    may_end: bool
    failure: str
    ends: tuple[int, ...]

    @classmethod
    def of(cls, mask: TokenMask) -> SentMask:
        allowed = mask.allowed
        bits = b"" if allowed is None else np.packbits(allowed).tobytes()
        return cls(bits, 0 if allowed is None else len(allowed), mask.may_end, mask.failure, tuple(mask.ends))

    def mask(self) -> ReceivedMask:
        allowed: Bits | None = None
        if self.count:
            allowed = np.unpackbits(np.frombuffer(self.packed, np.uint8), count=self.count).astype(np.bool_)
        return ReceivedMask(True, allowed, self.may_end, self.failure, self.ends)


@dataclass
class ReceivedMask:
    """A `TokenMask` that was computed elsewhere."""

    ready: bool
    allowed: Bits | None
    may_end: bool
    failure: str
    ends: tuple[int, ...]
    slow: bool = False

    def begin(self) -> bool:
        return False

    def compute(self) -> None:
        pass


class SentEdits(Struct, frozen=True, gc=False):
    """The changes to one row of logits, arrays as bytes: int64 and float32."""

    allowed: bytes | None
    forbidden: bytes | None
    bias: tuple[bytes, bytes] | None
    repeated: bytes | None
    repetition: float
    lowered: tuple[bytes, bytes] | None

    @classmethod
    def of(cls, edits: LogitsEdits) -> SentEdits:
        def sent(array: Ints | Floats | None) -> bytes | None:
            return None if array is None else array.tobytes()

        def pair(arrays: tuple[Ints, Floats] | None) -> tuple[bytes, bytes] | None:
            return None if arrays is None else (arrays[0].tobytes(), arrays[1].tobytes())

        return cls(
            sent(edits.allowed), sent(edits.forbidden), pair(edits.bias), sent(edits.repeated), edits.repetition,
            pair(edits.lowered),
        )  # fmt: skip

    def edits(self) -> LogitsEdits:
        def ids(sent: bytes | None) -> Ints | None:
            return None if sent is None else np.frombuffer(sent, np.int64)

        def pair(sent: tuple[bytes, bytes] | None) -> tuple[Ints, Floats] | None:
            return None if sent is None else (np.frombuffer(sent[0], np.int64), np.frombuffer(sent[1], np.float32))

        return LogitsEdits(
            ids(self.allowed), ids(self.forbidden), pair(self.bias), ids(self.repeated), self.repetition,
            pair(self.lowered),
        )  # fmt: skip


class SentDraw(Struct, frozen=True, gc=False):
    """A `TokenDraw`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    index: int
    logprobs: int | None
    edits: SentEdits | None
    mask: SentMask | None

    @classmethod
    def of(cls, draw: TokenDraw) -> SentDraw:
        edits = None if draw.edits is None else SentEdits.of(draw.edits)
        mask = None if draw.mask is None else SentMask.of(draw.mask)
        return cls(
            draw.temperature, draw.top_p, draw.top_k, draw.min_p, draw.seed, draw.index, draw.logprobs, edits, mask
        )

    def draw(self) -> TokenDraw:
        return TokenDraw(
            self.temperature, self.top_p, self.top_k, self.min_p, self.seed, self.index, self.logprobs,
            None if self.edits is None else self.edits.edits(),
            None if self.mask is None else self.mask.mask(),
        )  # fmt: skip


class Row(Struct, frozen=True, gc=False):
    """One chunk. `name` is the runner's own for the sequence. With `appends`, the sequence goes on from its last step:
    its token is the one that was drawn, and `pages` are those it has more than then. Else it is new to vLLM, and
    `pages` are all of it. With `follows`, its token is the one drawn for that row of the step before, and `tokens` has
    a 0 in its place."""

    name: int
    appends: bool
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    fresh: int | None  # a page that this step writes first and leaves part empty
    draw: SentDraw | None
    targets: Sequence[int] = ()  # prompt tokens to score, the first of which follows token `first` of the chunk
    first: int = 0
    top: int = 0
    follows: int | None = None
    reported: bool = True  # so is its draw; else it is made because vLLM makes one
    adapter: int = 0  # number of its LoRA adapter, from 1; 0: the plain model


class Load(Struct, frozen=True, tag=True):
    """Load a checkpoint. The first message. Without `num_pages` there are as many as fit on the GPU, of which vLLM may
    use the part `memory_share` in all."""

    path: str
    dtype: str
    num_pages: int | None
    page_size: int
    max_rows: int
    max_tokens: int
    threads: int
    device: str = "cpu"
    memory_share: float = 0.05
    adapters: Sequence[tuple[str, str]] = ()  # name and directory of each LoRA adapter, checked
    max_lora_rank: int = 16
    ranks: int = 1
    eager: bool = False  # don't compile the model
    deadline: float = 60.0  # seconds that several ranks may take for an order
    kv_cache_dtype: str = "auto"  # by vLLM's names
    exact: bool = True  # a row's bits must not depend on other rows
    attention_backend: str = ""  # by vLLM's names; empty: vLLM chooses
    gpus: Sequence[str] = ()  # UUIDs of the ranks' GPUs

    @property
    def companion(self) -> bool:
        """A step of one row has a second one: on a CPU, products of one row take a kernel that makes other bits."""
        return self.exact and self.device == "cpu"


class Attach(Struct, frozen=True, tag=True):
    """Copies are from and to this arena from now on. Its descriptor follows."""

    slots: int
    page_bytes: int


class Step(Struct, frozen=True, tag=True):
    """Run one step. Rows named in `gone` are not asked for again."""

    rows: Sequence[Row]
    gone: Sequence[int]


class Duplicate(Struct, frozen=True, tag=True):
    """Copy one page to another. Has no answer."""

    source: int
    dest: int


class Out(Struct, frozen=True, tag=True):
    """Copy pages into slots."""

    pages: Sequence[int]
    slots: Sequence[int]


class In(Struct, frozen=True, tag=True):
    """Copy slots into pages. `checksums` are what the slots should have; empty: don't look."""

    slots: Sequence[int]
    pages: Sequence[int]
    checksums: Sequence[int]


class Loaded(Struct, frozen=True, tag=True):
    """The model is ready, with so many pages."""

    num_pages: int

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    form: str
    computed_in: str  # the model's dtype, which is not that of FP8 pages
    vocab_size: int
    max_positions: int
    process_ids: Sequence[int] = ()  # of the ranks, where there are several


class Drawn(Struct, frozen=True, tag=True):
    """A step has run. For each row the token drawn, or none; and by number of the row what it scored. A row that
    follows one without a token was left out."""

    sampled: Sequence[Sampled | None]
    scores: Mapping[int, Sequence[PromptTokenLogprob]]
    seconds: float


class Copied(Struct, frozen=True, tag=True):
    """Copies have been made: the checksums of the slots, or whether each page was intact. No step ran for so long."""

    checksums: Sequence[int] = ()
    intact: Sequence[bool] = ()
    seconds: float = 0.0


class Failed(Struct, frozen=True, tag=True):
    """An order failed. The child goes on, unless it could not load."""

    kind: str
    message: str


Order: TypeAlias = Load | Attach | Step | Duplicate | Out | In
Answer: TypeAlias = Loaded | Drawn | Copied | Failed
