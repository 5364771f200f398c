"""Guesses of how a sequence goes on. A step verifies them, so a wrong one costs its row and never a token.

`Proposer` is the seam. `NgramProposer` looks in prompt and output (prompt lookup): agents repeat files, and answers
quote. Pure.
"""

# pyright: strict

from collections.abc import Sequence
from typing import Protocol

from baton.messages import TOKEN_BYTES
from kvstore.keys import pack_tokens

_NGRAM = 3  # tokens that must have come before


class Proposer(Protocol):
    """Guesses for one sequence."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow `tokens`. Those of the last call are the beginning of these."""
        ...


class NgramProposer:
    """Proposes what followed the last tokens where they came before, the last time. It stays there while it is right,
    so that a long copy is searched for once. O(tokens) bytes, four for each, and as much to look at in a search."""

    def __init__(self) -> None:
        self._packed = bytearray()
        self._known = 0  # tokens
        self._next: int | None = None  # where the next token stands already

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """See `Proposer`. A copy that reaches the end goes on with itself, as a repetition does."""
        new = tokens[self._known :]
        for token in new:
            if self._next is not None:
                self._next = self._next + 1 if tokens[self._next] == token else None
        self._packed += pack_tokens(new)
        self._known = len(tokens)
        if self._next is None and (at := self._last_before()) is not None:
            self._next = at + _NGRAM
        if self._next is None:
            return ()
        period = self._known - self._next
        return [tokens[self._next + count % period] for count in range(most)]

    def _last_before(self) -> int | None:
        """Where the last tokens stand for the last time before the end; none: nowhere."""
        if self._known <= _NGRAM:
            return None
        pattern, end = self._packed[-_NGRAM * TOKEN_BYTES :], len(self._packed) - 1
        while (at := self._packed.rfind(pattern, 0, end)) % TOKEN_BYTES:
            if at < 0:
                return None
            end = at + len(pattern) - 1
        return at // TOKEN_BYTES
