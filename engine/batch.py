"""What one step is asked to do, and its flattening into the arrays that the model reads.

A step's chunks are ragged: whole prompts, pieces of prompts and single tokens side by side. Flattened, their tokens lie
end to end, and every array that speaks of tokens has one entry for each. No torch here: schedulers speak of chunks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """How to choose a token, and which random numbers to choose it with.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 filter nothing. `index` tells apart the outputs that one
    request asked for from one seed. `logprobs` is how many of the likeliest tokens to report beside the chosen one;
    None reports no log-probability at all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0
    logprobs: int | None = None


@dataclass(frozen=True)
class Sampled:
    """The token chosen, its log-probability, and the likeliest tokens with theirs, best first.

    Log-probabilities are those of the model's own distribution, before temperature and filters.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence, the first at position `start`.

    `pages` are device pages for the positions 0 to start + len(tokens) − 1, in order; those before `start` are computed
    already. More pages than that may be given. With `sample`, a token is drawn to follow the chunk's last.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: Draw | None = None

    @property
    def end(self) -> int:
        """How many of the sequence's tokens are computed after this chunk."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Span:
    """Where a chunk lies: rows `first` to `last` − 1 of the batch, positions `start` to `end` − 1 of its sequence."""

    first: int
    last: int
    start: int
    end: int
    pages: Ints  # [pages that cover 0 to end − 1]

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Batch:
    """One step's tokens, end to end. All arrays are int64; `tokens`, `positions`, `pages` and `offsets` have one entry
    for each token: its id, its place in its sequence, and the page and the place in that page where its K and V go.
    """

    tokens: Ints
    positions: Ints
    pages: Ints
    offsets: Ints
    spans: tuple[Span, ...]  # one for each chunk
    sample_rows: Ints  # the rows whose hidden state a token is drawn from
    begun: Ints  # pages that this step writes first and leaves part empty


def flatten(chunks: Sequence[Chunk], page_size: int, num_pages: int, vocab_size: int) -> Batch:
    """Lay `chunks`, at least one, end to end.

    Raises ValueError for a chunk that no model and no pool of this size could run: on some devices an index out of
    range would end the process, and with it every other request.
    """
    if not chunks:
        raise ValueError("a batch needs at least one chunk")
    spans: list[Span] = []
    begun: list[int] = []
    row = 0
    for chunk in chunks:
        covering = -(-chunk.end // page_size)
        if not chunk.tokens or chunk.start < 0:
            raise ValueError(f"a chunk needs tokens and a position, not {len(chunk.tokens)} tokens at {chunk.start}")
        if len(chunk.pages) < covering:
            raise ValueError(f"positions up to {chunk.end - 1} need {covering} pages, not {len(chunk.pages)}")
        pages = np.asarray(chunk.pages[:covering], dtype=np.int64)
        spans.append(Span(row, row + len(chunk.tokens), chunk.start, chunk.end, pages))
        row += len(chunk.tokens)
        if chunk.end % page_size and (covering - 1) * page_size >= chunk.start:
            begun.append(int(pages[-1]))

    tokens = np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in chunks])
    positions = np.concatenate([np.arange(span.start, span.end, dtype=np.int64) for span in spans])
    batch = Batch(
        tokens=tokens,
        positions=positions,
        pages=np.concatenate([span.pages[np.arange(span.start, span.end) // page_size] for span in spans]),
        offsets=positions % page_size,
        spans=tuple(spans),
        sample_rows=np.array([s.last - 1 for s, c in zip(spans, chunks, strict=True) if c.sample], dtype=np.int64),
        begun=np.array(begun, dtype=np.int64),
    )
    _refuse_outside("token id", tokens, vocab_size)
    for span in spans:
        _refuse_outside("page", span.pages, num_pages)
    return batch


def _refuse_outside(what: str, values: Ints, limit: int) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= limit:
        raise ValueError(f"{what} {low if low < 0 else high} is not in 0 to {limit - 1}")
