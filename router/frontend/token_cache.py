"""The tokens of texts that recent prompts had.

A conversation's next turn then has its new messages tokenized alone. A prompt is cut before a token that its template
writes around messages (`Tokenizer.borders`). The tokens of the parts, one after the other, are those of the whole. So a
part that is known need not be tokenized, wherever it stands. A tenant finds only parts of prompts of its own with the
same salt: how long an answer takes says nothing of others'.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from hashlib import sha256
from itertools import groupby
from threading import Lock
from typing import NamedTuple

import numpy as np

from baton.messages import TOKEN_BYTES
from router.frontend.detokenizer import Tokenizer

_CACHE_BYTES = 256 * 2**20  # of a cache for all tenants, about 60 million tokens
_ENTRY_BYTES = 300  # of a part, beside its tokens
_MOST_PARTS = 4_096  # of a prompt; the last one is the rest of it


class TextOwner(NamedTuple):
    """Whose texts are found again: those of the same tenant and the same salt alone."""

    tenant: str
    salt: str


class TokenCache:
    """Keeps no text: a part is known by its digest. Where there is no room, the tenant with most bytes gives up what it
    has not used for longest. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, borders: Mapping[str, int], most_bytes: int = _CACHE_BYTES) -> None:
        """`borders`: some of `tokenizer.borders`. Without any a prompt is one part."""
        self._tokenizer = tokenizer
        self._around = tokenizer.special_around()
        self._borders = borders
        self._most_bytes = most_bytes
        self._parts: dict[str, OrderedDict[bytes, array[int]]] = {}  # by tenant and digest, the last used last
        self._bytes = Counter[str]()  # by tenant
        self._lock = Lock()
        self.queries = 0  # tokens
        self.hits = 0  # those that were known

    def encode(self, text: str, owner: TextOwner, *, special_tokens: bool = False) -> array[int]:
        """Return the tokens of a text, with the special tokens that the post-processor adds if these are wanted."""
        if not special_tokens:
            return self._encode(text, owner)
        if self._around is None:
            return array("I", self._tokenizer.encode(text))
        before, behind = self._around
        return array("I", before) + self._encode(text, owner) + array("I", behind)

    def _encode(self, text: str, owner: TextOwner) -> array[int]:
        border = max(self._borders, key=text.count, default="")
        pieces = _cut(text, border)
        begun = sha256(f"{owner.salt}\0".encode())
        digests: list[bytes] = []
        for part in pieces:
            digest = begun.copy()
            digest.update(part.encode())
            digests.append(digest.digest())
        known = self._known(owner.tenant, digests)
        tokens, hits = array("I"), 0
        new: dict[bytes, array[int]] = {}
        for is_known, run in groupby(range(len(pieces)), key=lambda number: digests[number] in known):
            numbers = [*run]
            if is_known:
                before = len(tokens)
                for number in numbers:
                    tokens += known[digests[number]]
                hits += len(tokens) - before
            else:
                joined = "".join(pieces[numbers[0] : numbers[-1] + 1])
                ids = array("I", self._tokenizer.encode(joined, special_tokens=False))
                tokens += ids
                split = _split(ids, joined, border, self._borders.get(border), len(numbers))
                new |= zip((digests[number] for number in numbers), split, strict=False)
        self._keep(owner.tenant, new, len(tokens), hits)
        return tokens

    def _known(self, tenant: str, digests: Collection[bytes]) -> Mapping[bytes, array[int]]:
        with self._lock:
            parts = self._parts.get(tenant, OrderedDict())
            known = {digest: parts[digest] for digest in digests if digest in parts}
            for digest in known:
                parts.move_to_end(digest)
        return known

    def _keep(self, tenant: str, new: Mapping[bytes, array[int]], queries: int, hits: int) -> None:
        with self._lock:
            self.queries += queries
            self.hits += hits
            parts = self._parts.setdefault(tenant, OrderedDict())
            for digest, tokens in new.items():
                if digest not in parts:  # another thread may have been faster
                    parts[digest] = tokens
                    self._bytes[tenant] += _bytes_of(tokens)
            while self._bytes.total() > self._most_bytes:
                ((largest, _),) = self._bytes.most_common(1)
                _, tokens = self._parts[largest].popitem(last=False)
                self._bytes[largest] -= _bytes_of(tokens)


def _cut(text: str, border: str) -> list[str]:
    """Cut a text before each border. No part is empty."""
    if not border:
        return [text]
    head, *others = text.split(border, _MOST_PARTS)
    return [*([head] if head else ()), *(border + other for other in others)]


def _split(tokens: array[int], text: str, border: str, token: int | None, count: int) -> list[array[int]]:
    """Return the tokens of each of the first `count` parts of a text, the last of which is all that is left; none if
    these don't show every border."""
    starts: list[int] = np.flatnonzero(np.asarray(tokens) == token).tolist() if border else []
    if border and len(starts) != text.count(border):
        return []
    if not starts or not text.startswith(border):
        starts.insert(0, 0)
    ends = [*starts[1:count], len(tokens)]
    return [tokens[start:end] for start, end in zip(starts, ends, strict=False)]


def _bytes_of(tokens: array[int]) -> int:
    return _ENTRY_BYTES + TOKEN_BYTES * len(tokens)
