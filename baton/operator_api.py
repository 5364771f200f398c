"""The operator's API: its calls and their answers, as JSON over HTTP at a router's operator socket.

    curl --unix-socket $XDG_RUNTIME_DIR/baton/baton/router.sock http://localhost/status

A call that only reads is a GET with the struct's fields as its query. Any other call is a POST with the struct as its
body. An answer with another status than 200 is an error of the HTTP API: `{"error": {"message": …}}`, with the reason
of a class of `baton.errors` in the header `baton-reason`.

A call is about all routers of the cluster, unless it has the header `ONE_ROUTER`. Milliseconds of an event count from
the receipt of its request.
"""

# pyright: strict

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import Meta, Raw, Struct

from baton.messages import MAX_TRACE_STEPS, LoadReport, ModelCard, Role, WorkerRole

ONE_ROUTER = "baton-one-router"

TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]
ProcessState: TypeAlias = Literal["live", "draining", "silent", "stuck", "dead", "replaced", "rejected"]
"""`draining`: live, and given no new work. `silent`: no heartbeat for longer than cluster.heartbeat_timeout_ms.
`stuck`: its step takes longer than cluster.step_timeout_ms. `dead`: the kernel has reported its end. The router has
`rejected` it, or another process of its name has `replaced` it."""
CascadeReason: TypeAlias = Literal["confident", "unsure", "class"]
"""`confident`: the mean log-probability reaches the bound. `unsure`: it is below. `class`: the request's priority."""
RequestState: TypeAlias = Literal["queued", "running", "finished", "failed", "cancelled"]

A = TypeVar("A")


# --- what is told of the cluster ---


class Process(Struct, frozen=True, kw_only=True):
    """A process of the cluster, as its router sees it."""

    name: str
    role: Role
    pid: int
    state: ProcessState
    node: str = ""
    incarnation: str = ""
    load: LoadReport = LoadReport()
    heartbeat_age_ms: float | None = None  # none: it is the router itself
    metrics_address: str = ""  # host:port of its Prometheus page
    pages_known: int = 0  # that the router's prefix map lists for it
    attempts: int = 0  # open ones that the router has placed on it
    becoming: WorkerRole | Literal[""] = ""  # its role once it is empty; "": no change
    events_endpoint: str = ""  # ZMQ endpoint of its KV events
    replay_endpoint: str = ""  # and of replays for subscribers that missed some
    numerics: str = ""  # workers of one class compute the same bits of the same input
    model: str = ""  # that it serves


class Counts(Struct, frozen=True, kw_only=True):
    """Requests now, and counts since the router's start."""

    queued: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    attempts: int = 0
    placed_split: int = 0  # attempts with a prefill worker
    placed_local: int = 0  # attempts whose decode worker computes the prompt itself
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Bottleneck(Struct, frozen=True):
    """Predicted utilisation of prefill and decode workers: the work of the last half minute, as a share of their
    capacity. Above 1, queues grow."""

    prefill: float
    decode: float
    advised: WorkerRole | Literal[""] = ""  # the role that one worker of the other role should take
    prefill_then: float = 0.0  # after that change
    decode_then: float = 0.0


class Status(Struct, frozen=True):
    """The cluster. The router comes first in `processes`."""

    processes: list[Process]
    log_dir: str = ""  # of the cluster, on the router's node
    counts: Counts = Counts()
    cluster: str = ""
    model_name: str = ""  # for clients
    model: ModelCard | None = None  # none: no worker has loaded the model yet
    bottleneck: Bottleneck | None = None  # none: no worker of each role has joined yet


class TraceFile(Struct, frozen=True):
    """The file of a trace, in the Trace Event Format of chrome://tracing and Perfetto, once its steps are done."""

    path: str
    node: str
    steps: int


# --- what is told of requests ---


