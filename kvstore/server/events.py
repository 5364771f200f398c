"""What the store's state hears, what it says, and what can be read off it."""

from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from baton.clock import Tick
from baton.messages import FromStore, ToStore
from baton.store_protocol import StoreCall, StoreReply
from kvstore.arena.shared_slots import LeaveRing
from kvstore.disk.orders import DiskEvent, DiskOrder
from kvstore.disk.stats import DiskStats
from kvstore.server.inbound_transfers import InboundStats
from kvstore.server.outbound_transfers import OutboundStats
from kvstore.transport.interface import PeerEvent, PeerOrder

# --- events -----------------------------------------------------------------------------------------------------------


class Connected(Struct, frozen=True):
    """A connection was opened by process `pid`, which runs as our own user."""

    connection: int
    pid: int


class CallReceived(Struct, frozen=True):
    """A call came in."""

    connection: int
    call: StoreCall


class Disconnected(Struct, frozen=True):
    """The connection has ended. Its process may live on."""

    connection: int


class WriterDied(Struct, frozen=True):
    """The kernel says that process `pid` is gone: it will never write again."""

    pid: int


class RouterMessageReceived(Struct, frozen=True):
    """A router of ours said this."""

    message: ToStore
    router: str = ""  # incarnation


StoreEvent: TypeAlias = (
    Connected | CallReceived | Disconnected | WriterDied | RouterMessageReceived | PeerEvent | DiskEvent | Tick
)

# --- commands ---------------------------------------------------------------------------------------------------------


class SendReply(Struct, frozen=True):
    """Send `reply`; with an `Attached` goes the arena's descriptor."""

    connection: int
    reply: StoreReply


class CloseConnection(Struct, frozen=True):
    """Close this connection. What it was told and has not read yet may be lost."""

    connection: int


class TellRouter(Struct, frozen=True):
    """Say this to one of our routers."""

    message: FromStore
    router: str = ""  # incarnation


class DivideArena(Struct, frozen=True):
    """From now on the arena is cut into slots of `page_bytes`, each a page of so many KV heads. Nothing is on its way
    to or from any slot."""

    page_bytes: int
    kv_heads: int


StoreCommand: TypeAlias = SendReply | CloseConnection | TellRouter | DivideArena | LeaveRing | PeerOrder | DiskOrder

# --- statistics -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StoreCounters:
    """What has happened since the start."""

    hits: int = 0  # pages that Acquire found
    misses: int = 0
    duplicates: int = 0  # pages sealed that another writer had sealed first
    evictions: int = 0
    expired: int = 0  # holds that their owner did not renew
    refusals: int = 0  # connections closed for what they said


@dataclass(slots=True, kw_only=True)
class StoreStats(StoreCounters):
    """A snapshot of the store: what is so now, beside what has happened."""

    slots: int
    page_bytes: int
    free: int  # slots
    evictable: int  # sealed pages that could make room
    sealed: int  # pages that can be found
    reserved: int  # slots
    unproven: int  # of these, by processes that are disconnected but not known to be gone
    held: int  # pages
    unlisted: int  # of these, those that can't be found (any more)
    connections: int
    leases: int
    waits: int  # pages waited for
    oldest_hold: float  # seconds since the oldest lease that holds something was made
    pins: int
    pinned_bytes: int
    corrupt: int  # pages reported since the start
    loads: InboundStats
    serving: OutboundStats
    disk: DiskStats
