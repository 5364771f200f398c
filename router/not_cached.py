"""Why prompt tokens of a request were computed although other prompts were cached: the reasons, and one request's share
of each. `router.placement.prompt_history` finds them. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from msgspec import Struct
from msgspec.structs import replace

from baton.messages import Medium

Reason: TypeAlias = Literal[
    "new",  # never seen
    "changed",  # seen, near the same place, behind something that differs: a date, a nonce, the order of tools
    "evicted",  # seen with all before it; every copy has gone since
    "concurrent",  # seen with all before it, in a prompt that was being computed
    "template",  # seen in a chat that another template, or the same one with other variables, had rendered
    "adapter",  # seen with another adapter
    "salt",  # seen with another cache_salt
    "tenant",  # seen of another tenant
    "model",  # seen with another model, or in pages of another kind
    "recomputed",  # cached, and computed: that was quicker than to load it, or an attempt failed
    "prompt_logprobs",  # all tokens of a request for these are computed
    "tail",  # behind the last page that can be cached
]
REASONS: tuple[Reason, ...] = get_args(Reason)

_SECRET: tuple[Reason, ...] = ("salt", "tenant")


class NotCached(Struct, frozen=True):
    """The first page of a prompt that no cache had, and how many tokens were computed for which reason."""

    reason: Reason  # of the first page
    token: int  # at which the first page begins
    tokens: Mapping[Reason, int]  # in the order of the prompt. They add up to the tokens that are not cached
    page_size: int = 1  # tokens
    tier: Medium | None = None  # that an evicted page was on last. None: unknown, or lost with its process
    evicted: float | None = None  # when it left, seconds. None: unknown
    other: str = ""  # the request that had the most of these tokens before; "": none, or it is forgotten

    @property
    def page(self) -> int:
        """The number of the first page, from 0."""
        return self.token // self.page_size

    def settled(self, prompt: int, cached: int) -> NotCached:
        """Return the same once it is known how many of the prompt's tokens were cached."""
        surplus = prompt - cached - sum(self.tokens.values())
        tokens: dict[Reason, int] = {"recomputed": surplus} if surplus > 0 else {}
        gain = max(0, -surplus)
        for reason, count in self.tokens.items():
            left = max(0, count - gain)
            gain = max(0, gain - count)
            if left:
                tokens[reason] = tokens.get(reason, 0) + left
        if not surplus:
            return self
        return replace(self, reason=next(iter(tokens), "tail"), token=cached, tokens=tokens)

    def for_client(self) -> NotCached:
        """Return the same without a word of requests that the client must not know of: those of other tenants and
        other salts are as if they had never been."""
        tokens: dict[Reason, int] = {}
        for reason, count in self.tokens.items():
            shown: Reason = "new" if reason in _SECRET else reason
            tokens[shown] = tokens.get(shown, 0) + count
        return NotCached(next(iter(tokens)) if tokens else "tail", self.token, tokens, self.page_size)
