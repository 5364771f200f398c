"""A small universe of chains of pages, in which prefixes are shared often, with readable keys."""

from hypothesis import strategies as st

CHAINS = st.text(alphabet="abc", min_size=1, max_size=6)
"""A chain as a word: one letter per page."""


def key(prefix: str) -> bytes:
    """The key of the last page of a word: like a real one it names the whole prefix."""
    return prefix.encode().rjust(16, b".")


def keys(chain: str, start: int = 0) -> list[bytes]:
    """The keys of the pages of a word from page `start` on."""
    return [key(chain[: page + 1]) for page in range(start, len(chain))]


def parent(chain: str, start: int = 0) -> bytes:
    """The key before page `start`."""
    return key(chain[:start]) if start else b""


def partial(chain: str) -> bool:
    """Whether the last page of a word is reserved and acquired as a partial one. Such a page is in the middle of other
    words, too, as only a confused worker would have it: that must do no harm either."""
    return chain.endswith("c")
