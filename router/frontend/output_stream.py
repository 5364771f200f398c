"""One request's output on its way to its client: tokens in from the state, text and tokens out as the client reads.

Output that a slow client has not read is merged into pieces, so it costs no more than its tokens. Past a limit the
request is cancelled, because memory and decode pages are for clients that read. Pieces are small, because gRPC keeps
the one that it writes for as long as the client is connected and does not read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from baton.messages import PromptTokenLogprob, TokenLogprob
from router.events import Cancelled, Finished, RequestEnded, Summary
from router.frontend.detokenizer import TextStream

MAX_UNREAD = 8_192  # tokens
MAX_UNREAD_BYTES = 4 * 2**20  # of memory, about: 1,600 tokens where each has 20 alternatives
_PIECE_BYTES = 32 * 2**10  # of memory, about; a piece takes nothing more then
_TOKEN_BYTES, _LOGPROB_BYTES = 40, 120  # of memory: for each token, and for each token or alternative with a logprob


@dataclass
class Output:
    """New output, in order."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[PromptTokenLogprob] = field(default_factory=list[PromptTokenLogprob])  # before all tokens
    size: int = 0  # bytes of memory, about,
    prompt_size: int = 0  # of which so many are those of `prompt_logprobs`


class StopVerdict(Enum):
    """What taking tokens led to."""

    GOES_ON = "goes on"
    STOPPED = "a stop string has ended the output"
    UNREAD = "the client does not read"


class OutputStream:
    """One request's output. The router's loop puts in, its client's task takes out; both on one event loop."""

    def __init__(
        self, name: str, text: TextStream, max_unread: int = MAX_UNREAD, max_unread_bytes: int = MAX_UNREAD_BYTES
    ) -> None:
        self.name = name  # of the request, within the cluster
        self._text = text
        self._max_unread = max_unread
        self._max_unread_bytes = max_unread_bytes
        self._pieces = deque[Output]()
        self._unread = 0  # tokens
        self._unread_bytes = 0
        self._end: RequestEnded | None = None
        self._stopped = False
        self._news = asyncio.Event()
        self.worker = ""  # incarnation of the decode worker that the last tokens came from
        self.token_count = 0  # tokens that count as output
        self.reads = 0  # pieces that the client's task has asked for: it asks again when one is written

    @property
    def unread(self) -> int:
        """Tokens that its client has not taken yet."""
        return self._unread

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output, if one did."""
        return self._text.stop

    @property
    def ended(self) -> bool:
        return self._end is not None

    def emit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> StopVerdict:
        """Take tokens, each once and in order. After a stop string no more are taken."""
        if self._stopped:
            return StopVerdict.GOES_ON
        piece = self._text.feed(tokens)
        self.token_count += piece.count
        self._put(piece.text, tokens[: piece.count], logprobs[: piece.count])
        self._stopped = piece.stopped
        self._news.set()
        if self._stopped:
            return StopVerdict.STOPPED
        unread = self._unread > self._max_unread or self._unread_bytes > self._max_unread_bytes
        return StopVerdict.UNREAD if unread else StopVerdict.GOES_ON

    def prompt_scored(self, logprobs: Sequence[PromptTokenLogprob]) -> None:
        """Take log-probabilities of prompt tokens, each once and in order. `request_parsing` bounds their number. They
        don't count as unread, because many come at once, before the client's task gets its turn."""
        for one in logprobs:
            piece, size = self._open_piece(), _LOGPROB_BYTES * (1 + len(one.top))
            piece.prompt_logprobs.append(one)
            piece.size += size
            piece.prompt_size += size
        self._news.set()

    def _open_piece(self) -> Output:
        if not self._pieces or self._pieces[-1].size >= _PIECE_BYTES:
            self._pieces.append(Output())
        return self._pieces[-1]

    def _put(self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        if not text and not tokens:
            return
        piece = self._open_piece()
        piece.text += text
        piece.tokens += tokens
        piece.logprobs += logprobs
        size = len(text) + _TOKEN_BYTES * len(tokens) + sum(_LOGPROB_BYTES * (1 + len(one.top)) for one in logprobs)
        piece.size += size
        self._unread += len(tokens)
        self._unread_bytes += size

    def end(self, end: RequestEnded) -> None:
        """The request has ended. Where the output ended at a stop string, that is what the client is told, though the
        tokens that followed may have led the state elsewhere in the same moment."""
        outcome, summary = end.outcome, end.summary
        if isinstance(outcome, Finished) and not self._stopped:
            rest = self._text.flush()
            self._put(rest.text, (), ())
            self._stopped = rest.stopped
        if self._stopped and not isinstance(outcome, Cancelled):
            outcome, summary = Finished("stop"), _cut(summary, self.token_count)
        self._end = RequestEnded(end.request, outcome, summary)
        self._news.set()

    def wake(self) -> None:
        """Have `read` return, with an output of size 0 if nothing is new."""
        if not self._pieces and self._end is None:
            self._pieces.append(Output())
            self._news.set()

    async def read(self) -> Output | RequestEnded:
        """The next piece of what is new, as soon as there is something; the end comes last."""
        self.reads += 1
        while True:
            if self._pieces:
                piece = self._pieces.popleft()
                self._unread -= len(piece.tokens)
                self._unread_bytes -= piece.size - piece.prompt_size
                return piece
            if self._end is not None:
                return self._end
            self._news.clear()
            await self._news.wait()

    def abandon(self) -> None:
        """Forget what is unread: the client does not come for it."""
        self._pieces.clear()
        self._unread = self._unread_bytes = 0


def _cut(summary: Summary, completion: int) -> Summary:
    return replace(summary, usage=replace(summary.usage, completion=completion))
