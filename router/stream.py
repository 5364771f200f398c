"""One request's output on its way to its client: tokens in from the state, text and tokens out as the client reads.

What a slow client has not read is merged into one piece, so it costs no more than its tokens; and there is a limit to
those: past it the request is cancelled, since memory and decode pages are not for readers who do not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from baton.messages import TokenLogprob
from router.events import Cancelled, End, Finished, Summary
from router.text import TextStream

MAX_UNREAD = 8_192  # tokens


@dataclass
class Output:
    """New output, in order."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])


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
        self._pending = Output()
        self._end: End | None = None
        self._stopped = False
        self._news = asyncio.Event()
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
        self._pending.text += piece.text
        self._pending.tokens += tokens[: piece.taken]
        self._pending.logprobs += logprobs[: piece.taken]
        self._stopped = piece.stopped
        self._news.set()
        if self._stopped:
            return Verdict.STOPPED
        return Verdict.UNREAD if len(self._pending.tokens) > self._max_unread else Verdict.GOES_ON

    def end(self, end: End) -> None:
        """The request has ended. Where the output ended at a stop string, that is what the client is told, though the
        tokens that followed may have led the state elsewhere in the same moment."""
        outcome, summary = end.outcome, end.summary
        if isinstance(outcome, Finished) and not self._stopped:
            rest = self._text.flush()
            self._pending.text += rest.text
            self._stopped = rest.stopped
        if self._stopped and not isinstance(outcome, Cancelled):
            outcome, summary = Finished("stop"), _cut(summary, self.taken)
        self._end = End(end.request, outcome, summary)
        self._news.set()

    async def read(self) -> Output | End:
        """Everything new since the last call, as soon as there is something; the end comes last."""
        while True:
            if self._pending.text or self._pending.tokens:
                pending, self._pending = self._pending, Output()
                return pending
            if self._end is not None:
                return self._end
            self._news.clear()
            await self._news.wait()


def _cut(summary: Summary, completion: int) -> Summary:
    return replace(summary, usage=replace(summary.usage, completion=completion))
