"""What one step is asked to do, and its flattening into the arrays that the model reads.

A step's chunks are ragged: whole prompts, pieces of prompts and single tokens side by side. Flattened, their tokens lie
end to end, and every array that speaks of tokens has one entry for each. No torch here: schedulers speak of chunks too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import chain
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.messages import DrawParams, SamplingParams
from engine.step.block_table import BlockTable, Ints
from engine.step.ring import RingChunk
from kvstore.kv_window import KvWindow

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.bool_]


@runtime_checkable
class TokenMask(Protocol):
    """The tokens that a grammar allows next in one sequence. One thread calls `compute`; what that finds may be read
    once `ready` is true."""

    ready: bool
    allowed: Bits | None  # [vocab]
    may_end: bool  # the output is complete as it is
    forced: Sequence[int]  # the only text that may come next, as tokens; empty if there is a choice
    failure: str  # why there is no mask; "" otherwise

    @property
    def ends(self) -> Collection[int]: ...

    @property
    def slow(self) -> bool:
        """The last mask of this sequence took long."""
        ...

    def begin(self) -> bool:
        """Whether nothing has begun to compute it. From now on something has."""
        ...

    def compute(self) -> None:
        """Compute it. Never raises."""
        ...

    def ahead(self, proposals: Sequence[int]) -> Sequence[TokenMask]:
        """Return the masks after each of these tokens, which are computed with this one; none if something has begun
        to compute it. A proposal that it does not allow leaves those after it without a mask."""
        ...


class ComputedMask(Struct, gc=False):
    """A `TokenMask` that has been computed already, or is by another one."""

    allowed: Bits | None
    may_end: bool = False
    failure: str = ""
    ends: tuple[int, ...] = ()
    ready: bool = True
    slow: bool = False
    forced: Sequence[int] = ()

    def begin(self) -> bool:
        return False

    def compute(self) -> None:
        pass

    def ahead(self, proposals: Sequence[int]) -> Sequence[TokenMask]:
        return ()


class LogitsEdits(Struct, frozen=True, gc=False):
    """The changes to one row of logits, in the order in which they are made. None: no such change."""

    allowed: Ints | None = None  # all other tokens are masked
    forbidden: Ints | None = None
    bias: tuple[Ints, Floats] | None = None  # added
    repeated: Ints | None = None  # tokens of prompt and output, whose logits `repetition` shrinks
    repetition: float = 1.0
    lowered: tuple[Ints, Floats] | None = None  # subtracted


class TokenDraw(DrawParams, frozen=True, gc=False, omit_defaults=True):
    """How to choose a token, and which random numbers to choose it with.

    `index` tells apart the outputs that one request asked for from one seed. `logprobs` is how many of the likeliest
    tokens to report beside the chosen one; None reports no log-probability at all. `edits` change the logits before
    anything else. Only tokens of `mask` may be chosen. A mask that is late leaves its chunk without a token,
    and the token before it comes again. A model with recurrent states has not computed that one.
    """

    seed: int = 0
    index: int = 0
    logprobs: int | None = None
    edits: LogitsEdits | None = None
    mask: TokenMask | None = None

    @classmethod
    def of(cls, sampling: SamplingParams) -> TokenDraw:
        """Return the draw that a request asks for, without changes to the logits."""
        numbers = (getattr(sampling, name) for name in DrawParams.__struct_fields__)
        return cls(*numbers, seed=sampling.seed, logprobs=sampling.logprobs)


class Sampled(Struct, frozen=True, gc=False, omit_defaults=True):
    """The token chosen, its log-probability, and the likeliest tokens with theirs, best first.

    Log-probabilities are those of the model's own distribution, before temperature and filters. Where a logit was
    NaN or infinite, or every token was masked, `finite` is False and the token means nothing. Where a grammar's mask
    failed, or left no token, `failure` says why.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finite: bool = True
    failure: str = ""


class PromptScoring(Struct, frozen=True, gc=False):
    """Prompt tokens whose log-probabilities a chunk reports. The first of `targets` follows the chunk's token number
    `first`, the others follow the tokens after that. `top` of the likeliest tokens are reported beside each target."""

    first: int
    targets: Sequence[int]
    top: int


CHUNK_ALIGNMENT = 128
"""Tokens: long chunks are multiples of so many, or of a page if that is smaller. The kernels' tiles are full, and two
of these take less than most objectives for a step."""


class Chunk(Struct, frozen=True, gc=False):
    """New tokens of one sequence, the first at position `start`.

    `pages` are device pages for the positions 0 to start + len(tokens) − 1, in order; those before `start` are computed
    already. More pages than that may be given. A sequence that is computed in many steps keeps a `BlockTable`, which is
    of no other chunk of the same step. With `sample`, a token is drawn to follow the chunk's last. `scoring` never
    includes the token that follows the chunk's last if that one is drawn. `adapter` is the digest of the LoRA adapter
    that the sequence is computed with; "" is the plain model. `window_pages` are those of the groups of layers with a
    window, side by side for each of `pages` (`kvstore.window_groups`). Those that no token looks at are any. With a
    `kv_window`, the pages of a token's gap are any, too. The last `observed` tokens report how much they attend to each
    page that they attend to, summed over heads and all layers but the last.

    With `verify`, the chunk's last tokens are proposals, one for each of these draws. A token is drawn after every one
    of them, by `sample` after the last, and after the token before them.

    With `follows`, the chunk's only token is the one that is drawn for that chunk, by number, of the step launched just
    before. It may not be known yet, and `tokens` has a 0 in its place. If that step draws none for it, or the device
    has gone on from another token, this chunk draws none either. A draw with a mask is never followed: the next mask
    needs its token. The scheduler leaves such a sequence out of a step ahead.

    With a `ring`, it is its step's only chunk. Pages before `start` that other workers of the ring compute are complete
    when the step has ended.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: TokenDraw | None = None
    scoring: PromptScoring | None = None
    follows: int | None = None
    adapter: str = ""
    verify: Sequence[TokenDraw] = ()
    window_pages: Sequence[int] = ()
    kv_window: KvWindow | None = None
    observed: int = 0
    ring: RingChunk | None = None

    @property
    def end(self) -> int:
        """How many of the sequence's tokens are computed after this chunk, proposals included."""
        return self.start + len(self.tokens)

    @property
    def before(self) -> int:
        """How many tokens before it its first token attends to."""
        own = self.kv_window
        return self.start if own is None else self.start - own.gap(self.start) * own.page_size

    @property
    def known(self) -> int:
        """The same without proposals."""
        return self.end - len(self.verify)

    @property
    def proposals(self) -> Sequence[int]:
        return self.tokens[len(self.tokens) - len(self.verify) :]

    @property
    def draws(self) -> Sequence[tuple[int, TokenDraw]]:
        """Its draws in order, each with the position of the token drawn; none without `sample`."""
        return [] if self.sample is None else list(enumerate((*self.verify, self.sample), self.known))


class DrawnRows(Struct, frozen=True, gc=False):
    """The rows of a sequence from which the last step has drawn `tokens`, the first of these at `position`. `row`, that
    of the first, counts all draws of that step. `name` is the sequence's."""

    name: Hashable
    row: int
    tokens: Sequence[int]
    position: int


class HiddenRow(Struct, frozen=True, gc=False):
    """A row of the last step that has drawn a token, from which heads go on. `row` counts all draws of that step, and
    `draw` is that of the token at `position`, the first to be guessed. The token before it is that of the row."""

    name: Hashable
    row: int
    token: int
    position: int
    draw: TokenDraw


class Span(Struct, frozen=True, gc=False):
    """Where a chunk lies, or a part of it whose tokens have one gap: rows `first` to `last` − 1 of the batch, places
    `start` to `end` − 1 of what its tokens attend to. The first entries of `table` are the pages of that."""

    first: int
    last: int
    start: int
    end: int
    table: Ints

    def __len__(self) -> int:
        return self.last - self.first


