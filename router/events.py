"""What the router's state is told, and what it tells: events in, commands out.

Every request that was submitted ends in exactly one `End`, whose outcome is `Finished`, `Failed` or `Cancelled`. Every
prefix that is to be warmed is answered by exactly one `Warmed`, whose outcome is `Kept`, `Failed` or `Cancelled`.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from baton.clock import Tick
from baton.errors import BatonError
from baton.messages import Envelope, FinishReason, Message, Sampling, Snapshot, TokenLogprob, ToRouter, WorkerRole
from baton.timeline import Timeline
from kvstore.events import Batch

# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A client's request, validated as far as that needs no knowledge of the cluster.

    `request` is unique for ever, among all routers of the same workers: its attempts are numbered from 1, and a name
    used again would mean two things to a worker that missed the end of the first. `sampling` has its seed already."""

    request: str
    tokens: bytes  # packed
    sampling: Sampling
    received: float  # when the front end got it, seconds
    max_tokens: int | None = None  # none: as many as fit
    stop_token_ids: tuple[int, ...] = ()  # the model's own end-of-sequence tokens among them, unless ignored
    tenant: str = ""  # from the authenticated identity
    priority: int = 0  # lower is more urgent
    deadline: float | None = None  # seconds on the same clock
    ttft: float | None = None  # objective, seconds; none: that of its priority's class
    tpot: float | None = None  # the same
    affinity: str = ""  # requests of one key go to one decode worker while it lives


@dataclass(frozen=True, slots=True)
class Warm:
    """A client's wish that a prefix be computed and pinned, validated as far as that needs no knowledge of the cluster.

    `name` is as unique as a request's and begins with `WARM`: its attempts are listed among those of requests, none of
    which has a space in its name. `pin` is what the client calls it."""

    name: str
    pin: str
    tokens: bytes  # packed
    ttl: float  # seconds
    tenant: str = ""  # from the authenticated identity
    deadline: float | None = None  # seconds on the same clock as `now`


WARM = "warm "


@dataclass(frozen=True, slots=True)
class Unwarm:
    """A client's wish that a pin end now."""

    pin: str
    tenant: str = ""  # from the authenticated identity


@dataclass(frozen=True, slots=True)
class Profile:
    """A client's wish that a worker or store trace its next steps."""

    process: str  # its name
    mark: str
    steps: int


@dataclass(frozen=True, slots=True)
class Drain:
    """A client's wish that a worker be given nothing new, or (`undo`) be given work again. `at_once`: what it has goes
    elsewhere."""

    worker: str  # its name
    at_once: bool = False
    undo: bool = False


@dataclass(frozen=True, slots=True)
class SetRole:
    """A client's wish that a worker be the other kind of worker. It is given nothing new; what it has goes elsewhere
    after `patience` seconds."""

    worker: str  # its name
    role: WorkerRole
    patience: float


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody listens to this request, or waits for this warm-up, any more."""

    request: str
    why: str = "the client went away"


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string ended the output at the edge after `completion` tokens: as far as the client is concerned, the
    request has finished."""

    request: str
    completion: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A message came in on the internal socket."""

    envelope: Envelope[ToRouter]


@dataclass(frozen=True, slots=True)
class KvEvents:
    """A batch of KV events came in."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """A part of a holder's snapshot came in."""

    holder: str
    part: Snapshot


@dataclass(frozen=True, slots=True)
class Shutdown:
    """This router is about to stop: end everything, and let nothing in."""


Event: TypeAlias = (
    Submit
    | Warm
    | Unwarm
    | Profile
    | Drain
    | SetRole
    | ClientGone
    | StopMatched
    | Heard
    | KvEvents
    | KvSnapshot
    | Tick
    | Shutdown
)

# --- outcomes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finished:
    """The output is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The client gets this error, whatever it has received so far."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants the rest."""

    why: str


Outcome: TypeAlias = Finished | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached` are those of the prompt that nobody computed for this request."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """Who served a request, by name, and what that took."""

    attempts: int = 0
    prefill_worker: str = ""  # of the last attempt
    decode_workers: tuple[str, ...] = ()
    tokens_computed: int = 0  # by prefill workers, over all attempts
    pages_hit: int = 0
    pages_shipped: int = 0
    pages_on_device: int = 0
    pages_fetched: int = 0
    prefill_queue_ms: int | None = None
    prefill_compute_ms: int | None = None
    predicted_ms: int = 0  # how long loading cached pages from below an arena was to take in the last attempt
    load_ms: int = 0  # and how long it took


@dataclass(frozen=True, slots=True)
class Summary:
    """A request's account, whatever its outcome."""

    timeline: Timeline
    submitted: float
    usage: Usage = field(default_factory=Usage)
    served: Served = field(default_factory=Served)


@dataclass(frozen=True, slots=True)
class PinView:
    """A pin, as its tenant may see it."""

    pin: str
    node: str  # "": it is being made anew
    tokens: int
    pages: int
    bytes: int
    left: float  # seconds


@dataclass(frozen=True, slots=True)
class Kept:
    """A prefix is warm: its pages are pinned. `computed`: tokens that had to be computed; none: nobody knows."""

    view: PinView
    computed: int | None


# --- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send to that peer. The order of commands is the order on the link, and the state counts along."""

    incarnation: str
    message: Message


@dataclass(frozen=True, slots=True)
class Forget:
    """Count messages to that peer from 1 again: it is a stranger, or long gone."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Emit:
    """Tokens for the client, each exactly once and in order; a log-probability for each, or none at all."""

    request: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The last that is heard of a request."""

    request: str
    outcome: Outcome
    summary: Summary


@dataclass(frozen=True, slots=True)
class Warmed:
    """The answer to a Warm."""

    name: str
    outcome: Kept | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Follow the KV events of that holder; at `snapshots` it is asked for what was missed."""

    incarnation: str
    endpoint: str
    snapshots: str


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask that holder for a snapshot."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Stop following them."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    text: str
    request: str = ""
    warning: bool = False


Command: TypeAlias = Send | Forget | Emit | End | Warmed | Subscribe | AskSnapshot | Unsubscribe | Note
