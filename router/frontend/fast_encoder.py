"""A faster way from text to tokens: `fastokens`, where it is installed and makes the tokens of Hugging Face's library.

Whether it does is tried at start for each tokenizer: with pairs of pieces that tell tokenizers apart, and with every
added token. If one text has other tokens, or the tokenizer is of a kind that `fastokens` does not know, Hugging Face's
library serves. It also takes each text that `fastokens` refuses, such as a million spaces.
"""

# pyright: strict

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer

log = logging.getLogger(__name__)

_PIECES = (
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x00", "\x1c", "\x7f", "\x85", "\xa0", "\xad", "\u200b",
    "\u200d", "\u2028", "\u3000", "\ufdd0", "\ufeff", "\ufffd", "a", "A", "the", " The", "hello", "HTTPServer", "'",
    "'s", "'S", "'\u017f", "'ll", "'LL", "n't", "0", "7", "42", "123", "12345", "\u0663", "\u00bd", "\u2167", "_",
    "__init__", "-", "--", "...", "!?", "(", "):\n", "#", "//", "://", "\\", '"', "{}", "<", "|>", "<|", "</", "<0x0A>",
    "\u2581", "\u0120", "\u00e9", "e\u0301", "\u0301", "\u1e9b\u0323", "\u00df", "\u0130", "\u01c5", "\ufb01", "\u212a",
    "\u0e01\u0e33", "\u0915\u094d\u0937\u093f", "\u05e9\u05b8", "\u0627\u0644", "\u6771\u4eac", "\u30bf\u30ef\u30fc",
    "\u1100\u1161", "\uac01", "\ud7a3", "\ue000", "\U0001f642", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1ee\U0001f1f9", "\U00010348", "\U0001e900", "\U000e0041", "\U0010ffff",
)  # fmt: skip
_LONG = tuple(one * 300 for one in ("a", " ", "\n", "=", "\u6771", *_PIECES[-3:]))


class FastEncoder:
    """Encodes texts by `fastokens`. Any thread may call it."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def encode_all(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]] | None:
        """Return the tokens of each text; None if it can't."""
        try:
            ids, offsets = self._native.encode_batch_flat(list(texts), add_special_tokens=special_tokens)
        except ValueError:  # its regular expressions have bounds, and all bytes must be in the vocabulary
            return None
        tokens: list[int] = np.frombuffer(ids, "<u4").tolist()
        return [tokens[start:end] for start, end in pairwise(np.frombuffer(offsets, "<u8").tolist())]


_shared: dict[bytes, FastEncoder | None] = {}


def shared_encoder(tokenizer: Tokenizer) -> FastEncoder | None:
    """Return `fast_encoder` of this tokenizer, one for all equal ones of this process: each takes 20 MB or more."""
    digest = hashlib.blake2b(tokenizer.to_str().encode()).digest()
    if digest not in _shared:
        _shared[digest] = fast_encoder(tokenizer)
    return _shared[digest]


def fast_encoder(tokenizer: Tokenizer) -> FastEncoder | None:
    """Return an encoder with the tokens of this tokenizer; None if there is none."""
    if importlib.util.find_spec("fastokens") is None:
        return None
    try:
        fast = FastEncoder(importlib.import_module("fastokens").Tokenizer.from_json_str(tokenizer.to_str()))
    except Exception as error:  # noqa: BLE001 whatever it can't read, the other library can
        log.info("prompts are not tokenized by fastokens, which can't read this tokenizer: %s", error)
        return None
    if (odd := _other(fast, tokenizer)) is not None:
        log.warning("prompts are not tokenized by fastokens, which has other tokens for %a", odd)
        return None
    log.info("prompts are tokenized by fastokens")
    return fast


def _other(fast: FastEncoder, tokenizer: Tokenizer) -> str | None:
    """Return a text with other tokens; None if no text of those that are tried has any. A text may be refused."""
    for special_tokens, texts in ((False, list(_texts(tokenizer))), (True, _PIECES)):
        right = tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)
        for text, encoding in zip(texts, right, strict=True):
            if fast.encode_all([text], special_tokens=special_tokens) not in ([encoding.ids], None):
                return text
    return None


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    yield from (one + other for one in _PIECES for other in _PIECES)
    yield from ("".join(_PIECES), *_LONG)
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        yield from (text, text[:-1], f"a{text}b", f" {text} ", f"{text}{text}\n{text}", f"\u00e9{text}\u0301")