class Batch(Struct, frozen=True, gc=False):
    """One step's tokens, end to end. All that a kernel needs to know of them lies in one array, since in a small step
    it is the making of arrays that takes time; the properties say what it consists of, in this order. The block tables
    lie where their sequences keep them, and stay there as long as the batch.
    """

    ints: Ints
    num_tokens: int  # tokens
    num_samples: int
    num_fresh_pages: int
    page_size: int
    spans: tuple[Span, ...]  # one for each chunk, or more
    moved: bool = False  # places differ from positions
    num_observed: int = 0

    @property
    def tokens(self) -> Ints:
        """[num_tokens]: their ids."""
        return self.ints[: self.num_tokens]

    @property
    def positions(self) -> Ints:
        """[num_tokens]: their places in their sequences."""
        return self.ints[self.num_tokens : 2 * self.num_tokens]

    @property
    def tables(self) -> Ints:
        """[num_tokens]: the addresses of the block tables of their sequences."""
        return self.ints[2 * self.num_tokens : 3 * self.num_tokens]

    @property
    def sample_rows(self) -> Ints:
        """[num_samples]: the rows whose logits are wanted, to draw a token or to score one of the prompt."""
        return self.ints[3 * self.num_tokens :][: self.num_samples]

    @property
    def fresh_pages(self) -> Ints:
        """[num_fresh_pages]: pages that this step writes first and leaves part empty."""
        return self.ints[3 * self.num_tokens + self.num_samples :][: self.num_fresh_pages]

    @property
    def places(self) -> Ints:
        """[num_tokens]: their places in what they attend to: positions less the pages of their gaps."""
        end = 3 * self.num_tokens + self.num_samples + self.num_fresh_pages
        return self.ints[end : end + self.num_tokens] if self.moved else self.positions

    @property
    def observed(self) -> Ints:
        """[num_observed]: the rows that report what they attend to."""
        return self.ints[len(self.ints) - self.num_observed :]

    @property
    def write_pages(self) -> Ints:
        """[num_tokens]: the pages where their K and V go."""
        indices = self.places // self.page_size
        return np.concatenate([span.table[indices[span.first : span.last]] for span in self.spans])

    @property
    def write_offsets(self) -> Ints:
        """[num_tokens]: and the places in those pages."""
        return self.places % self.page_size

    def pages_of(self, span: Span) -> Ints:
        """[pages that cover the places 0 to span.end − 1]"""
        return span.table[: -(-span.end // self.page_size)]


def flatten(
    chunks: Sequence[Chunk], page_size: int, num_pages: int, vocab_size: int, window: int | None = None
) -> Batch:
    """Lay `chunks`, at least one, end to end. O(tokens), whatever comes before them. `window`: the positions that no
    layer looks beyond, a token's own included; None: some layer attends to all.

    Raises ValueError for a chunk that no model and no pool of this size could run: on some devices an index out of
    range would end the process, and with it every other request.
    """
    if not chunks:
        raise ValueError("a batch needs at least one chunk")
    spans: list[Span] = []
    tokens: list[int] = []
    positions: list[int] = []
    addresses: list[int] = []
    sample_rows: list[int] = []
    observed: list[int] = []
    fresh: list[int] = []
    first = 0
    moved = False
    for chunk in chunks:
        start, pages = chunk.start, chunk.pages
        count = len(chunk.tokens)
        end, last = start + count, first + count
        if not count or start < 0:
            raise ValueError(f"a chunk needs tokens and a position, not {count} tokens at {start}")
        table = pages if isinstance(pages, BlockTable) else BlockTable(pages)
        covering = -(-end // page_size)
        if len(table) < covering:
            raise ValueError(f"positions up to {end - 1} need {covering} pages, not {len(table)}")
        table.check(num_pages)
        if table.first and not _reads_only_held(chunk, table, page_size, window):
            raise ValueError(f"a token at {start} attends to pages before the table's entry {table.first}")
        tokens += chunk.tokens
        if chunk.kv_window is not None:
            for span in _spans(chunk.kv_window, first, start, end, table):
                spans.append(span)
                addresses += [span.table.__array_interface__["data"][0]] * len(span)
            positions += range(start, end)
            moved = moved or spans[-1].end < end
        elif count == 1:
            spans.append(Span(first, last, start, end, table.array))
            positions.append(start)
            addresses.append(table.address)
        else:
            spans.append(Span(first, last, start, end, table.array))
            positions += range(start, end)
            addresses += [table.address] * count
        if chunk.scoring is not None:
            row = first + chunk.scoring.first
            sample_rows += range(row, row + len(chunk.scoring.targets))
        if chunk.sample is not None:
            sample_rows += range(last - 1 - len(chunk.verify), last)
        observed += range(last - chunk.observed, last)
        if end % page_size and (covering - 1) * page_size >= start:
            fresh.append(table[covering - 1])
        first = last
    if len(set(addresses)) < len(spans):
        raise ValueError("two chunks of a batch have one block table")
    _refuse_outside("token id", tokens, vocab_size)
    places = chain.from_iterable(range(span.start, span.end) for span in spans) if moved else ()
    ints = np.fromiter(chain(tokens, positions, addresses, sample_rows, fresh, places, observed), np.int64)
    return Batch(ints, len(tokens), len(sample_rows), len(fresh), page_size, tuple(spans), moved, len(observed))


def _reads_only_held(chunk: Chunk, table: BlockTable, page_size: int, window: int | None) -> bool:
    """Whether no token of a chunk attends to a page that was given back."""
    if (own := chunk.kv_window) is not None:
        return table.first <= own.first_page(chunk.start) and table.anchors == own.anchors(table.first)
    return window is not None and max(0, chunk.start - window + 1) // page_size >= table.first


def _spans(window: KvWindow, first: int, start: int, end: int, table: BlockTable) -> Iterator[Span]:
    """The parts of a chunk whose tokens have one window, each with a table of the pages beside the gap."""
    row, size = first - start, window.page_size
    for begin, stop, page in window.spans(start, end):
        entries, gap = table.array, 0
        if page:
            anchors = window.anchors(page)
            entries, gap = np.concatenate((entries[[*anchors]], entries[page : -(-stop // size)])), page - len(anchors)
        yield Span(row + begin, row + stop, begin - gap * size, stop - gap * size, entries)


def _refuse_outside(what: str, values: Sequence[int], limit: int) -> None:
    low, high = min(values), max(values)
    if low < 0 or high >= limit:
        raise ValueError(f"{what} {low if low < 0 else high} is not in 0 to {limit - 1}")
