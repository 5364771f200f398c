"""The messages between a worker and its node's store, over a Unix socket.

A lease, numbered by the worker, names one reservation or acquisition of one chain of keys. Indices count within it. The
calls follow Plasma's create, seal, get and release.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from baton import messages as msg


class Attach(msg.Message, frozen=True):
    """First words on the Unix socket. The store checks the peer's uid, takes a pidfd, and answers with its arena. If
    other processes write pages for the peer, their pidfds travel beside this message."""

    peer: msg.Peer
    namespace: msg.Namespace
    page_bytes: Annotated[int, Meta(ge=1)]
    protocol: int = msg.PROTOCOL_VERSION


class Attached(msg.Message, frozen=True):
    """The arena's memfd travels beside this message: `slots` slots of `page_bytes` bytes."""

    store: msg.Peer
    slots: msg.Count
    page_bytes: msg.Count


class AttachRefused(msg.Message, frozen=True):
    """The store will not serve this peer; it closes the connection after saying why."""

    reason: str
    message: str


class LeaseMessage(msg.Message, frozen=True):
    """Base of all messages about one lease."""

    lease: msg.Count


class Reserve(LeaseMessage, frozen=True):
    """Slots for `keys`, which follow `parent` (empty at the start of a chain). All or nothing."""

    parent: bytes
    keys: msg.PackedKeys
    partial: bool = False  # the last one is of a partial page: it is not published, and goes with its last hold
    prompt: msg.Count = 0  # which prompt of this writer asks; it waits for slots. 0: a write-through, which does not
    apart: bool = False  # no key follows another one: each begins a chain, of which others are not told


class ShareSlots(LeaseMessage, frozen=True):
    """Slots for several processes that each write and read them, until the last of these leases has ended. They are
    granted as soon as `members` processes have asked for them by one name, and never become pages. The first has a mark
    for the process at each place, which the store changes when that process dies (`kvstore.arena.shared_slots`)."""

    name: msg.Key
    slots: Annotated[int, Meta(ge=1, le=2**20)]
    members: Annotated[int, Meta(ge=2, le=msg.MAX_RING)]
    place: Annotated[int, Meta(ge=0, le=msg.MAX_RING - 1)]


class Reserved(LeaseMessage, frozen=True):
    """A slot to write for each key; none where the page is sealed already and nothing need be written. Of shared slots,
    all."""

    slots: tuple[int | None, ...]


class NotReserved(LeaseMessage, frozen=True):
    """`full`: no slots free now; `orphan`: the parent isn't here; `quota`: too much reserved by this writer; `behind`:
    another prompt waits for slots, and this one must hold nothing while it does (`kvstore.server.head_of_line`). Of
    shared slots, `full` and `quota` alone."""

    reason: Literal["full", "orphan", "quota", "behind"]


class Seal(LeaseMessage, frozen=True):
    """The pages `[first, first + len(checksums))` of this lease are written; XXH3-64 of each. With `hold` the lease
    holds them from now on, so that they outlast eviction until released."""

    first: msg.Count
    checksums: tuple[msg.Checksum, ...]
    hold: bool = False


class Sealed(LeaseMessage, frozen=True):
    """Those pages exist now."""

    first: msg.Count
    count: msg.Count


class Acquire(LeaseMessage, frozen=True):
    """Hold the pages of `keys`, which follow `parent` (empty at the start of a chain), and say where they are.

    With `wait` this is a hand-off: pages that are not here yet are brought from the `sources`, or waited for until a
    worker seals them here. Without it, `LowerTierHits` tells what lower tiers have, and the worker decides."""

    keys: msg.PackedKeys
    wait: bool = False
    parent: bytes = b""
    sources: tuple[msg.PageSource, ...] = ()  # their `pages` count from the lease's first key
    partial: bool = False  # the last one is of a partial page: what is brought from elsewhere is for this lease alone
    apart: bool = False  # no key follows another one


class LeasedPage(Struct, frozen=True, array_like=True):
    """A readable page: `index` within the lease, its slot, and the checksum it was sealed with."""

    index: msg.Count
    slot: msg.Count
    checksum: msg.Checksum


class PagesReady(LeaseMessage, frozen=True):
    """These pages of the lease are held for it and readable."""

    pages: tuple[LeasedPage, ...]


class TierPages(Struct, frozen=True, array_like=True):
    """So many consecutive pages that a tier below the arena has, and how fast it brings them."""

    speed: msg.TierSpeed
    pages: msg.Count


class LowerTierHits(LeaseMessage, frozen=True):
    """The pages of the lease from `first` on that lower tiers have, in order: Promote those worth it."""

    first: msg.Count
    runs: tuple[TierPages, ...]


class Promote(LeaseMessage, frozen=True):
    """Bring the pages of the lease before index `until` into the arena; PagesReady and PagesUnavailable tell of
    each."""

    until: msg.Count


class PagesUnavailable(LeaseMessage, frozen=True):
    """From `index` on, the pages of this lease are neither here nor being made (or their maker has gone)."""

    index: msg.Count


class Release(LeaseMessage, frozen=True):
    """Done with the pages `indices` of this lease."""

    indices: Annotated[tuple[int, ...], Meta(max_length=msg.MAX_KEYS_PER_CALL)]


class Released(LeaseMessage, frozen=True):
    """`held` tells, for each index, whether the hold had lasted until now: only then do the bytes read count."""

    indices: tuple[int, ...]
    held: tuple[bool, ...]


class EndLease(LeaseMessage, frozen=True):
    """Give up everything under this lease: unsealed reservations (the writer will not write again), holds, waits."""


class PageCorrupt(LeaseMessage, frozen=True):
    """A page's bytes did not match its checksum: drop it."""

    index: msg.Count


class LeaseHeartbeat(msg.Message, frozen=True):
    """A worker's heartbeat to its store: every lease it still cares about. The others are forgotten."""

    leases: tuple[int, ...] = ()


class StoreHeartbeat(msg.Message, frozen=True):
    """The store's heartbeat to a worker: every lease it knows of this worker."""

    leases: tuple[int, ...] = ()


StoreCall: TypeAlias = (
    Attach | Reserve | ShareSlots | Seal | Acquire | Promote | Release | EndLease | PageCorrupt | LeaseHeartbeat
)
StoreReply: TypeAlias = (
    Attached
    | AttachRefused
    | Reserved
    | NotReserved
    | Sealed
    | PagesReady
    | LowerTierHits
    | PagesUnavailable
    | Released
    | StoreHeartbeat
)
