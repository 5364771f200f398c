"""One request, as the router has it.

    submit ─▶ QUEUED ──Decode sent──▶ PLACED ──Accepted──▶ PREPARING ──Started, or tokens──▶ RUNNING ──finish──▶ (end)
                ▲                        │                     │                                │
                └── no worker is free ───┴─ busy / lost / dead ┴─── dead, failed, no progress ──┘
                                               (the next attempt knows every token so far)

It ends from any state: with its last token, an error, its deadline, a matched stop string, or its client's leaving. The
budget bounds the attempts in a row that a worker accepted or gave up and that brought no token. A request that kills
its workers must stop, and one with workers that happen to die must not. All attempts in a row without a token have a
bound of their own, and pauses between them. The time in the queue bounds those that a worker without room refused.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf

from msgspec import structs

from baton.messages import LOWEST_CLASS, TOKEN_BYTES, AttemptName, ModelCard
from baton.timeline import Timeline
from kvstore.keys import cacheable_pages, namespace_root, pack_tokens, page_keys, split_keys
from kvstore.kv_window import KvWindow
from router.events import ServingAccount, Summary, Usage
from router.generation_request import GenerationRequest
from router.not_cached import NotCached
from router.placement.types import Placement


class RequestPhase(Enum):
    PLACED = "placed"
    PREPARING = "preparing"
    RUNNING = "running"


@dataclass
class Attempt:
    """The one active attempt of a request. Only the processes named here count for it."""

    name: AttemptName
    placement: Placement
    start: int  # tokens known when it began
    progressed_at: float  # when it last got on, seconds
    decode: str  # incarnation
    prefill: str | None  # incarnation that is to make the pages: its slot is taken; none once it has nothing of ours
    phase: RequestPhase = RequestPhase.PLACED
    # prompt tokens that its prefill worker has been asked to compute, until it says how many it did
    prefill_unreported: int = 0
    helpers: tuple[str, ...] = ()  # incarnations of prefill workers that compute a part, as long as they do
    helped: int = 0  # tokens that they have computed, by their own account
    prefill_sent: bool = False
    prefilled: bool = False
    computed: int = 0  # tokens that its decode worker has computed, by the last heartbeat
    verified: int = 0  # proposals, by its decode worker's last word
    accepted: int = 0  # and of those the right ones
    listed_before_accepted: int = 0  # heartbeats that listed it before its Accepted came
    listed_incomplete: int = 0  # heartbeats in a row that listed it as short
    listed_ended: int = 0  # heartbeats of its prefill worker that listed it as ended before its Prefilled came
    missing_from: int | None = None  # what we had when the last heartbeat showed that the worker has more
    last_resend: int | None = None  # position of the last Resend that a gap made us send

    def speculated(self, verified: int, accepted: int) -> tuple[int, int]:
        """Take the worker's totals. Return how many proposals, and right ones, are new."""
        before = self.verified, self.accepted
        self.verified = max(self.verified, verified)
        self.accepted = max(self.accepted, min(accepted, verified))
        return self.verified - before[0], self.accepted - before[1]

    @property
    def needs_prefill(self) -> bool:
        """A worker still waits for pages of its prefill worker. Afterwards only that worker's account is awaited."""
        return not self.prefilled and self.phase is not RequestPhase.RUNNING

    @property
    def stores(self) -> set[str]:
        """Incarnations of the stores that pages of this attempt are still to come through."""
        if self.phase is RequestPhase.RUNNING or not self.placement.fetch_pages:
            return set()
        prefills = self.prefill is not None and self.needs_prefill
        sources = self.placement.sources + (self.placement.prefill_sources if prefills else ())
        return {self.placement.store, *(source.store for source in sources)}


