"""One output's text as a chat's deltas, added up: what all chat APIs read."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.frontend.chat.deltas import CallArguments, CallBegin, ChatDelta, ChatOutput, Reasoning
from router.frontend.chat.text_parser import DeltaWriter, Reads
from router.frontend.chat.thinking import ThinkSplitter


class ChatParser:
    """Parses one output. `output` is everything so far."""

    def __init__(
        self, out: DeltaWriter, reader: Reads, *, show_reasoning: bool = True, parallel_calls: bool = True
    ) -> None:
        """Without `parallel_calls` only the first call is given."""
        self._out = out
        self._reader = reader
        self._show_reasoning = show_reasoning
        self._parallel_calls = parallel_calls
        self.output = ChatOutput()
        self._tokens_until_end: int | None = None  # of the reasoning

    def reasoning_tokens(self, tokens: Sequence[int], end: int | None) -> int | None:
        """How many of the output's tokens are reasoning, its markers included; None if that is not known. `end` is the
        token that ends reasoning."""
        if end is None or not isinstance(self._reader, ThinkSplitter):
            return None
        if not self._reader.thought:
            return 0
        if self._reader.thinks:
            return len(tokens)
        if self._tokens_until_end is None:
            self._tokens_until_end = tokens.index(end) + 1 if end in tokens else len(tokens)
        return self._tokens_until_end

    def feed(self, text: str) -> Sequence[ChatDelta]:
        """Return what more text comes to."""
        self._reader.feed(text)
        return self._taken()

    def finish(self) -> Sequence[ChatDelta]:
        """Return what was held back: no more text comes."""
        self._reader.finish()
        self._out.finish()
        return self._taken()

    def _taken(self) -> Sequence[ChatDelta]:
        deltas = list(self._shown())
        for delta in deltas:
            self.output.take(delta)
        return deltas

    def _shown(self) -> Iterator[ChatDelta]:
        for delta in self._out.take():
            match delta:
                case Reasoning() if not self._show_reasoning:
                    pass
                case CallBegin(index=index) | CallArguments(index=index) if index and not self._parallel_calls:
                    pass
                case _:
                    yield delta
