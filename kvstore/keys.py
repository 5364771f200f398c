"""Page keys: what a page is called, derived from what went into it.

A key is 16 bytes, BLAKE2b-128 over the key of the page before and the page's own tokens; the first page of a chain
follows a root, which digests everything else that shapes a page's bytes. So equal keys mean equal input, and a key
commits to its whole prefix. `docs/page-keys.md` has the encoding byte by byte, with test vectors.

Keys and tokens travel packed: `KEY_BYTES` each without separators, and little-endian uint32.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from baton.errors import InvalidRequest, MalformedMessage
from baton.messages import KEY_BYTES, MIXED, TOKEN_BYTES, Namespace

START = b""
"""Stands for "no page" where the parent of a chain's first page is asked for."""

# As long as a key, so that what is hashed for a root can never be what is hashed for a page: no key reads like this.
_ROOT_MAGIC = b"baton namespace3"


def namespace_root(namespace: Namespace, tenant: str = "", salt: str = "") -> bytes:
    """Return the parent of every chain's first page in this namespace.

    `tenant` separates caches that must not be shared. It comes from an authenticated identity, never from the request
    itself. `salt` is the request's own and separates caches within a tenant."""
    numbers = struct.pack("<QQQ", namespace.page_size, namespace.layout, namespace.kv_heads)
    # Every text is counted, so no two sequences of texts are the same bytes. No salt adds no bytes: keys without one
    # are those of earlier versions.
    salts = (salt,) if salt else ()
    texts = (namespace.numerics, namespace.kv_dtype, namespace.form, namespace.adapter, tenant, *salts)
    encoded = b"".join(map(_counted, texts))
    return blake2b(_ROOT_MAGIC + namespace.model + numbers + encoded, digest_size=KEY_BYTES).digest()


@functools.lru_cache(maxsize=64)
def system_fingerprint(namespace: Namespace) -> str:
    """Return a digest of what decides the tokens of a request and its seed, besides where it is computed. It is empty
    where workers of several classes of arithmetic serve it: then the path may decide, too."""
    return "" if namespace.numerics == MIXED else f"fp_{namespace_root(namespace).hex()[:12]}"


def page_keys(root: bytes, tokens: bytes, page_size: int) -> bytes:
    """The packed keys of every full page of `tokens`. `root` is the namespace's root, or the key of the page right
    before `tokens` to continue a chain. Raises MalformedMessage for lengths that can't be."""
    if len(root) != KEY_BYTES:
        raise MalformedMessage(f"a parent key has {KEY_BYTES} bytes, not {len(root)}")
    if len(tokens) % TOKEN_BYTES:
        raise MalformedMessage(f"{len(tokens)} bytes of tokens are no multiple of {TOKEN_BYTES}")
    if page_size < 1:
        raise InvalidRequest(f"a page holds at least one token, not {page_size}")
    page_bytes = page_size * TOKEN_BYTES
    keys: list[bytes] = []
    key = root
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        key = blake2b(key + tokens[start : start + page_bytes], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return b"".join(keys)


def partial_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a page that ends before it is full, with those `tokens`, at least one; `parent` is the key of the page
    before it, or the namespace's root. As fewer tokens are hashed than for a full page, it equals no key of one."""
    return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


def prompt_keys(root: bytes, tokens: bytes, page_size: int) -> list[bytes]:
    """The keys of all pages of `tokens`: the full ones, then the partial one if there is any. Raises MalformedMessage
    as `page_keys` does."""
    keys = split_keys(page_keys(root, tokens, page_size))
    if rest := tokens[len(keys) * page_size * TOKEN_BYTES :]:
        keys.append(partial_key(keys[-1] if keys else root, rest))
    return keys


def cacheable_pages(tokens: int, page_size: int) -> int:
    """Return how many pages of so many known tokens may be cached: the full ones among all but the last token,
    because the decode worker computes at least that one itself."""
    return max(0, tokens - 1) // page_size


def split_keys(packed: bytes) -> list[bytes]:
    """The single keys of a packed run. Raises MalformedMessage for part of a key."""
    if len(packed) % KEY_BYTES:
        raise MalformedMessage(f"{len(packed)} bytes of keys are no multiple of {KEY_BYTES}")
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises InvalidRequest for an id that is no uint32."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"token ids are whole numbers from 0 to 2**32 - 1: {error}") from None
    return _little_endian(packed).tobytes()


def unpack_tokens(packed: bytes, vocab_size: int | None = None) -> list[int]:
    """The token ids of a packed run. Raises MalformedMessage for part of a token, and for one that a vocabulary of that
    size does not have."""
    if len(packed) % TOKEN_BYTES:
        raise MalformedMessage(f"{len(packed)} bytes of tokens are no multiple of {TOKEN_BYTES}")
    tokens = _little_endian(array("I", packed)).tolist()
    if vocab_size is not None and tokens and (highest := max(tokens)) >= vocab_size:
        raise MalformedMessage(f"token id {highest} is not in a vocabulary of {vocab_size}")
    return tokens


def _little_endian(tokens: array[int]) -> array[int]:
    assert tokens.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def _counted(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded
