"""Text in, text out: tokenizing prompts, detokenizing streams, and stop strings. Pure, given the tokenizer.

    tokens ──Detokenizer──▶ whole characters ──StopMatcher──▶ text that no stop string can still take back

`TextStream` is both in a row, for one request. It holds text back for two reasons only: a character whose last bytes
are still to come, and a tail that may turn out to be the start of a stop string. Both are given out by `flush`.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from msgspec import Struct
from tokenizers import Tokenizer as _Tokenizer
from tokenizers import models

from baton.errors import ModelError
from baton.messages import TOKEN_BYTES
from kvstore.keys import unpack_tokens
from router.frontend.fast_encoder import FastEncoder, shared_encoder
from router.generation_request import DEFAULT_TEXT, GenerationRequest, TextOptions

LOST = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no character."""
MARK = "\ufdd0"
"""Stands before the text of a special token. Unicode leaves this character to the inner use of programs."""
_BYTES_OF_CHARACTER = 4  # at most
_CONTEXT = 6  # prompt tokens that a detokenizer looks back on, so that the output continues the prompt's last word
_SHRINKING = 4  # bytes of a prompt for a byte that is tokenized, where normalizing may shorten text: NFKC makes 1 of 4
_USUAL_BYTES = 4 * 2**20  # of a prompt whose tokens are all of the longest kind, such as runs of spaces, ...
_USUAL_BYTES_PER_TOKEN = 32  # ... or so many for each token of the context, where that is more
_WINDOW = 64 * 2**10  # characters
_USUAL_CHARACTERS = 8  # of a token, at most, in texts of words
_NEAR = 1_000  # characters within which a word is looked for
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))  # bytes that GPT-2's vocabulary spells as such
_BYTE_OF = {chr(byte): bytes([byte]) for byte in _PRINTED} | {
    chr(0x100 + number): bytes([byte]) for number, byte in enumerate(sorted({*range(0x100)} - {*_PRINTED}))
}
_BEFORE_WORD = re.compile(r"(?<!\s)\s(?=[^\W\d_])")
_KEEPS_LENGTH = frozenset({"Prepend", "ByteLevel"})  # normalizers
_PATIENCE = 16  # tokens to wait for the end of a character; after that they are not going to be one


