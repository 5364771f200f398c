"""What the router's state is told, and what it tells: events in, commands out.

Every request that was submitted ends in exactly one `RequestEnded`, whose outcome is `Finished`, `Failed` or
`Cancelled`. Every prefix that is to be pinned is answered by exactly one `PinAnswered`, whose outcome is `NewPin`,
`Failed` or `Cancelled`.
"""

# pyright: strict

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct, field

from baton import messages as msg
from baton.clock import Tick
from baton.errors import BatonError, RequestCancelled
from baton.operator_api import CascadeChoice, NewPin
from baton.timeline import Timeline
from kvstore.events.wire_format import KvEventBatch
from router.generation_request import GenerationRequest
from router.not_cached import NotCached

# --- events --------------------------------------------------------------------------------------------------------


class PinPrefix(Struct, frozen=True):
    """A client's wish that a prefix be computed and pinned, validated as far as that needs no knowledge of the cluster.

    `name` is as unique as a request's and begins with `PIN`: its attempts are listed among those of requests, none of
    which has a space in its name. `pin` is what the client calls it."""

    name: str
    pin: str
    tokens: bytes  # packed
    ttl: float  # seconds
    tenant: str = ""  # the one that it is pinned for
    salt: str = ""  # of the requests that it is pinned for
    adapter: str = ""  # the same
    deadline: float | None = None  # seconds on the same clock as `now`
    model: str = ""  # as the client names it


PIN = "pin "


class UnpinPrefix(Struct, frozen=True):
    """A client's wish that a pin end now."""

    pin: str
    tenant: str = ""  # the one that it was pinned for


class ProfileProcess(Struct, frozen=True):
    """A client's wish that a worker or store trace its next steps."""

    process: str  # its name
    mark: str
    steps: int


class StopProfile(Struct, frozen=True):
    """A client's wish that the trace of a worker or store end now."""

    process: str  # its name


class DrainWorker(Struct, frozen=True):
    """A client's wish that a worker be given nothing new, or (`undo`) be given work again. `at_once`: what it has goes
    elsewhere."""

    worker: str  # its name
    at_once: bool = False
    undo: bool = False


class LoadAdapter(Struct, frozen=True):
    """A client's wish that all workers load a LoRA adapter."""

    name: str
    path: str


class UnloadAdapter(Struct, frozen=True):
    """A client's wish that all workers unload a LoRA adapter."""

    name: str


class SetRole(Struct, frozen=True):
    """A client's wish that a worker be the other kind of worker. It is given nothing new; what it has goes elsewhere
    after `patience` seconds."""

    worker: str  # its name
    role: msg.WorkerRole
    patience: float


class ReloadWeights(Struct, frozen=True):
    """The operator's wish that all workers replace their weights. They are given nothing new; what they have after
    `patience` seconds is lost."""

    path: str  # of the checkpoint's directory
    patience: float


class ClientGone(Struct, frozen=True):
    """The client of this request, or of this pin, has gone."""

    request: str
    why: str = "the client went away"


class StopMatched(Struct, frozen=True):
    """A stop string ended the output at the edge after `completion` tokens: as far as the client is concerned, the
    request has finished."""

    request: str
    completion: int


class CascadeDecided(Struct, frozen=True):
    """It is known which model answers this request, which the small model of a cascade has."""

    request: str
    choice: CascadeChoice


class MessageReceived(Struct, frozen=True):
    """A message came in on the internal socket."""

    envelope: msg.Envelope[msg.ToRouter]


class KvEvents(Struct, frozen=True):
    """A batch of KV events came in."""

    batch: KvEventBatch


class KvSnapshot(Struct, frozen=True):
    """A part of a holder's snapshot came in."""

    holder: str
    part: msg.Snapshot


class Shutdown(Struct, frozen=True):
    """This router is about to stop: end everything, and let nothing in."""


RouterEvent: TypeAlias = (
    GenerationRequest
    | PinPrefix
    | UnpinPrefix
    | LoadAdapter
    | UnloadAdapter
    | ProfileProcess
    | StopProfile
    | DrainWorker
    | SetRole
    | ReloadWeights
    | ClientGone
    | StopMatched
    | CascadeDecided
    | MessageReceived
    | KvEvents
    | KvSnapshot
    | Tick
    | Shutdown
)

