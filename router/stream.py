"""One request's output on its way to its client: tokens in from the state, text and tokens out as the client reads.

What a slow client has not read is merged into a few pieces, which may have so many bytes together. Past that the
request is cancelled: memory and decode pages are not for clients that do not read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from baton.messages import TokenLogprob
from router.events import Cancelled, End, Finished, Summary
from router.text import TextStream

MAX_UNREAD = 2 * 2**20  # bytes of memory
_PIECE = 64 * 2**10  # bytes of memory after which a piece is full, and becomes a message
_TOKEN_BYTES = 40  # of memory: a Python int in a list
_LOGPROB_BYTES = 130  # of memory: a token's logprob, and each of its alternatives


@dataclass
class Output:
    """New output, in order."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    size: int = 0  # bytes of memory, about


class Verdict(Enum):
    """What taking tokens led to."""

    GOES_ON = "goes on"
    STOPPED = "a stop string has ended the output"
    UNREAD = "the client does not read"


class Stream:
    """One request's output. The router's loop puts in, its client's task takes out; both on one event loop."""

    def __init__(self, name: str, text: TextStream, max_unread: int = MAX_UNREAD) -> None:
        self.name = name  # of the request, within the cluster
        self._text = text
        self._max_unread = max_unread
        self._pending: deque[Output] = deque()  # the last one may still grow
        self._unread = 0  # bytes of memory, about
        self._end: End | None = None
        self._stopped = False
        self._news = asyncio.Event()
        self._when_ended: Callable[[], object] | None = None
        self.reads = 0
        self.taken = 0  # tokens that count as output

    @property
    def ended(self) -> bool:
        return self._end is not None

    def emit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Verdict:
        """Take tokens, each once and in order. After a stop string no more are taken."""
        if self._stopped:
            return Verdict.GOES_ON
        piece = self._text.feed(tokens)
        self.taken += piece.taken
        size = len(piece.text) + _TOKEN_BYTES * piece.taken
        size += _LOGPROB_BYTES * sum(1 + len(one.top) for one in logprobs[: piece.taken])
        self._append(piece.text, tokens[: piece.taken], logprobs[: piece.taken], size)
        self._stopped = piece.stopped
        self._news.set()
        if self._stopped:
            return Verdict.STOPPED
        return Verdict.UNREAD if self._unread > self._max_unread else Verdict.GOES_ON

    def _append(self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], size: int) -> None:
        if not self._pending or self._pending[-1].size > _PIECE:
            self._pending.append(Output())
        last = self._pending[-1]
        last.text += text
        last.tokens += tokens
        last.logprobs += logprobs
        last.size += size
        self._unread += size

    def end(self, end: End) -> None:
        """The request has ended. Where the output ended at a stop string, that is what the client is told, though the
        tokens that followed may have led the state elsewhere in the same moment."""
        outcome, summary = end.outcome, end.summary
        if isinstance(outcome, Finished) and not self._stopped:
            rest = self._text.flush()
            self._append(rest.text, (), (), len(rest.text))
            self._stopped = rest.stopped
        if self._stopped and not isinstance(outcome, Cancelled):
            outcome, summary = Finished("stop"), _cut(summary, self.taken)
        self._end = End(end.request, outcome, summary)
        if isinstance(outcome, Cancelled):
            self._pending.clear()
        self._news.set()
        if self._when_ended is not None:
            self._when_ended()

    def when_ended(self, call: Callable[[], object] | None) -> None:
        """Call this at the end, or now if the request has ended; None: no longer."""
        self._when_ended = call
        if call is not None and self._end is not None:
            call()

    def give_up(self, why: str) -> None:
        """The request has ended, and its client does not read: drop what it has not read, and tell it that."""
        assert self._end is not None
        self._pending.clear()
        self._end = replace(self._end, outcome=Cancelled(why))

    async def read(self) -> Output | End:
        """Everything new since the last call, as soon as there is something; the end comes last."""
        self.reads += 1
        while True:
            while self._pending:
                piece = self._pending.popleft()
                self._unread -= piece.size
                if piece.text or piece.tokens:
                    return piece
            if self._end is not None:
                return self._end
            self._news.clear()
            await self._news.wait()


def _cut(summary: Summary, completion: int) -> Summary:
    return replace(summary, usage=replace(summary.usage, completion=completion))