@dataclass
class QueueState:
    """What is known of a request's waits in the queue."""

    deadline: float | None = None  # when its wait ends, seconds; none while a worker has accepted it
    predicted_dequeue_at: float | None = None  # when its wait should end, seconds; none: it was not asked, or is over
    min_prefill_seconds: float | None = None  # that computing its prompt takes; none: it never had to wait
    warm: int = 0  # eighths of its tokens that are cached, when last looked up, ...
    warm_at: float = -inf  # ... which was then
    yielded: float | None = None  # when it gave its place to others; none: it has not, or has gone on since
    quota_tokens: int | None = None  # tokens taken out of its tenant's quota; none: it never came in
    charged: float = 0.0  # to its tenant for its prompt


@dataclass
class AttemptHistory:
    """What a request's attempts so far mean for the next one."""

    attempts: int = 0  # started
    failures: int = 0  # attempts since the last token that count against the request's budget
    fruitless: int = 0  # attempts since the last token, whatever ended them but a worker without room
    paused_until: float = -inf  # the next attempt begins no sooner, seconds
    ever_accepted: bool = False  # a worker has accepted it once: it is never turned away for want of room
    is_retry: bool = False  # its next attempt repeats one that failed, which uses the common retry budget
    busy_refusals: int = 0  # times that a prefill worker had no room
    decode_only: bool = False  # the next attempts shall need only a decode worker
    excluded: set[str] = field(default_factory=set[str])  # incarnations that said they could not do it
    prompt_left: set[str] = field(default_factory=set[str])  # prefill workers that gave up the rest of its prompt


@dataclass
class RequestAccount:
    """What serving a request has cost so far."""

    served: ServingAccount = field(default_factory=ServingAccount)  # without the number of attempts
    prefill_unreported: int = 0  # prompt tokens that earlier attempts' prefill workers may have computed
    decode_computed: int | None = None

    def begin_attempt(self) -> None:
        """Forget what was told of the attempt before."""
        self.served = structs.replace(
            self.served, prefill_worker="", prefill_queue_ms=None, prefill_compute_ms=None, pages_on_device=0,
            pages_fetched=0, predicted_ms=0, load_ms=0,
        )  # fmt: skip

    def tokens_computed(self, prefill_unreported: int) -> int:
        """Prompt tokens that were computed. A prefill that has not told how many (`prefill_unreported`) has computed
        what it was expected to."""
        unreported = self.prefill_unreported + prefill_unreported
        return self.served.tokens_computed + unreported + (self.decode_computed or 0)