# --- outcomes ------------------------------------------------------------------------------------------------------


class Finished(Struct, frozen=True):
    """The output is complete."""

    reason: msg.FinishReason


class Failed(Struct, frozen=True):
    """The client gets this error, whatever it has received so far."""

    error: BatonError


class Cancelled(Struct, frozen=True):
    """The client does not want the rest."""

    why: str


RequestOutcome: TypeAlias = Finished | Failed | Cancelled


class Usage(Struct, frozen=True):
    """Tokens. `cached` are the prompt tokens that no worker computed for this request."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


class ServingAccount(Struct):
    """The workers that served a request, by name, and the cost of serving it. A `Summary` has one of its own."""

    attempts: int = 0
    prefill_worker: str = ""  # of the last attempt
    decode_workers: tuple[str, ...] = ()  # in the order of attempts
    tokens_computed: int = 0  # by prefill workers, over all attempts
    pages_hit: int = 0
    pages_shipped: int = 0
    pages_on_device: int = 0
    pages_fetched: int = 0
    prefill_queue_ms: int | None = None
    prefill_compute_ms: int | None = None
    predicted_ms: int = 0  # how long loading cached pages from below an arena was to take in the last attempt
    load_ms: int = 0  # and how long it took
    drafts: int = 0  # steps that verified proposals for it, over all attempts
    draft_tokens: int = 0  # those proposals
    accepted_tokens: int = 0  # and the right ones


class Summary(Struct, frozen=True):
    """A request's account, whatever its outcome."""

    timeline: Timeline
    submitted: float
    usage: Usage = field(default_factory=Usage)
    served: ServingAccount = field(default_factory=ServingAccount)
    not_cached: NotCached | None = None  # none: it was never placed


# --- commands ------------------------------------------------------------------------------------------------------


class SendMessage(Struct, frozen=True):
    """Send to that peer. The order of commands is the order on the link, and the state counts along."""

    incarnation: str
    message: msg.Message


class ForgetPeer(Struct, frozen=True):
    """Count messages to that peer from 1 again: it is a stranger, or long gone."""

    incarnation: str


class Emit(Struct, frozen=True):
    """Tokens for the client, each exactly once and in order; a log-probability for each, or none at all. Those of the
    prompt's tokens come before, from the second token on."""

    request: str
    worker: str  # incarnation of the decode worker that computed them
    tokens: tuple[int, ...] = ()
    logprobs: tuple[msg.TokenLogprob, ...] = ()
    prompt_logprobs: tuple[msg.PromptTokenLogprob, ...] = ()


class RequestEnded(Struct, frozen=True):
    """The last that is heard of a request."""

    request: str
    outcome: RequestOutcome
    summary: Summary

    def finish_reason(self) -> msg.FinishReason:
        """Return why the output ended. Raises the error that it ended in."""
        match self.outcome:
            case Finished(reason=reason):
                return reason
            case Failed(error=error):
                raise error
            case Cancelled(why=why):
                raise RequestCancelled(why)


class PinAnswered(Struct, frozen=True):
    """The answer to a PinPrefix."""

    name: str
    outcome: NewPin | Failed | Cancelled


class Subscribe(Struct, frozen=True):
    """Follow the KV events of that holder; at `replay` it is asked for what was missed."""

    incarnation: str
    endpoint: str
    replay: str


class AskSnapshot(Struct, frozen=True):
    """Ask that holder for a snapshot."""

    incarnation: str


class Unsubscribe(Struct, frozen=True):
    """Stop following them."""

    incarnation: str


class Log(Struct, frozen=True):
    """A line for the log. Lines of one kind are rate-limited; those without a kind are all written."""

    text: str
    request: str = ""
    warning: bool = False
    kind: str = ""
    detail: bool = False  # of interest only at level DEBUG: `Explain` tells it, too


RouterCommand: TypeAlias = (
    SendMessage | ForgetPeer | Emit | RequestEnded | PinAnswered | Subscribe | AskSnapshot | Unsubscribe | Log
)
