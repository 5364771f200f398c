"""The messages between two stores.

A fetch, numbered by the store that wants the pages, is a chain of keys. Indices count within it. Page bytes travel as
frames of their own behind a FetchedPages message, one frame for each page, in the message's order.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from baton.messages import Checksum, Count, Message, Name, PackedKeys


class FetchPages(Message, frozen=True):
    """Send the pages of `keys` in order, those before index `credit` for now. With `wait`, also those that are only
    sealed later."""

    fetch: Count
    page_bytes: Annotated[int, Meta(ge=1)]
    keys: PackedKeys
    wait: bool
    credit: Count


class FetchCredit(Message, frozen=True):
    """There is room for the pages before index `credit` now."""

    fetch: Count
    credit: Count


class ChecksumMismatch(Message, frozen=True):
    """That page's bytes did not match its checksum: check yours, and if it is intact send it again."""

    fetch: Count
    index: Count


class CancelFetch(Message, frozen=True):
    """No more pages of this fetch, please."""

    fetch: Count


class FetchHeartbeat(Message, frozen=True):
    """The wanting store's heartbeat, numbered: every fetch it still expects something of. Others are forgotten."""

    number: Count
    fetches: tuple[int, ...] = ()


class SentPage(Struct, frozen=True, array_like=True):
    """A page in the frame at the same place: its index within the fetch, and the checksum it was sealed with."""

    index: Count
    checksum: Checksum


class FetchedPages(Message, frozen=True):
    """The pages that come as frames behind this message."""

    fetch: Count
    pages: tuple[SentPage, ...]


class FetchUnavailable(Message, frozen=True):
    """From `index` on, the pages of this fetch are neither here nor being made."""

    fetch: Count
    index: Count


class FetchStatus(Message, frozen=True):
    """The answer to FetchHeartbeat: every fetch it knows of this peer, with the number of pages it has sent,
    repeated ones included. It comes behind the pages, so a peer that has received fewer has lost some, and asks for
    them again."""

    number: Count
    fetches: tuple[tuple[int, int], ...] = ()


class NixlOffer(Message, frozen=True):
    """These pages of a fetch can be read at these addresses of an agent, after NIXL has got its metadata."""

    offer: Count
    agent: Name
    metadata: bytes
    fetch: Count
    page_bytes: Count
    pages: tuple[SentPage, ...]
    addresses: tuple[Count, ...]


class NixlOfferDone(Message, frozen=True):
    """The pages of that offer are not read any more."""

    offer: Count


PageRequest: TypeAlias = FetchPages | FetchCredit | ChecksumMismatch | CancelFetch | FetchHeartbeat
PageReply: TypeAlias = FetchedPages | FetchUnavailable | FetchStatus
NixlRequest: TypeAlias = PageRequest | NixlOfferDone
NixlReply: TypeAlias = PageReply | NixlOffer