@dataclass
class Request:
    """What the client asked for (`spec`), every token so far, and the one attempt."""

    spec: GenerationRequest
    arrival: int  # order of submission
    submitted: float
    name: str = field(init=False)
    prompt: int = field(init=False)  # tokens
    tokens: bytearray = field(init=False)  # packed: the prompt and everything emitted
    max_tokens: int | None = field(init=False)  # none until a worker's pool tells how many fit
    timeline: Timeline = field(init=False)
    ttft: float | None = field(init=False)  # objective, seconds; none: whenever there is room
    tpot: float | None = field(init=False)  # the same
    prompt_scored: int = 1  # prompt tokens whose log-probabilities have been emitted; the first has none
    adapter_digest: str = ""  # of its adapter, as the workers know it; known with the root
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list[bytes])  # of the pages that may be found in caches
    not_cached: NotCached | None = None  # as it was placed first
    queueing: QueueState = field(default_factory=QueueState)
    attempt: Attempt | None = None
    history: AttemptHistory = field(default_factory=AttemptHistory)
    account: RequestAccount = field(default_factory=RequestAccount)

    def __post_init__(self) -> None:
        spec = self.spec
        self.name, self.prompt, self.tokens = spec.name, spec.prompt, bytearray(spec.tokens)
        self.max_tokens, self.ttft, self.tpot = spec.max_tokens, spec.ttft, spec.tpot
        self.timeline = Timeline(received=spec.received)

    @property
    def known(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def generated(self) -> int:
        return self.known - self.prompt

    @property
    def awaited(self) -> int:
        """Position of the next token to hear of: one of the prompt, as long as log-probabilities of it are missing."""
        return self.prompt_scored if self.unscored else self.known

    @property
    def unscored(self) -> bool:
        """Log-probabilities of its prompt are wanted and not complete. A decode worker computes them without caches."""
        return self.spec.sampling.prompt_logprobs is not None and self.prompt_scored < self.prompt

    @property
    def level(self) -> int:
        """Its priority within what is told apart."""
        return max(-LOWEST_CLASS, min(LOWEST_CLASS, self.spec.priority))

    @property
    def lowest(self) -> bool:
        """Whether it fills gaps: its class is the lowest."""
        return self.level == LOWEST_CLASS

    @property
    def goes_first(self) -> bool:
        """Whether it waits before all new requests. A worker had accepted it, so a client may be in the middle of its
        output. A request that has yielded waits for its turn, and so does one of the lowest class."""
        return self.history.ever_accepted and self.queueing.yielded is None and not self.lowest

    @property
    def waits_since(self) -> float:
        """From when its turn counts."""
        return self.submitted if self.queueing.yielded is None else self.queueing.yielded

    def next_timeout(self, progress: float) -> float:
        """When its present state ends at the latest, whatever anybody else does: no state waits without a limit.
        `progress`: how many seconds an attempt may go on without any."""
        limit = inf if self.spec.deadline is None else self.spec.deadline
        if self.queueing.deadline is not None and self.queueing.deadline < limit:
            limit = self.queueing.deadline
        return limit if self.attempt is None else min(limit, self.attempt.progressed_at + progress)

    def left_ms(self, now: float) -> int | None:
        """Milliseconds until its deadline."""
        return None if self.spec.deadline is None else max(1, int((self.spec.deadline - now) * 1_000))

    def extend(self, tokens: tuple[int, ...]) -> None:
        self.tokens += pack_tokens(tokens)

    def root_in(self, card: ModelCard) -> bytes:
        """The parent of its first page's key, with the model and adapter that workers have."""
        return namespace_root(card.namespace_of(self.spec.adapter), self.spec.tenant, self.spec.salt)

    def derive_keys(self, card: ModelCard) -> None:
        """Bring `keys` up to the tokens known now."""
        page_size, root = card.namespace.page_size, self.root_in(card)
        self.adapter_digest = card.namespace_of(self.spec.adapter).adapter
        pages = cacheable_pages(min(self.known, self.exact(page_size) + 1), page_size)
        if root != self.root or pages != len(self.keys):
            whole = bytes(self.tokens[: pages * page_size * TOKEN_BYTES])
            self.root, self.keys = root, split_keys(page_keys(root, whole, page_size))

    def kv_window(self, page_size: int) -> KvWindow | None:
        """What its output attends to; none: all tokens."""
        return KvWindow.of(self.spec.kv_compression, self.prompt, page_size)

    def exact(self, page_size: int) -> int:
        """How many of its tokens may have pages in common with other requests."""
        return self.known if (window := self.kv_window(page_size)) is None else min(self.known, window.exact)

    def most_pages(self, page_size: int) -> float:
        """Device pages that it takes at most at a time, but for what its length sets."""
        return inf if (window := self.kv_window(page_size)) is None else window.most

    def missing_tokens(self, cached_pages: int, page_size: int) -> int:
        """Prompt tokens that a prefill worker computes where the first `cached_pages` are cached."""
        return max(0, min(self.prompt, self.known - 1) - cached_pages * page_size)

    def summary(self, completion: int | None = None) -> Summary:
        """The account as it stands. `completion` tokens count, where a stop string cut the output short."""
        computed = self.account.tokens_computed(self.attempt.prefill_unreported if self.attempt else 0)
        known = self.account.decode_computed is not None
        cached = max(0, self.prompt - computed) if known else 0
        not_cached = self.not_cached.settled(self.prompt, cached) if known and self.not_cached else self.not_cached
        usage = Usage(self.prompt, cached, self.generated if completion is None else completion)
        served = structs.replace(self.account.served, attempts=self.history.attempts)
        return Summary(replace(self.timeline), self.submitted, usage, served, not_cached)