class Tokenizer:
    """A checkpoint's `tokenizer.json`."""

    def __init__(self, tokenizer: _Tokenizer, fast: FastEncoder | None = None) -> None:
        """`fast` makes the same tokens."""
        self._tokenizer = tokenizer
        # A tokenizer.json may carry training-time truncation and padding; a prompt is served as it was sent.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._fast = fast
        self._byte_level = any(
            part["type"] == "ByteLevel" for part in (*_parts(tokenizer.pre_tokenizer), *_parts(tokenizer.normalizer))
        )
        self._added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: index for index, token in self._added.items() if token.special}
        decoders = {part["type"] for part in _parts(tokenizer.decoder)}
        self._decodes_bytes, self._byte_fallback = "ByteLevel" in decoders, "ByteFallback" in decoders
        self._anchor = self._anchor_token()
        self.bytes_of = lru_cache(2**16)(self._bytes_of)
        self.decode_one = lru_cache(2**16)(self._decode_one)
        self.longest = self._longest()  # bytes of text that the longest token stands for
        self._stretch = 1 if self._keeps_length() else _SHRINKING

    @classmethod
    def load(cls, file: Path) -> Tokenizer:
        """Raises ModelError for a file that is no tokenizer."""
        try:
            tokenizer = _Tokenizer.from_file(str(file))
            return cls(tokenizer, shared_encoder(tokenizer))
        except Exception as error:  # noqa: BLE001 the library raises plain Exception
            raise ModelError(f"{file} is no tokenizer that can be read: {error}") from None

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the model's own post-processor adds unless they are not wanted. Other
        threads run meanwhile."""
        return self.encode_all([text], special_tokens=special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Do the same for several texts."""
        if self._fast and (tokens := self._fast.encode_all(texts, special_tokens=special_tokens)) is not None:
            return tokens
        # Unlike `encode`, this one releases the GIL; and it makes no offsets, which takes half the time.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_end(self, text: str, tokens: int, *, special_tokens: bool = True) -> list[int]:
        """The last `tokens` token ids of a text; the special tokens that the post-processor adds are among them and
        stay, as where Hugging Face's tokenizers truncate on the left.

        Of a text of more than 64 Ki characters, and 8 for each token, only an end is read that has more tokens than are
        kept. It begins before a word where there is one. `exceeds` says why that changes none of them."""
        width = max(_WINDOW, _USUAL_CHARACTERS * tokens)
        while True:
            end = text if len(text) <= width else text[_word_after(text, len(text) - width) :]
            encoding = self._tokenizer.encode_batch_fast([end], add_special_tokens=False)[0]
            if len(end) == len(text) or len(encoding) >= tokens + max(self.longest, 64):
                break
            width *= 4
        added = self._tokenizer.num_special_tokens_to_add(is_pair=False) if special_tokens else 0
        encoding.truncate(max(0, tokens - added), direction="left")
        if special_tokens:
            encoding = self._tokenizer.post_process(encoding)
        return encoding.ids[-tokens:]

    def max_bytes(self, tokens: int) -> int:
        """UTF-8 bytes of text that may come to so many tokens. A longer text certainly comes to more, except for runs
        of very long tokens beyond 4 MiB, and 32 bytes for each token."""
        return min(tokens * self.longest * self._stretch, max(_USUAL_BYTES, _USUAL_BYTES_PER_TOKEN * tokens))

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether a long text certainly comes to more than so many tokens. Reads no more of it than that takes.

        The text is tokenized in windows. Cutting a text changes its tokens only around the cut: there it splits a token
        into at most as many as that has bytes. So many are forgiven for each window."""
        width = max(_WINDOW, self.longest**2)
        count = 0
        for start in range(0, len(text), width):
            window = text[start : start + width]
            count += len(self._tokenizer.encode_batch_fast([window], add_special_tokens=False)[0])
            count -= max(self.longest, 64)
            if count > tokens:
                return True
        return False

    def _longest(self) -> int:
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        # The vocabulary of a byte-level tokenizer spells each byte as one character.
        of_vocabulary = max(map(len if self._byte_level else _utf8, vocabulary), default=1)
        return max(of_vocabulary, *map(_utf8, added), 4)  # 4: a token that stands for one unknown character

    def _keeps_length(self) -> bool:
        """Whether every byte of a text is in a token: no normalizer, unknown word or added token swallows any."""
        model = self._tokenizer.model
        if not isinstance(model, models.BPE) or not (self._byte_level or model.byte_fallback):
            return False
        if any(token.lstrip or token.rstrip for token in self._tokenizer.get_added_tokens_decoder().values()):
            return False
        return all(
            part["type"] in _KEEPS_LENGTH
            or (part["type"] == "Replace" and _utf8(part["content"]) >= _utf8(part["pattern"].get("String", "?" * 99)))
            for part in _parts(self._tokenizer.normalizer)
        )

    def borders(self, written: Collection[str]) -> Mapping[str, int]:
        """Return added tokens before which any text can be cut: the tokens of its parts are those of the whole. Only
        tokens in the texts of `written` are looked at.

        Added tokens are found before all else. Each piece of text between two is normalized and tokenized by itself. So
        a border is found wherever it stands if no added token overlaps its beginning or is longer, and neither it nor
        any other token looks at the text across its beginning."""
        added = list(self._added.values())
        if any(token.single_word for token in added):
            return {}
        return {
            token.content: index
            for index, token in self._added.items()
            if any(token.content in text for text in written)
            and not (token.normalized or token.lstrip)
            and token.content[:1].strip()
            and not any(_overlaps(other.content, token.content) for other in added)
            and self.encode(token.content, special_tokens=False) == [index]
        }

    def special_around(self) -> tuple[list[int], list[int]] | None:
        """Return the special tokens that the post-processor puts before and behind a text; None if a text does not tell
        them."""
        bare, whole = (self.encode("a b", special_tokens=special) for special in (False, True))
        starts = [at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare]
        return (whole[: starts[0]], whole[starts[0] + len(bare) :]) if len(starts) == 1 else None

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text, without special tokens unless they are wanted."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special_tokens)

    def _decode_one(self, token: int, *, special_tokens: bool) -> str:
        return self.decode([token], special_tokens=special_tokens)

    def has(self, token: int) -> bool:
        """Whether the vocabulary has a token of this id."""
        return self._tokenizer.id_to_token(token) is not None

    def token_of(self, text: str) -> int | None:
        """The token that stands for just this text, if there is one."""
        return self._tokenizer.token_to_id(text)

    def text_of(self, token: int) -> str:
        """One token's text by itself; `bytes:\\xf0\\x9f` if it is no whole character."""
        own = self.bytes_of(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def _bytes_of(self, token: int) -> bytes:
        """The bytes that one token stands for. A space that begins a word is one of them."""
        if (added := self._added.get(token)) is not None:
            return added.content.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._decodes_bytes:
            return b"".join(_BYTE_OF.get(one, one.encode()) for one in piece)
        if self._byte_fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        # Decoders strip the space before the first word, so a token is decoded behind another one.
        before = [] if self._anchor is None else [self._anchor]
        return self.decode([*before, token]).removeprefix(self.decode(before)).encode()

    def _anchor_token(self) -> int | None:
        """A token whose text is what the vocabulary spells, whatever stands behind it."""
        for token in range(self._tokenizer.get_vocab_size()):
            piece = self._tokenizer.id_to_token(token)
            if piece and piece.isalnum() and token not in self._added and self.decode([token]) == piece:
                return token
        return None


def _word_after(text: str, start: int) -> int:
    """Where a word begins, the space before it included, soon after `start`; `start` itself if there is none."""
    match = _BEFORE_WORD.search(text, start, start + _NEAR)
    return match.start() if match else start


def _overlaps(token: str, border: str) -> bool:
    """Return whether a token of a text may contain a border, or begin before one and end within it."""
    if border in token:
        return border != token
    return any(token.endswith(border[:length]) for length in range(1, len(border)))


def _utf8(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a tokenizer's normalizer, pre-tokenizer or decoder, one by one where it is a sequence of them."""
    waiting = [json.loads(component.__getstate__())] if component is not None else []
    while waiting:
        part = waiting.pop()
        yield part
        waiting += part.get("normalizers", ()) or part.get("pretokenizers", ()) or part.get("decoders", ())


class Detokenizer:
    """Text of a growing sequence, in whole characters.

    Decoders are not prefix-stable (leading spaces, bytes of one character in several tokens), so text is the difference
    of two decodings of a short window. The window's ends move only where a character ends.

    A prompt may end inside a character; U+FFFD stands for it in the prompt's own decoding. A character that the output
    completes belongs to the output. So the prompt's text without those U+FFFD, followed by the output's text, is the
    text of the whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, special_tokens: bool = False) -> None:
        self._decode = partial(tokenizer.decode, special_tokens=special_tokens)
        self._decode_one = partial(tokenizer.decode_one, special_tokens=special_tokens)
        # `_inside`: whether the known part may end inside a character.
        self._window, self._known, self._inside = _end_of(prompt, self._decode)
        self._known_tokens = len(self._window)  # tokens of the window whose text has been given out

    def feed(self, token: int) -> str:
        """The text that this token completes; often its own, sometimes none yet."""
        self._window.append(token)
        text = self._decode(self._window)
        new = self._new(text)
        if new and not text.endswith(LOST):
            return self._give(text, new)
        if len(self._window) - self._known_tokens < _PATIENCE:
            return ""
        return self._give(text, new, keep=_BYTES_OF_CHARACTER - 1)

    def flush(self) -> str:
        """What was held back. Bytes that never became a character stand as U+FFFD, as in the whole's decoding."""
        if len(self._window) == self._known_tokens and not self._inside:
            return ""
        text = self._decode(self._window)
        return self._give(text, self._new(text))

    def _new(self, text: str) -> str:
        """What of the window's text has not been given out."""
        known = self._known
        while known.endswith(LOST) and not text.startswith(known):
            known = known[:-1]  # it stood for the beginning of a character that has been completed
        return text[len(known) :]

    def _give(self, text: str, new: str, keep: int = 0) -> str:
        """Give out what is new, but for up to `keep` U+FFFD at its end, which may be the beginning of a character."""
        count = 0
        while count < keep and new.endswith(LOST):
            new, count = new[:-1], count + 1
        # The window may begin inside no character: where its known part ended in one that is now complete, it stays.
        if not self._inside or text.endswith(LOST):
            self._window = self._window[self._known_tokens :]
        self._inside = count > 0
        self._known_tokens = len(self._window)
        known = self._decode_one(*self._window) if self._known_tokens == 1 else self._decode(self._window)
        self._known = known[: len(known) - count]
        return new


def _end_of(prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[list[int], str, bool]:
    """The prompt's last tokens, from where a character begins, their text, and whether it may end inside a character.

    A character with missing bytes, at either end, spoils its neighbours with some decoders (byte fallback): each of
    their bytes becomes U+FFFD. So the window begins where its text is clean. A character that the prompt ends inside is
    left out of the text if it spoils that."""
    for length in range(_CONTEXT, _CONTEXT + _BYTES_OF_CHARACTER):
        window = list(prompt[-length:])
        known = decode(window)
        for cut in range(_BYTES_OF_CHARACTER):
            whole = decode(window[: len(window) - cut]) if cut else known
            if not whole.startswith(LOST) and not whole.endswith(LOST):
                return window, known if known.startswith(whole) else whole, known.endswith(LOST)
    window = list(prompt[-_CONTEXT:])
    known = decode(window)
    return window, known, known.endswith(LOST)


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, without ever giving out a part of one.

    Each stop string is followed by itself (Knuth, Morris and Pratt), so the work is proportional to the text, however
    much of it is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Stop(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str, *, ends: bool = True) -> tuple[str, str | None]:
        """Text that is safe to give out, and the stop string that was met, if any; then the text ends before it.
        Without `ends`, a stop string that is complete in this text is none.

        The first is the one that is complete first, so that it does not depend on how the text was cut into pieces."""
        if not self._stops:
            return text, None
        before = len(self._held)
        text = self._held + text
        for at in range(before, len(text)):
            match = ""
            for stop in self._stops:
                if stop.follow(text[at]) and len(stop.text) > len(match):
                    match = stop.text
            if match and ends:
                self._held = ""
                return text[: at + 1 - len(match)], match
        safe = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """One stop string, and how much of it the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters
        # For each beginning of the string, by its length: how much of the string it ends with itself. Found as the text
        # matches so far, since most strings never do.
        self._falls = [0, 0]

    def follow(self, character: str) -> bool:
        """Take one more character. Whether the string is complete with it."""
        text, falls, matched = self.text, self._falls, self.matched
        while matched and text[matched] != character:
            matched = falls[matched]
        if text[matched] == character:
            matched += 1
        while len(falls) <= matched:
            fall, last = falls[-1], text[len(falls) - 1]
            while fall and text[fall] != last:
                fall = falls[fall]
            falls.append(fall + (text[fall] == last))
        whole = matched == len(text)
        self.matched = falls[matched] if whole else matched
        return whole


class Piece(Struct, frozen=True):
    """What some tokens came to: `count` of them are output, fewer than were fed only when a stop string ended it."""

    text: str
    count: int
    stopped: bool = False


class TextStream:
    """One request's output as text. Without a tokenizer there is no text, and tokens pass through."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stops: Sequence[str],
        silent: frozenset[int],
        options: TextOptions = DEFAULT_TEXT,
    ) -> None:
        """`silent` tokens (those that end the output) have no text."""
        special = options.special_tokens or bool(options.shown)
        if tokenizer and options.shown:
            silent |= frozenset(tokenizer.special_tokens.values()) - options.shown
        self._detokenizer = Detokenizer(tokenizer, prompt, special_tokens=special) if tokenizer else None
        marked = options.shown if tokenizer and options.marked else ()
        self._marked = {token: len(tokenizer.text_of(token)) for token in marked} if tokenizer else {}
        self._marks = deque[int]()  # where these tokens begin in the whole text, as far as it has not been given out
        self._fed = self._shown_length = 0  # characters
        self._matcher = StopMatcher(stops)
        self._is_plain = not stops and not self._marked
        self._silent = frozenset[int]() if options.special_tokens else silent
        self._unstoppable = options.min_tokens
        self._include_stop = options.include_stop
        self.stop: str | None = None  # the stop string that ended the output

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, request: GenerationRequest, stops: Sequence[str] = ()) -> TextStream:
        """Return what turns an output of a request into text."""
        end = unpack_tokens(request.tokens[-TOKEN_BYTES * (_CONTEXT + _BYTES_OF_CHARACTER) :])
        return cls(tokenizer, end, stops, frozenset(request.stop_token_ids), request.text)

    def feed(self, tokens: Sequence[int]) -> Piece:
        if self._detokenizer is None:
            return Piece("", len(tokens))
        parts: list[str] = []
        for count, token in enumerate(tokens, start=1):
            text = "" if token in self._silent else self._detokenizer.feed(token)
            if self._marked:
                self._fed += len(text)
                if token in self._marked:
                    self._marks.append(self._fed - self._marked[token])
            if self._is_plain:
                parts.append(text)
                continue
            safe, stopped = self._match(text, ends=self._unstoppable <= 0)
            self._unstoppable -= 1
            parts.append(self._with_marks(safe))
            if stopped:
                return Piece("".join(parts), count, stopped=True)
        return Piece("".join(parts), len(tokens))

    def flush(self) -> Piece:
        """The rest, at the end of the output. Held-back bytes may, as characters, still complete a stop string."""
        if self._detokenizer is None:
            return Piece("", 0)
        safe, stopped = self._match(self._detokenizer.flush())
        return Piece(self._with_marks(safe if stopped else safe + self._matcher.flush()), 0, stopped)

    def _with_marks(self, text: str) -> str:
        """Return text that is given out, with a mark before each special token."""
        if not self._marked:
            return text
        parts, begin = list[str](), 0
        while self._marks and (at := self._marks[0] - self._shown_length) < len(text):
            parts += (text[begin:at], MARK)
            begin = at
            self._marks.popleft()
        self._shown_length += len(text)
        return "".join((*parts, text[begin:]))

    def _match(self, text: str, *, ends: bool = True) -> tuple[str, bool]:
        safe, self.stop = self._matcher.feed(text, ends=ends)
        if self.stop is not None and self._include_stop:
            safe += self.stop
        return safe, self.stop is not None
