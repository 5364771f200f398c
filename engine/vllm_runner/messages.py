"""What a worker and its vLLM child say to each other: msgpack over a socket pair, answers in the order of orders."""

# pyright: strict

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from msgspec import Struct, convert, msgpack

from baton.messages import PromptTokenLogprob
from engine.step.batch import Bits, ComputedMask, Sampled, TokenDraw, TokenMask


class Row(Struct, frozen=True, gc=False, omit_defaults=True):
    """One chunk. `name` is the runner's own for the sequence. With `appends`, the sequence goes on from its last step:
    its token is the one that was drawn, and `pages` are those it has more than then. Else it is new to vLLM, and
    `pages` are all of it. `window_pages` are those of the other groups of layers, side by side for each page. With
    `follows`, its token is the one drawn for that row of the step before, and `tokens` has a 0 in its place. With
    `verify`, its last tokens are proposals, as those of a `Chunk` are. A row without tokens is left out."""

    name: int
    appends: bool
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    fresh: Sequence[int]  # pages that this step writes first and leaves part empty
    draw: TokenDraw | None
    targets: Sequence[int] = ()  # prompt tokens to score, the first of which follows token `first` of the chunk
    first: int = 0
    top: int = 0
    follows: int | None = None
    adapter: int = 0  # number of its LoRA adapter, from 1; 0: the plain model
    window_pages: Sequence[int] = ()
    verify: Sequence[TokenDraw] = ()

    @property
    def known(self) -> Sequence[int]:
        """Its tokens without proposals."""
        return self.tokens[: len(self.tokens) - len(self.verify)]

    @property
    def proposals(self) -> Sequence[int]:
        return self.tokens[len(self.tokens) - len(self.verify) :]

    @property
    def draws(self) -> Sequence[tuple[int, TokenDraw]]:
        """Its draws in order, each with the position of the token drawn; none without `draw`."""
        first = self.start + len(self.known)
        return [] if self.draw is None else list(enumerate((*self.verify, self.draw), first))

    def drawn_after(self, end: int) -> Sequence[int]:
        """The tokens of a step after which it draws, if its own end before `end`."""
        return range(end - len(self.draws), end)


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
    max_loras: int = 0  # LoRA adapters at a time, those included
    max_lora_rank: int = 16
    ranks: int = 1
    eager: bool = False  # don't compile the model
    deadline: float = 60.0  # seconds that several ranks may take for an order
    kv_cache_dtype: str = "auto"  # by vLLM's names
    exact: bool = True  # a row's bits must not depend on other rows
    attention_backend: str = ""  # by vLLM's names; empty: vLLM chooses
    max_model_len: int = 0  # 0: as many tokens as the model takes
    quantization: str = ""  # by vLLM's names
    expert_parallel: bool = False
    gpus: Sequence[str] = ()  # UUIDs of the ranks' GPUs
    stages: int = 1  # that divide the layers; the ranks of each one divide the heads
    drafts: Mapping[str, str | int] = {}  # vLLM's `speculative_config`; empty: it proposes nothing

    @property
    def stage_ranks(self) -> int:
        return self.ranks // self.stages

    @property
    def companion(self) -> bool:
        """A step of one row has a second one: on a CPU, products of one row take a kernel that makes other bits."""
        return self.exact and self.device == "cpu"


class Attach(Struct, frozen=True, tag=True):
    """Copies are from and to this arena from now on. Its descriptor follows."""

    slots: int
    page_bytes: int


class Beside(Struct, frozen=True, tag=True):
    """The orders to attach and copy come by the socket that follows, from now on, and are carried out beside steps."""


class Step(Struct, frozen=True, tag=True):
    """Run one step. Rows named in `gone` are not asked for again. vLLM's draft proposes `guesses` tokens after each row
    that draws, and has its K and V in any case."""

    rows: Sequence[Row]
    gone: Sequence[int]
    guesses: int = 0


class AddAdapter(Struct, frozen=True, tag=True):
    """Load a checked LoRA adapter. No other one has ever had its number: vLLM takes a number for the weights."""

    number: int
    name: str
    path: str


class RemoveAdapter(Struct, frozen=True, tag=True):
    """Remove a LoRA adapter. Rows named in `gone` are not asked for again, and no other row has it."""

    number: int
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
    """Copy slots into pages. `checksums` are what the slots should have; empty: don't look. `after`: so many orders to
    duplicate come first, counted from the start."""

    slots: Sequence[int]
    pages: Sequence[int]
    checksums: Sequence[int]
    after: int = 0


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
    copies_beside: bool = False  # the child takes `Beside`
    window_groups: int = 0  # groups of layers with a window, each with pages of its own
    window: int = 0  # of these, tokens
    states: bool = False  # their pages are recurrent states
    verifies: bool = False  # rows may have proposals


class Drawn(Struct, frozen=True, tag=True):
    """A step has run. For each row the tokens drawn, up to the first that is not the proposal after it; and by number
    of the row what it scored, and what vLLM's draft proposes after the last token. A row that follows one without a
    token was left out. The seconds of the proposals are not in those of the step."""

    sampled: Sequence[Sequence[Sampled]]
    scores: Mapping[int, Sequence[PromptTokenLogprob]]
    seconds: float
    proposals: Mapping[int, Sequence[int]] = {}
    guess_seconds: float = 0.0


class Copied(Struct, frozen=True, tag=True):
    """Copies have been made: the checksums of the slots, or whether each page was intact, and how long that took."""

    checksums: Sequence[int] = ()
    intact: Sequence[bool] = ()
    seconds: float = 0.0


class Failed(Struct, frozen=True, tag=True):
    """An order failed. The child goes on, unless it could not load."""

    kind: str
    message: str


Order: TypeAlias = Load | Attach | Beside | Step | AddAdapter | RemoveAdapter | Duplicate | Out | In
Answer: TypeAlias = Loaded | Drawn | Copied | Failed


def _plain(value: npt.NDArray[Any] | TokenMask) -> Any:
    """Return an array or a mask as what msgpack knows. The bits of a mask are packed."""
    if not isinstance(value, np.ndarray):
        return ComputedMask(value.allowed, value.may_end, failure=value.failure, ends=tuple(value.ends))
    return (len(value), np.packbits(value).tobytes()) if value.dtype == np.bool_ else value.tobytes()


def _restored(kind: Any, value: Any) -> Any:
    """Return what `_plain` was given, of that type."""
    if kind is TokenMask:
        return convert(value, ComputedMask, dec_hook=_restored)
    if kind == Bits:
        count, packed = value
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(np.bool_)
    return np.frombuffer(value, get_args(get_args(kind)[1])[0])


encode = msgpack.Encoder(enc_hook=_plain).encode
decode_order: Callable[[bytes], Order] = msgpack.Decoder(Order, dec_hook=_restored).decode
decode_answer: Callable[[bytes], Answer] = msgpack.Decoder(Answer).decode
