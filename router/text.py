"""Text in, text out: tokenizing prompts, detokenizing streams, and stop strings. Pure, given the tokenizer.

    tokens ──Detokenizer──▶ whole characters ──StopMatcher──▶ text that no stop string can still take back

`TextStream` is both in a row, for one request. It holds text back for two reasons only: a character whose last bytes
are still to come, and a tail that may turn out to be the start of a stop string. Both are given out by `flush`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from baton.errors import ContextTooLong, ModelError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6  # prompt tokens that a detokenizer looks back on, so that the output continues the prompt's last word
_PIECE = 2  # characters per token of the context: so much of a long text is tokenized at a time
_LEAST_PIECE = 4_096  # characters, of any context
_BORDER = 64  # tokens that cutting a text in two may add
_PATIENCE = 16  # tokens to wait for the end of a character; after that they are not going to be one


class Tokenizer:
    """A checkpoint's `tokenizer.json`."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A tokenizer.json may carry training-time truncation and padding; a prompt is served as it was sent.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A token's own text has at least as many bytes as the text it stands for: byte-level alphabets and the marks of
        # others (`▁`, `<0x0A>`) only make it longer.
        self.longest = max((len(text.encode()) for text in tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, file: Path) -> Tokenizer:
        """Raises ModelError for a file that is no tokenizer."""
        try:
            return cls(_Tokenizer.from_file(str(file)))
        except Exception as error:  # noqa: BLE001 the library raises plain Exception
            raise ModelError(f"{file} is no tokenizer that can be read: {error}") from None

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids, with the special tokens that the model's own post-processor adds. Other threads run meanwhile.

        Raises ContextTooLong where there are more than `most`, for a long text mostly before all of it is tokenized."""
        if most is not None and len(text) > max(2 * _PIECE * most, _LEAST_PIECE):
            self._refuse_early(text, most)
        # A batch of one: unlike `encode` it lets go of the interpreter lock. "Fast": no token's place in the text.
        encoding = self._tokenizer.encode_batch_fast([text])[0]
        if most is not None and (count := len(encoding)) > most:
            raise ContextTooLong(f"a prompt of {count} tokens exceeds the model's context of {most}")
        return encoding.ids

    def _refuse_early(self, text: str, most: int) -> None:
        """Tokenize the text piece by piece, as long as it may fit. Each border between two pieces may add tokens, which
        is why more than `most` are let pass here. Raises ContextTooLong."""
        found, size = 0, max(_PIECE * most, _LEAST_PIECE)
        for at in range(0, len(text), size):
            piece = text[at : at + size]
            found += len(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0]) - _BORDER
            if found > most + most // 8:
                raise ContextTooLong(
                    f"a prompt whose first {at + len(piece)} characters are about {found} tokens exceeds the model's "
                    f"context of {most}"
                )

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class Detokenizer:
    """Text of a growing sequence, in whole characters.

    Decoders are not prefix-stable (leading spaces, bytes of one character in several tokens), so text is the difference
    of two decodings of a short window. The window's ends move only where a character ends."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-_CONTEXT:])
        self._given = len(self._window)  # tokens of the window whose text has been given out
        text = tokenizer.decode(self._window)
        # A prompt may end inside a character. The output's first tokens complete it, so it belongs to the output.
        self._known = text.rstrip(_REPLACEMENT)
        self._broken = len(text) - len(self._known)

    def feed(self, token: int) -> str:
        """The text that this token completes; often its own, sometimes none yet."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        unfinished = text.endswith(_REPLACEMENT) or len(text) <= len(self._known)
        if unfinished and len(self._window) - self._given < _PATIENCE:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What was held back. Bytes that never became a character stand as U+FFFD, as in the whole's decoding."""
        return self._give(self._tokenizer.decode(self._window))

    def _give(self, text: str) -> str:
        new = text[len(self._known) :]
        # What still is no character was already none at the end of the prompt, whose text shows it.
        for _ in range(self._broken):
            new = new.removeprefix(_REPLACEMENT)
        self._broken = 0
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self._known = self._tokenizer.decode(self._window)
        return new


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, without ever giving out a part of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that is safe to give out, and whether a stop string was met; then the text ends before it.

        The first is the one that is complete first, so that it does not depend on how the text was cut into pieces."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        safe = len(text) - self._overhang(text)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _overhang(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0


@dataclass(frozen=True)
class Piece:
    """What some tokens came to: `taken` of them count, fewer than were fed only when `stopped` by a stop string."""

    text: str
    taken: int
    stopped: bool = False


class TextStream:
    """One request's output as text. Without a tokenizer there is no text, and tokens pass through."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], stops: Sequence[str], silent: frozenset[int]
    ) -> None:
        """`silent` tokens (those that end the output) have no text."""
        self._detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self._matcher = StopMatcher(stops)
        self._silent = silent

    def feed(self, tokens: Sequence[int]) -> Piece:
        if self._detokenizer is None:
            return Piece("", len(tokens))
        parts: list[str] = []
        for taken, token in enumerate(tokens, start=1):
            text = "" if token in self._silent else self._detokenizer.feed(token)
            safe, stopped = self._matcher.feed(text)
            parts.append(safe)
            if stopped:
                return Piece("".join(parts), taken, stopped=True)
        return Piece("".join(parts), len(tokens))

    def flush(self) -> Piece:
        """The rest, at the end of the output. Held-back bytes may, as characters, still complete a stop string."""
        if self._detokenizer is None:
            return Piece("", 0)
        safe, stopped = self._matcher.feed(self._detokenizer.flush())
        return Piece(safe if stopped else safe + self._matcher.flush(), 0, stopped)
