"""Whether a store's replies fit what its worker has asked. A scheduler relies on that, so the check stands before it.

Knows of each lease how many pages it is for, and what the store still owes. Never decides what a reply means. Pure.
"""

# pyright: strict

from dataclasses import dataclass, field

from baton import store_protocol as protocol
from baton.errors import MalformedMessage
from baton.messages import KEY_BYTES


@dataclass(slots=True)
class _OpenLease:
    """One lease from its first call to its EndLease. Indices count within it."""

    pages: int
    reserving: bool
    undecided: bool  # Reserved or NotReserved is still to come, or what lower tiers have
    granted: set[int] = field(default_factory=set[int])  # told to be ready
    owed: set[int] = field(default_factory=set[int])  # sealed or released by us, without an answer yet


class ReplyCheck:
    """The leases of one connection to one store."""

    def __init__(self, slots: int) -> None:
        """`slots`: how many the store's arena has."""
        self._slots = slots
        self._leases: dict[int, _OpenLease] = {}

    def called(self, call: protocol.StoreCall) -> None:
        """Note what is asked."""
        match call:
            case protocol.Reserve(lease=number, keys=keys):
                self._leases[number] = _OpenLease(len(keys) // KEY_BYTES, reserving=True, undecided=True)
            case protocol.ShareSlots(lease=number, slots=slots):
                self._leases[number] = _OpenLease(slots, reserving=True, undecided=True)
            case protocol.Acquire(lease=number, keys=keys, wait=wait):
                self._leases[number] = _OpenLease(len(keys) // KEY_BYTES, reserving=False, undecided=not wait)
            case protocol.Seal(lease=number, first=first, checksums=checksums) if lease := self._leases.get(number):
                lease.owed.update(range(first, first + len(checksums)))
            case protocol.Release(lease=number, indices=indices) if lease := self._leases.get(number):
                lease.owed.update(indices)
            case protocol.EndLease(lease=number):
                self._leases.pop(number, None)
            case _:
                pass

    def heard(self, reply: protocol.StoreReply) -> None:
        """Check a reply. Raises MalformedMessage for one that no call has asked for. What is said of a lease that has
        ended may have been on its way and counts for nothing."""
        if isinstance(reply, protocol.Attached | protocol.AttachRefused):
            raise MalformedMessage(f"{type(reply).__name__} on a connection that is attached already")
        if isinstance(reply, protocol.StoreHeartbeat) or (lease := self._leases.get(reply.lease)) is None:
            return
        if not _fits(reply, lease, self._slots):
            raise MalformedMessage(f"a {type(reply).__name__} that does not fit lease {reply.lease}: {reply}"[:300])


def _fits(reply: protocol.StoreReply, lease: _OpenLease, slots: int) -> bool:
    """Whether a reply fits the lease; note it."""
    match reply:
        case protocol.Reserved(slots=grants):
            numbers = [slot for slot in grants if slot is not None]
            fits = lease.reserving and lease.undecided and len(grants) == lease.pages
            lease.undecided = False
            return fits and len(set(numbers)) == len(numbers) and all(0 <= slot < slots for slot in numbers)
        case protocol.NotReserved():
            fits, lease.undecided = lease.reserving and lease.undecided, False
            return fits
        case protocol.Sealed(first=first, count=count):
            return lease.reserving and count <= lease.pages and _settle(lease, range(first, first + count))
        case protocol.PagesReady(pages=pages):
            indices = {page.index for page in pages}
            fits = not lease.reserving and len(indices) == len(pages) and indices.isdisjoint(lease.granted)
            lease.granted |= indices
            return fits and all(page.index < lease.pages and page.slot < slots for page in pages)
        case protocol.LowerTierHits(first=first, runs=runs):
            fits = not lease.reserving and lease.undecided and first + sum(run.pages for run in runs) <= lease.pages
            lease.undecided = False
            return fits
        case protocol.Released(indices=indices, held=held):
            return not lease.reserving and len(held) == len(indices) and _settle(lease, indices)
        case protocol.PagesUnavailable(index=index):
            return index < lease.pages
        case _:
            return False


def _settle(lease: _OpenLease, indices: range | tuple[int, ...]) -> bool:
    """Whether the store owed an answer for each of these, once; it does no more."""
    answered = set(indices)
    fits = len(answered) == len(indices) and answered <= lease.owed
    lease.owed -= answered
    return fits
