"""One prefix that is to be pinned, as the router has it: from the client's wish to the pin's end.

    PinPrefix ─▶ WAITING ──Prefill──▶ PREFILLING ──Prefilled, PinPages──▶ PINNING ──PagesPinned──▶ PINNED ──▶ (end)
                    ▲                     │                                  │                        │
                    └─── busy, failed, lost, dead, no progress, missing ─────┴──── its store dies ────┘

A pinned prefix ends with UnpinPrefix, or when its time to live is over.

Until it is pinned for the first time a client waits for it, and it may end in an error from any state. From then on no
client waits. If its pages are lost, they are computed again, on any node that can, as long as its time to live lasts.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.messages import KEY_BYTES, TOKEN_BYTES, AttemptName
from baton.operator_api import NewPin, Pin
from kvstore.keys import page_keys
from router.events import PinPrefix


class PinPhase(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    PINNING = "pinning"
    PINNED = "pinned"


@dataclass
class PinnedPrefix:
    """Its tokens, and the worker and store that make or keep its pages now."""

    name: str
    pin: str
    tenant: str
    salt: str
    adapter: str
    arrival: int  # order of coming in
    tokens: bytes  # packed, whole pages
    ttl: float  # seconds
    deadline: float | None
    # when the wait for a worker ends, seconds; none while a worker has it, or no client waits
    gives_up_at: float | None
    awaited: bool = True  # a client waits for the answer
    expires: float = 0.0  # seconds; counts once it has been pinned
    phase: PinPhase = PinPhase.WAITING
    not_before: float = 0.0  # when it may be tried next, seconds
    attempts: int = 0  # begun
    failures: int = 0  # attempts that came to nothing since it was last pinned
    missed: bool = False  # its store has lost pages between their making and their pinning
    excluded: set[str] = field(default_factory=set[str])  # prefill workers that could not do it
    # Of the attempt at hand:
    keys: bytes = b""  # packed
    page_bytes: int = 0
    worker: str | None = None  # incarnation that makes the pages, or still holds them
    store: str | None = None  # incarnation that has the pages, or will
    node: str = ""
    progress: float = 0.0  # when it last got on, seconds
    position: int = 0  # as its worker's heartbeat last said
    sightings: int = 0  # heartbeats that listed it as done before its Prefilled came
    last_request: float = 0.0  # when PinPages was last sent, seconds
    sequence: int = 0  # of that message
    computed: int | None = None  # tokens

    @classmethod
    def of(cls, order: PinPrefix, arrival: int, page_size: int, give_up: float) -> PinnedPrefix:
        page = page_size * TOKEN_BYTES
        whole = order.tokens[: len(order.tokens) // page * page]
        return cls(
            order.name, order.pin, order.tenant, order.salt, order.adapter, arrival, whole, order.ttl, order.deadline,
            give_up,
        )  # fmt: skip

    @property
    def attempt(self) -> AttemptName:
        return AttemptName(self.name, self.attempts)

    @property
    def pages(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def owner(self) -> tuple[str, str]:
        """Whose it is and what they call it."""
        return (self.tenant, self.pin)

    def left_ms(self, now: float) -> int | None:
        """Milliseconds until its client's deadline."""
        return None if self.deadline is None else max(1, int((self.deadline - now) * 1_000))

    def derive_keys(self, root: bytes, page_size: int) -> None:
        self.keys = page_keys(root, self.tokens, page_size)

    def begin(self, worker: str, store: str, node: str, now: float) -> None:
        """The next attempt: this worker shall make the pages, and this store keep them."""
        self.phase, self.attempts = PinPhase.PREFILLING, self.attempts + 1
        self.worker, self.store, self.node = worker, store, node
        self.progress, self.position, self.sightings, self.computed = now, 0, 0, None

    def view(self, now: float) -> Pin:
        return Pin(
            id=self.pin,
            tenant=self.tenant,
            node=self.node if self.phase is PinPhase.PINNED else "",
            tokens=len(self.tokens) // TOKEN_BYTES,
            pages=self.pages,
            bytes=self.pages * self.page_bytes,
            expires_in_ms=int(max(0.0, self.expires - now) * 1_000),
        )

    def new(self, now: float) -> NewPin:
        """Return what its client gets once it is pinned."""
        view = self.view(now)
        return NewPin(view, self.computed, None if self.computed is None else max(0, view.tokens - self.computed))
