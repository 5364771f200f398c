"""The orders that the store's state gives to a page transport, and the events that come back.

    state ──PeerOrder──▶ page transport (`kvstore.transport`)  ──PeerEvent──▶ state

A slot that an order names belongs to that order until its event has come. The transport says when it is done with the
slot's bytes, and the state never reuses the slot before.
"""

from typing import TypeAlias

from msgspec import Struct

from baton.messages import PageSource
from baton.peer_protocol import PageReply, PageRequest, SentPage


class ExpectPages(Struct, frozen=True):
    """Pages of this fetch may be written to these slots as they come: (index, slot). Before the words that ask."""

    fetch: int
    slots: tuple[tuple[int, int], ...]


class AskPeer(Struct, frozen=True):
    """Say this to the store that `source` names."""

    source: PageSource
    request: PageRequest


class RetractFetch(Struct, frozen=True):
    """Write no more pages of this fetch; answered by FetchRetracted when that is certain."""

    fetch: int


class AnswerPeer(Struct, frozen=True):
    """Say this to the store that asked."""

    peer: str  # incarnation
    reply: PageReply


class SendPages(Struct, frozen=True):
    """Send these pages from these slots, which stay held until PagesSent names `number`."""

    number: int
    peer: str  # incarnation
    fetch: int
    pages: tuple[SentPage, ...]
    slots: tuple[int, ...]


class VerifySlot(Struct, frozen=True):
    """Compare the bytes of a slot, which stays held until SlotVerified, with its checksum."""

    number: int
    slot: int
    checksum: int


PeerOrder: TypeAlias = ExpectPages | AskPeer | RetractFetch | AnswerPeer | SendPages | VerifySlot


class PeerRequested(Struct, frozen=True):
    """Another store said this."""

    peer: str  # incarnation
    request: PageRequest


class PeerReplied(Struct, frozen=True):
    """A store that we ask said this; never FetchedPages, whose bytes come as PagesLanded."""

    peer: str  # incarnation
    reply: PageReply


class PagesLanded(Struct, frozen=True):
    """Pages of a fetch lie in their slots: (index, checksum they were sealed with). `damaged` indices came with bytes
    that do not match: what is in their slots is rubbish, and the slots are expected to be written again."""

    fetch: int
    pages: tuple[tuple[int, int], ...]
    damaged: tuple[int, ...] = ()


class FetchRetracted(Struct, frozen=True):
    """No page of this fetch will be written any more."""

    fetch: int


class PagesSent(Struct, frozen=True):
    """The transport is done with the slots of that SendPages, whether or not they arrived."""

    number: int


class SlotVerified(Struct, frozen=True):
    """The outcome of a VerifySlot."""

    number: int
    intact: bool


PeerEvent: TypeAlias = PeerRequested | PeerReplied | PagesLanded | FetchRetracted | PagesSent | SlotVerified