class NotCached(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why prompt tokens of a request were not cached. `router.not_cached` has the reasons."""

    reason: str  # of the first page
    page: int  # its number from 0
    token: int  # at which it begins
    tokens: Mapping[str, int]  # by reason, in the order of the prompt; estimates, which add up to those not cached
    tier: str = ""  # that an evicted page was on last: GPU, CPU or DISK; "": unknown, or lost with its process
    evicted_ms: float | None = None  # how long before the request's receipt; none: unknown
    other_request: str = ""  # that had these tokens before, as logs name it; "": none, or it is forgotten


class CascadeChoice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which model of a cascade answers a request, and why."""

    model: str  # the cascade
    small: str
    chosen: str
    reason: CascadeReason
    min_logprob: float  # the bound
    mean_logprob: float | None = None  # of the small model's first tokens, of all outputs; none: it was not asked
    tokens: int = 0  # so many
    first: str = ""  # the request to the small model, as logs name it


class RequestSummary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A recent request."""

    request_id: str
    name: str  # in logs
    state: RequestState
    outcome: str  # stop, length, or the reason of an error with its message; "": it has not ended
    age_ms: float
    priority: int
    prompt_tokens: int
    cached_tokens: int | None = None  # over all attempts; none before the first token
    completion_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    attempts: int
    decode_worker: str  # of the last attempt
    prefill_worker: str  # "": the decode worker computed the prompt itself
    waits_because: str  # why the last placement found no worker; "": it has one, or has ended
    tenant: str
    session: str = ""  # that the client names
    not_cached: NotCached | None = None  # none: not placed yet
    cascade: CascadeChoice | None = None  # none: the request names no cascade, or its choice is to come


class CostTerms(Struct, frozen=True):
    """Predicted milliseconds until an attempt's first token, term by term."""

    total_ms: float
    queue_ms: float  # earlier work of the worker that computes the prompt
    load_ms: float  # cached pages from disks and other nodes
    compute_ms: float  # tokens that no cache has
    transfer_ms: float  # pages between two nodes
    wait_ms: float  # for room on the decode worker, or until it can meet an objective
    step_ms: float  # the decode step that brings the first token
    delay_ms: float  # by which these workers, live but slow, answer later than others of their role


class ExplainedCandidate(Struct, frozen=True):
    """One way to serve an attempt."""

    decode_worker: str
    prefill_worker: str  # "": the decode worker computes the prompt itself
    chosen: bool
    infeasible: str  # why it could not be chosen; "": it was feasible
    cached_tokens: int
    cost: CostTerms


class Outlook(Struct, frozen=True, omit_defaults=True):
    """Predicted or actual figures of an attempt. None: unknown, or never reached."""

    cached_tokens: int | None = None  # of the tokens known when the attempt began
    ttft_ms: float | None = None  # none for an attempt that began after the first token
    tpot_ms: float | None = None
    start_ms: float | None = None  # from placement to the attempt's first token


class ExplainedAttempt(Struct, frozen=True):
    """One attempt: the choice, what was predicted, and what happened."""

    number: int
    decode_worker: str
    prefill_worker: str
    why: str  # the choice in words
    candidates: list[ExplainedCandidate]  # the best first, with the chosen one; empty: no longer kept
    candidates_omitted: int
    predicted: Outlook
    actual: Outlook
    hops: Mapping[str, float]  # milliseconds to placed, accepted, …, ended, as far as they were reached
    notes: list[str]  # refusals and similar events that did not end the attempt
    ended_because: str  # "": it is open, or the request ended with it
    proposals_verified: int = 0  # tokens proposed by speculation, which the decode worker's steps verified
    proposals_accepted: int = 0
    speculation_saved_ms: float = 0.0  # as that worker's step costs tell (`decode_worker/speculation.py`)


class Explanation(Struct, frozen=True):
    """The placement and course of a recent request."""

    request: RequestSummary
    attempts: list[ExplainedAttempt]  # in order
    attempts_omitted: int  # the first ones of many
    candidates: list[ExplainedCandidate]  # of the last placement without a worker, the best first
    candidates_omitted: int


# --- what is told of pins ---


class Pin(Struct, frozen=True):
    """A pinned prefix."""

    id: str
    tenant: str
    node: str  # whose store holds the pages; "": they are computed again, after that store has died
    tokens: int
    pages: int
    bytes: int
    expires_in_ms: int


class NewPin(Struct, frozen=True, omit_defaults=True):
    """A pin that was made. Both counts are of the tokens of its pages."""

    pin: Pin
    tokens_computed: int | None = None  # now; none: the worker's reply was lost
    tokens_cached: int | None = None  # the others


class LoraAdapter(Struct, frozen=True):
    """A LoRA adapter that clients may name."""

    name: str
    path: str


# --- calls ---


class OperatorCall(Struct, Generic[A], frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call. `A` is its answer."""


class GetHealth(OperatorCall[str], frozen=True):
    """Why no request can be served now; "": one can."""


class GetStatus(OperatorCall[Status], frozen=True):
    """The routers, every process that they know of, and what it does now."""


class ListRequests(OperatorCall[list[RequestSummary]], frozen=True):
    """The last requests, newest first."""

    last: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0  # how many; 0: 10
    session: str = ""  # only those of this session; "": of any


class Explain(OperatorCall[Explanation], frozen=True):
    """Why one of the last requests (router.explain_requests of them) was served as it was. Else RequestNotFound."""

    request_id: str
    """The client's name of the request, or the router's: `request_id` in the last message of its stream, and
    `x-request-id` in the initial metadata. If several have it, the latest. The name in logs works as well, and so does
    the id of an HTTP answer, such as `chatcmpl-…`, `msg_…` or `resp_…`."""


class GetSnapshot(OperatorCall[Raw], frozen=True):
    """What the page at /dashboard polls (`router.dashboard.snapshot.Snapshot`), of one router and model."""

    model: str = ""  # "": the first


class GetHistory(OperatorCall[Raw], frozen=True):
    """What the page asks for when it opens (`router.dashboard.snapshot.History`), of one router and model."""

    model: str = ""  # "": the first


class Profile(OperatorCall[TraceFile], frozen=True):
    """Have a live worker or store trace its next steps, or end its trace; answered before that is done.
    ProcessNotFound without one of that name; TraceConflict while another trace is made, and for a stop of none."""

    process: str
    steps: Annotated[int, Meta(ge=0, le=MAX_TRACE_STEPS)] = 0  # 0: 100
    stop: bool = False


class Drain(OperatorCall[Process], frozen=True):
    """Give a live worker nothing new until that is undone; what it has goes on. ProcessNotFound without one of that
    name. It is empty once its status shows no attempts."""

    worker: str
    now: bool = False  # moves its requests to other workers at once, by new attempts
    undo: bool = False  # places work on it again


class SetRole(OperatorCall[Process], frozen=True):
    """Have a live worker be the other kind of worker, without a restart: it is given nothing new, and once it is empty
    it joins as a new incarnation in the new role. ProcessNotFound without one of that name. InvalidRequest where it has
    that role, can't have it, or is the last decode worker. A Drain with undo calls it off."""

    worker: str
    role: WorkerRole
    patience_ms: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    """Time after which its remaining requests move to other workers, by new attempts. None: 30,000."""


class ReloadWeights(OperatorCall[None], frozen=True):
    """Have all workers of a model replace their weights by those of another checkpoint of it, without a restart. They
    are given nothing new. Once all are empty, each loads and joins as a new incarnation. Requests wait meanwhile.
    InvalidRequest for a checkpoint of another model."""

    path: str  # of its directory, on every node with workers
    patience_ms: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    """Time after which requests that still run end: those with tokens fail, others begin anew. None: 30,000."""
    model: str = ""  # "": the first


class PinPrefix(OperatorCall[NewPin], frozen=True, kw_only=True):
    """Compute the full pages of a prefix, as far as they are missing, and pin them in the store of one node; answered
    once they are pinned. A connection that is closed before leaves no pin. Needs a prefill worker."""

    model: str = ""  # a served model, or one of its LoRA adapters; "": the first model
    text: str | None = None  # tokenized by the router, with the tokenizer's special tokens, or …
    token_ids: list[TokenId] | None = None  # … used as they are. Tokens after the last full page are not kept.
    ttl_ms: int | None = None  # how long to keep it, 1 second to 7 days; none: 1 hour
    id: str = ""  # its name; "": the router makes one. A pin of the same name and tenant is replaced.
    tenant: str = ""  # only requests of this tenant,
    cache_salt: str = ""  # with this salt, find the pages
    timeout_ms: Annotated[int, Meta(ge=1, le=2**40)] | None = None  # in which the pages must be pinned; none: 1 hour


class Unpin(OperatorCall[None], frozen=True):
    """End a pin before its time; PinNotFound without it. Its pages stay cached as long as there is room."""

    id: str
    tenant: str = ""


class ListPins(OperatorCall[list[Pin]], frozen=True):
    """The pins of all tenants, ordered by id."""


class LoadAdapter(OperatorCall[None], frozen=True):
    """Have all workers of a model load a LoRA adapter; answered once they have. Needs model.max_loras."""

    lora_name: str
    lora_path: str  # a directory that every node has
    load_inplace: bool = False  # vLLM's; true is refused, since a name stands for one adapter
    model: str = ""  # "": the first


class UnloadAdapter(OperatorCall[None], frozen=True):
    """Serve no more requests of a LoRA adapter. Those that run go on, and then workers remove it. ModelMismatch without
    one of that name."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's; it changes nothing


class ListAdapters(OperatorCall[list[LoraAdapter]], frozen=True):
    """The LoRA adapters of all models that clients may name, ordered by name."""


Method: TypeAlias = Literal["GET", "POST"]
CALLS: Mapping[type[OperatorCall[Any]], tuple[Method, str, Any]] = {
    GetHealth: ("GET", "/health", str),
    GetStatus: ("GET", "/status", Status),
    ListRequests: ("GET", "/requests", list[RequestSummary]),
    Explain: ("GET", "/explain", Explanation),
    GetSnapshot: ("GET", "/snapshot", Raw),
    GetHistory: ("GET", "/history", Raw),
    Profile: ("POST", "/profile", TraceFile),
    Drain: ("POST", "/drain", Process),
    SetRole: ("POST", "/role", Process),
    ReloadWeights: ("POST", "/reload_weights", None),
    PinPrefix: ("POST", "/pin", NewPin),
    Unpin: ("POST", "/unpin", None),
    ListPins: ("GET", "/pins", list[Pin]),
    LoadAdapter: ("POST", "/v1/load_lora_adapter", None),
    UnloadAdapter: ("POST", "/v1/unload_lora_adapter", None),
    ListAdapters: ("GET", "/adapters", list[LoraAdapter]),
}
"""The method, path and answer of each call."""
