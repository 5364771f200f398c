"""Which client a call comes from: its key, its tenant, its limits. Both doors ask here before they read a request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from baton.api_keys import ANONYMOUS, Identity, KeyRing
from baton.errors import BatonError, PermissionDenied, TooManyStreams, Unauthenticated
from baton.logs import RateLimitedLog

log = RateLimitedLog(logging.getLogger(__name__))

caller: ContextVar[Identity] = ContextVar("caller", default=ANONYMOUS)
"""The client of the call that this task serves. A door sets it before any handler runs."""

THIS_USER = Identity(name="", operator=True)
"""A client that could open the operator's Unix socket, so it runs as the router's own user."""


class Gatekeeper:
    """Identifies clients by their keys, and counts the requests of each."""

    def __init__(self, keys: KeyRing) -> None:
        self.keys = keys
        self._streams: Counter[str] = Counter()  # by key

    def identify(self, headers: Mapping[str, str], *, operator: bool = False) -> Identity:
        """Return the client with these headers, whose names are in lower case.

        Raises Unauthenticated without a key that is known, and PermissionDenied if the call is for operators only."""
        if not self.keys.required:
            return ANONYMOUS
        offered = [*_credentials(headers)]
        owner = next((identity for one in offered if (identity := self.keys.find(one)) is not None), None)
        if owner is None:
            raise Unauthenticated(
                "this API key is not known here; `baton keys list` shows the names of those that are"
                if offered
                else "there is no API key; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        if operator and not owner.operator:
            raise PermissionDenied(f"the API key {owner.name!r} is no operator's, and this call is for operators only")
        return owner

    def enter(self, identity: Identity) -> Callable[[], None]:
        """Count a request of a client, and return what ends it. Raises TooManyStreams."""
        most, name = identity.max_streams, identity.name
        if most is None:
            return lambda: None
        if self._streams[name] >= most:
            raise TooManyStreams(f"{self._streams[name]} requests of the API key {name!r} run, and it may have {most}")
        self._streams[name] += 1
        return lambda: self._leave(name)

    def _leave(self, name: str) -> None:
        self._streams[name] -= 1
        if not self._streams[name]:
            del self._streams[name]


def note_refusal(call: str, peer: str, error: BatonError) -> None:
    """Log a call that was refused for want of a key. Neither line nor error has what was sent."""
    log.warning("refused %s of %s: %s", call, peer, error)


def _credentials(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys that a client sends: OpenAI's and gRPC's way, and Anthropic's."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        yield token.strip()
    if token := headers.get("x-api-key", "").strip():
        yield token
