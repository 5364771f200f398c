"""Who may come in, and who waits: the limits of a request, and the queue of those that no worker has yet. Pure."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import ContextTooLong, InvalidRequest
from baton.messages import TOKEN_BYTES
from kvstore.keys import unpack_tokens
from router.request import Request


@dataclass(frozen=True)
class ModelLimits:
    """What the model's own files allow."""

    vocab_size: int
    max_context: int  # tokens, prompt and output


def check_tokens(tokens: bytes, vocab_size: int) -> None:
    """Raises InvalidRequest for a prompt without tokens, or with one that the model does not have."""
    if not tokens:
        raise InvalidRequest("the prompt has no tokens; send at least one")
    if len(tokens) % TOKEN_BYTES:
        raise InvalidRequest(f"the prompt's {len(tokens)} bytes are no whole tokens of {TOKEN_BYTES}")
    highest = max(unpack_tokens(tokens))
    if highest >= vocab_size:
        raise InvalidRequest(f"token id {highest} is not in the model's vocabulary of {vocab_size}")


def settle_length(prompt: int, max_tokens: int | None, max_context: int, pool_tokens: int | None) -> int:
    """How many tokens may be generated: what was asked for, or else all that fit. `pool_tokens` is what the largest
    decode worker's pages hold; none: no worker is known. Raises InvalidRequest or ContextTooLong."""
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}; it must be at least 1")
    wanted = prompt + (max_tokens or 1)
    if wanted > max_context:
        raise ContextTooLong(
            f"a prompt of {prompt} tokens and {max_tokens or 1} to generate exceed the model's context of {max_context}"
        )
    if pool_tokens is not None and wanted > pool_tokens:
        raise ContextTooLong(
            f"a prompt of {prompt} tokens and {max_tokens or 1} to generate exceed the {pool_tokens} tokens that the "
            "largest decode worker has pages for; ask for less, or raise decode.pool_bytes"
        )
    if max_tokens is not None:
        return max_tokens
    return min(max_context, pool_tokens or max_context) - prompt


class Queue:
    """Requests without an attempt, by rank. It refuses nobody: only newcomers are turned away, by its owner, since a
    request that lost its worker has been let in already."""

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.name in self._waiting

    def __iter__(self) -> Iterator[Request]:
        """In order of service; the queue may change meanwhile."""
        return iter(sorted(self._waiting.values(), key=lambda request: request.rank))

    def add(self, request: Request) -> None:
        self._waiting[request.name] = request

    def discard(self, request: Request) -> None:
        self._waiting.pop(request.name, None)

    def retry_after_ms(self, now: float) -> int:
        """A hint for those turned away: whoever waits longest has waited for this long and has no place yet."""
        oldest = min((request.submitted for request in self._waiting.values()), default=now)
        return min(30_000, max(250, int((now - oldest) * 1_000)))
