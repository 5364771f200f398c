"""The internal protocol: what routers say to other processes, and what these say to routers.

Six links, one union of messages per direction. On the wire a message is plain MessagePack: a map of its fields, with
its name under "type", inside an `Envelope`. Everything is validated on receipt; `baton.wire` does the carrying.

    router  ⇄ decode worker     ToDecode    / FromDecode        ZMQ, worker connects
    router  ⇄ prefill worker    ToPrefill   / FromPrefill       ZMQ, worker connects
    router  ⇄ store             ToStore     / FromStore         ZMQ, store connects
    worker  ⇄ its node's store  StoreCall   / StoreReply        Unix socket, worker connects: `baton.store_protocol`
    store   ⇄ another store     PageRequest / PageReply         ZMQ, the store that wants pages connects:
                                                                `baton.peer_protocol`
    router  ⇄ who holds pages   ToPublisher / FromPublisher     ZMQ, router connects; without an envelope

KV events have a format of their own, vLLM's: see `kvstore/events/wire_format.py`.

Work is named (request, attempt). The router that owns a request numbers its attempts from 1. A sender is named by an
incarnation, a random id per process start. Page keys travel packed, 16 bytes each; token ids as little-endian uint32.
Durations are milliseconds left, never timestamps.
"""

from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

from msgspec import Meta, MsgspecError, Struct
from msgspec.structs import replace

LOWEST_CLASS = 8
"""The priority of requests that fill gaps. No other is less urgent, and none more than its opposite."""
MAX_NAME = 128  # characters
MAX_TRACE_STEPS = 10_000
PROTOCOL_VERSION = 18
MIXED = "mixed"  # as numerics of a namespace: its pages come from several classes of arithmetic
KEY_BYTES = 16
TOKEN_BYTES = 4
MAX_KEYS_PER_CALL = 1_024
MAX_STEP_SAMPLES = 16
MAX_RING = 8  # workers of a prompt
MAX_GRAMMAR = 128 * 2**10  # characters of a schema, a regular expression or a grammar

UNREADABLE = (ValueError, MsgspecError, RecursionError)
"""What decoding bytes that are no message raises; the last where they are nested deeper than Python's stack."""

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Key: TypeAlias = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
PackedKeys: TypeAlias = Annotated[bytes, Meta(max_length=MAX_KEYS_PER_CALL * KEY_BYTES)]
PackedTokens: TypeAlias = bytes
Period: TypeAlias = Annotated[int, Meta(ge=1, le=86_400_000)]  # milliseconds
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]  # bounded: no arithmetic with a peer's word overflows
Checksum: TypeAlias = Annotated[int, Meta(ge=0)]
Role: TypeAlias = Literal["router", "prefill", "decode", "store"]
WorkerRole: TypeAlias = Literal["prefill", "decode"]
FinishReason: TypeAlias = Literal["stop", "length"]
Medium: TypeAlias = Literal["GPU", "CPU", "DISK"]  # vLLM's names for the tiers device, host and disk
LowerTier: TypeAlias = Literal["disk", "remote"]  # from where a store brings pages into its arena


class Message(Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of every message: frozen, named on the wire by its class."""


M = TypeVar("M")


class Envelope(Struct, Generic[M], frozen=True, array_like=True):
    """What travels: a message with the incarnations of both ends. `sequence` counts the sender's messages to this
    peer from 1. A Hello is addressed to "" because its sender does not know the receiver's incarnation yet."""

    sender: str
    addressee: str
    sequence: Count
    message: M


# --- who is who ---------------------------------------------------------------------------------------------------


class Peer(Struct, frozen=True):
    """One process of the cluster. `name` is stable over restarts, `incarnation` is new with each."""

    role: Role
    name: Name
    node: Name
    incarnation: Name
    pid: Count


class Namespace(Struct, frozen=True):
    """What must agree before two processes may share pages: all that shapes a page's bytes besides its tokens."""

    model: Key  # digest of config and weights
    numerics: Name  # class of the arithmetic that made the page: one class, the same bits; or MIXED
    kv_dtype: str
    page_size: Annotated[int, Meta(ge=1)]
    layout: Count  # version of the page layout
    form: str  # of a page's bytes (`kvstore.layout`)
    kv_heads: Annotated[int, Meta(ge=1)]  # parts of a page that are hashed on their own
    adapter: str = ""
    quantization: str = ""  # of weights when they were loaded; the model's digest depends on it


def difference(theirs: Namespace, ours: Namespace) -> str:
    """Return in words what keeps a process from sharing our pages; "" if nothing does."""
    for name in ("kv_dtype", "quantization", *Namespace.__struct_fields__):  # the model's digest says less of them
        one, other = getattr(theirs, name), getattr(ours, name)
        if one == other:
            continue
        if name == "numerics":
            return (
                f"numerics is {one} and this cluster has {other}: their bits differ for the same input; run this "
                "worker with the same engine on the same kind of processor, or set model.numerics: mixed for all"
            )
        return f"namespace.{name} is {_shown(one)} and this cluster has {_shown(other)}"
    return ""


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


class StepSample(Struct, frozen=True, array_like=True):
    """What one step of an engine had to do, and how long it took. A sequence that gets a token is a row, and `context`
    counts the tokens of all rows; `tokens` are those of prompts, and `pairs` sums up over these how many positions each
    attends to, itself included."""

    tokens: Count
    pairs: Count
    rows: Count
    context: Count
    seconds: Seconds


StepSamples: TypeAlias = Annotated[tuple[StepSample, ...], Meta(max_length=MAX_STEP_SAMPLES)]


_UNLOADED = "unloaded"  # in place of a digest


class AdapterCard(Struct, frozen=True):
    """A LoRA adapter that a worker has loaded beside its model: the name that clients use, and in `digest` what it is.
    Messages and page keys say the digest."""

    name: Name
    digest: Name
    path: str = ""  # its directory, where a worker that joins finds it as well


class ModelCard(Struct, frozen=True):
    """What a worker found out about its model and pool while loading."""

    namespace: Namespace
    page_bytes: Count
    vocab_size: Count
    max_context: Count  # tokens
    pool_pages: Count
    steps: StepSamples = ()  # of a calibration: what is known of its speed before it has served anybody
    lm_head: bool = True  # it can generate tokens, so it may become a decode worker if it is none
    window_pages: Count = 0  # that a token attends to at most; 0: some layer of the model attends to all tokens
    adapters: tuple[AdapterCard, ...] = ()  # in the order of their names
    numerics: Name | None = None  # the worker's own, where that of the namespace is MIXED
    rings: bool = False  # it can compute chunks of a prompt beside other workers of its node (`RingPart`)

    @property
    def own_numerics(self) -> str:
        """The class of the worker's arithmetic."""
        return self.numerics or self.namespace.numerics

    @property
    def context_pages(self) -> int:
        """The pages of the longest context that a decode worker with this pool takes. Where every layer has a window,
        only those of the window need be there at a time."""
        if 0 < self.window_pages < self.pool_pages:
            return max(self.pool_pages, -(-self.max_context // self.namespace.page_size))
        return self.pool_pages

    def namespace_of(self, adapter: str) -> Namespace:
        """The namespace of pages that the model makes with the adapter of that name, "" for none. One that has been
        unloaded has a namespace in which no worker computes."""
        if not adapter:
            return self.namespace
        return replace(self.namespace, adapter={one.name: one.digest for one in self.adapters}.get(adapter, _UNLOADED))


class Hello(Message, frozen=True):
    """First words on every link to a router, and again whenever the router asks or has changed."""

    peer: Peer
    protocol: int = PROTOCOL_VERSION
    model: ModelCard | None = None  # none for a store
    events: str = ""  # ZMQ endpoint of its KV events,
    replay: str = ""  # and the one that sends missed batches again, or a snapshot
    metrics: str = ""  # host:port of its Prometheus page
    data: str = ""  # a store's ZMQ endpoint, where it serves pages to other stores


class Welcome(Message, frozen=True):
    """The router's answer to a Hello: from now on both send heartbeats."""

    router: Peer
    heartbeat_ms: Period
    heartbeat_timeout_ms: Period


class Rejected(Message, frozen=True):
    """The router's other answer: `reason` is an error's label, `message` what to do about it."""

    reason: str
    message: str


class RequestHello(Message, frozen=True):
    """The router heard from an incarnation it does not know: say Hello."""


class StartTrace(Message, frozen=True):
    """Write down where the time of the next `steps` goes; `mark` tells the file from others. See `baton.trace`."""

    mark: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,16}$")]
    steps: Annotated[int, Meta(ge=1, le=MAX_TRACE_STEPS)]


class StopTrace(Message, frozen=True):
    """End the trace of that mark now, and write down what there is of it."""

    mark: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,16}$")]


# --- heartbeats: state is truth ------------------------------------------------------------------------------------


class AttemptName(Struct, frozen=True, order=True):
    """The name of a piece of work."""

    request: Name
    attempt: Annotated[int, Meta(ge=1)]

    @property
    def parts(self) -> tuple[str, int]:
        """What messages about the attempt begin with."""
        return self.request, self.attempt


class AttemptHeld(Struct, frozen=True):
    """One attempt as its worker has it: `position` is how many tokens (prompt included) it knows, of which `computed`
    have their keys and values. `short`: its fetch ended short, as FetchIncomplete says, and it waits for the router."""

    request: Name
    attempt: Annotated[int, Meta(ge=1)]
    position: Count
    ended: bool = False
    computed: Count = 0
    incomplete: bool = False


class TierSpeed(Struct, frozen=True):
    """How fast a tier brings pages into the arena: seconds until the first, bytes per second from then on.
    `measured` is False where these are the defaults of `kvstore.load_or_recompute`."""

    tier: LowerTier
    latency: Seconds
    bytes_per_second: Annotated[float, Meta(ge=1e-3, le=1e15)]
    measured: bool = False


class LoadReport(Struct, frozen=True):
    """How busy a process is, and how fast. For a store, pages are arena slots and `tiers` are below it. A worker
    tells its prefill rate (0: not measured yet), and the size and time of its last steps, oldest first. The last of
    them is the heartbeat's `step`, so a receiver that remembers the one before knows which are new."""

    running: Count = 0
    waiting: Count = 0
    pages_free: Count = 0
    pages_total: Count = 0
    tokens_queued: Count = 0
    prefill_rate: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # tokens per second
    tiers: tuple[TierSpeed, ...] = ()
    context: Count = 0  # tokens of all that run
    steps: StepSamples = ()


class Heartbeat(Message, frozen=True):
    """A worker's or store's full state. `heard` is the last router sequence that this state already reflects, so the
    router never judges an attempt missing that the worker could not know of yet. `step_age_ms` is the age of the step
    that runs, `loop_age_ms` the time since the main loop last turned: both grow when the sender is stuck.
    A store lists its pins as attempts, each with the number of its pages that are still here as position.

    Attempts and pins are those that this router owns; `load` is of all work, and `others` what other routers' makes of
    it: what this one has ordered it knows sooner than any heartbeat."""

    heard: Count
    load: LoadReport
    step: Count = 0
    step_age_ms: Count = 0
    loop_age_ms: Count = 0
    attempts: tuple[AttemptHeld, ...] = ()
    events: Count = 0  # the sequence of its last batch of KV events,
    digest: Checksum = 0  # and the digest of all that it held then: see `kvstore.events.changes`
    others: LoadReport = LoadReport()  # running, waiting, tokens_queued and context
    tracing: str = ""  # the mark of the trace that this process makes or writes; none: it may be asked for one


class RouterHeartbeat(Message, frozen=True):
    """Every attempt of this router that it believes this worker has. What is its own and not listed is dropped."""

    attempts: tuple[AttemptName, ...] = ()


class AttemptMessage(Message, frozen=True):
    """Base of all messages about one attempt."""

    request: Name
    attempt: Annotated[int, Meta(ge=1)]


# --- router → workers ----------------------------------------------------------------------------------------------


class LogitsRules(Struct, frozen=True, omit_defaults=True):
    """How logits are changed before a token is drawn. `bad_words` are token sequences that may not come. Of
    `allowed_token_ids` every token must be, unless there are none."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    logit_bias: tuple[tuple[Count, float], ...] = ()
    min_tokens: Count = 0
    bad_words: tuple[tuple[Count, ...], ...] = ()
    allowed_token_ids: tuple[Count, ...] = ()

    def wrong(self, vocab_size: int | None) -> str:
        """What is wrong with the rules for a vocabulary of that size; "": nothing."""
        if not all(self.bad_words):
            return "a bad word has no tokens"
        biased = [token for token, _ in self.logit_bias]
        named = max([*biased, *self.allowed_token_ids, *(max(word) for word in self.bad_words)], default=0)
        if vocab_size is not None and named >= vocab_size:
            return f"the rules name token {named}, and the vocabulary ends at {vocab_size - 1}"
        return ""


class Grammar(Struct, frozen=True, omit_defaults=True):
    """A grammar that the output must match from its first token on: a JSON schema, a regular expression or a grammar in
    llguidance's Lark. `eos` is an end-of-sequence token that the tokenizer has. The tokens in `Decode.stop_token_ids`
    may come where the grammar accepts an end; with `ignore_eos`, only where it accepts nothing else. A `frame` is a
    grammar in Lark around it, such as for reasoning, which calls it `@output`."""

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR)]
    eos: Count
    ignore_eos: bool = False
    frame: Annotated[str, Meta(max_length=MAX_GRAMMAR)] = ""


class DrawParams(Struct, frozen=True):
    """By which numbers a token is drawn. `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 filter
    nothing."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Count = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0


class SamplingParams(DrawParams, frozen=True):
    """How tokens are drawn. `logprobs` counts the alternatives reported with each token, none for no report; without
    `rules` the logits stay as they are; without `grammar` any token may come."""

    seed: Count = 0
    logprobs: Annotated[int, Meta(ge=0, le=128)] | None = None  # clients get 20 at most, a beam search more
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # the same for each token of the prompt
    rules: LogitsRules | None = None
    grammar: Grammar | None = None


class KvCompression(Struct, frozen=True, forbid_unknown_fields=True):
    """How the K and V of a sequence are kept small. "window": tokens of the output attend to the first `sinks` tokens
    and to the last `window`, both in whole pages (`kvstore.kv_window`). "snapkv": beside them to `keep` tokens of the
    prompt, those pages to which its last tokens attend most. "h2o": these are chosen again each time the output has
    grown by `window` tokens, of what they were and of what the window leaves. Without any it is a window."""

    kind: Literal["window", "snapkv", "h2o"]
    window: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    sinks: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 4
    keep: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0


class PageSource(Struct, frozen=True):
    """A store of another node to get pages from. It is believed to have, or to be about to have, the first `pages` of
    the chain at hand; `endpoint` is where it serves pages (`Hello.data`)."""

    store: Name  # incarnation
    endpoint: str
    pages: Count


class Decode(AttemptMessage, frozen=True):
    """Generate from `tokens`, of which the first `prompt` are the prompt; the rest were generated by earlier attempts.

    The pages `[own device's, fetch)` come from the node's store, which gets those that it lacks from its disk or from
    the `sources`; the worker computes everything after them. They are full pages of all but the last token; where they
    are awaited, the last may be the partial page after those. `fetch` 0 is decode-local prefill."""

    root: Key
    tokens: PackedTokens
    prompt: Annotated[int, Meta(ge=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    fetch: Count = 0  # pages
    prefilled_remotely: bool = False  # some of the pages to fetch are only being made: wait for them
    sources: tuple[PageSource, ...] = ()  # in the order in which to ask them
    priority: int = 0  # lower is more urgent
    deadline_ms: Count | None = None
    adapter: str = ""  # digest of the LoRA adapter to compute with; "": the plain model
    kv_compression: KvCompression | None = None  # none: every token attends to all before it


class RingPart(Struct, frozen=True):
    """What a worker does of a prompt that several of its node compute at a time, chunk by chunk, layer behind layer
    (`engine.step.ring`). The worker at place 0 computes the last chunk and seals all pages. The others only help."""

    first: Count  # page with which the first chunk begins; those before it are cached
    pages: Annotated[int, Meta(ge=1, le=MAX_KEYS_PER_CALL)]  # of a chunk
    place: Annotated[int, Meta(ge=0, le=MAX_RING - 1)]
    workers: Annotated[int, Meta(ge=2, le=MAX_RING)]


class Prefill(AttemptMessage, frozen=True):
    """Make every page of `tokens`, at least one full one, sealed and held in this worker's node store. Tokens at the
    end that fill no page are a partial one. A prefill worker never samples. With a `ring` others compute a part of it,
    as long as nothing comes between."""

    root: Key
    tokens: PackedTokens
    sources: tuple[PageSource, ...] = ()  # of pages that are cached elsewhere, in the order in which to ask them
    priority: int = 0
    deadline_ms: Count | None = None
    adapter: str = ""  # as in Decode
    ring: RingPart | None = None


class Cancel(AttemptMessage, frozen=True):
    """Forget this attempt, running or ended, and free what it holds."""


class Resend(AttemptMessage, frozen=True):
    """Say again every token of this attempt from `position` on. Within the prompt: its log-probabilities from there."""

    position: Count


class ChangeRole(Message, frozen=True):
    """Take the other role from now on: a new incarnation around the same loaded model. All work of this incarnation,
    of every router, is dropped, and messages on their way to it are lost."""

    role: WorkerRole


class LoadWeights(Message, frozen=True):
    """Replace the weights by those of the checkpoint at the absolute `path`: a new incarnation around them, with other
    page keys. All work of this incarnation, of every router, is dropped, and messages on their way to it are lost."""

    path: str


class LoadAdapter(Message, frozen=True):
    """Load a LoRA adapter beside the model. Its digest must be `digest`, unless that is empty. The answer is a Hello
    that lists it, or AdapterFailed."""

    name: Name
    path: str
    digest: str = ""


class UnloadAdapter(Message, frozen=True):
    """Take no more orders for a LoRA adapter, and remove it once none needs it. The answer is a Hello without it."""

    name: Name


# --- workers → router ----------------------------------------------------------------------------------------------


class Accepted(AttemptMessage, frozen=True):
    """Device pages for the prompt are reserved; `device` of its full pages were on this worker's device already."""

    device: Count = 0


class Refused(AttemptMessage, frozen=True):
    """This worker does not take the attempt: `busy` may pass, `too_large` never will."""

    reason: Literal["busy", "too_large"]
    message: str = ""


class FetchIncomplete(AttemptMessage, frozen=True):
    """A fetch ended short: only the first `pages` pages are here, the others are not coming."""

    pages: Count
    message: str = ""


class Started(AttemptMessage, frozen=True):
    """The prompt is covered and the sequence has joined the batch. Counts are of prompt pages and tokens."""

    device_pages: Count = 0
    fetched_pages: Count = 0
    predicted_ms: Count = 0  # how long loading the cached ones of these was to take
    load_ms: Count = 0  # and how long it took


class TokenLogprob(Struct, frozen=True, array_like=True):
    """One token's log-probability under the unscaled distribution, and its likeliest alternatives."""

    token: Count
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptTokenLogprob(TokenLogprob, frozen=True, array_like=True):
    """The same of a prompt's token, and its place among all tokens, 1 for the likeliest."""

    rank: Count = 1


class Delta(Struct, frozen=True, omit_defaults=True):
    """New tokens of one attempt; the first stands at `position` (prompt tokens counted). With `finish` it ends."""

    request: Name
    attempt: Annotated[int, Meta(ge=1)]
    position: Count
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    computed: Count = 0  # prompt tokens that this worker computed itself; said with the first delta of an attempt
    verified: Count = 0  # proposals of this attempt so far that steps have verified
    accepted: Count = 0  # and of those the right ones
    saved: float = 0.0  # seconds by which speculation has brought its output forward so far; negative: held it up
    chosen: tuple[Count, ...] = ()  # pages of the prompt by `KvCompression.keep`; said with the first delta


class Tokens(Message, frozen=True):
    """What one step produced for the whole batch."""

    step: Count
    deltas: tuple[Delta, ...]


class PromptLogprobs(AttemptMessage, frozen=True):
    """Log-probabilities of prompt tokens, computed by the decode worker itself. The first is that of the token at
    `position`, at least 1: nothing precedes the first token. All of them come before the attempt's first Delta."""

    position: Annotated[int, Meta(ge=1)]
    logprobs: tuple[PromptTokenLogprob, ...]


class Prefilled(AttemptMessage, frozen=True):
    """Every page asked for is sealed and held. Tokens computed, pages that were here already, pages written."""

    computed: Count  # tokens
    hit: Count  # pages found in the store or on the device
    stored: Count  # pages written to the store
    queue_ms: Count = 0
    compute_ms: Count = 0
    predicted_ms: Count = 0  # how long loading cached pages from lower tiers was to take
    load_ms: Count = 0  # and how long it took


class AttemptFailed(AttemptMessage, frozen=True):
    """The worker could not do it: `reason` is an error's label. The router decides whether to try again."""

    reason: str
    message: str


class AdapterFailed(Message, frozen=True):
    """A LoRA adapter could not be loaded; `reason` is an error's label."""

    name: Name
    reason: str
    message: str


class WorkerDied(Message, frozen=True):
    """A store's word that a worker of its node is gone: the kernel told it so, within a millisecond (pidfd)."""

    incarnation: Name
    pid: Count


# --- pins -------------------------------------------------------------------------------------------------------------


class PinPages(Message, frozen=True):
    """Keep these pages, a chain from its start, for `ttl_ms`, on the account of `tenant`. `pin` names it; a second
    PinPages of that name replaces the first."""

    pin: Name
    tenant: str
    keys: Annotated[bytes, Meta(max_length=2**22)]
    ttl_ms: Annotated[int, Meta(ge=1)]


class UnpinPages(Message, frozen=True):
    """End a pin before its time."""

    pin: Name


class PagesPinned(Message, frozen=True):
    """The answer to PinPages: these pages are kept. With a `reason` none are: `missing`, only the first `pages` are
    here; `quota`, they are more than this tenant may pin."""

    pin: Name
    pages: Count
    reason: Literal["", "missing", "quota"] = ""


# --- KV snapshots: how the prefix map heals ---------------------------------------------------------------------------


class SnapshotRequest(Message, frozen=True):
    """A follower's copy of this holder's pages has a gap, or never existed."""


class PageSegment(Struct, frozen=True, array_like=True):
    """Consecutive pages of one chain, oldest first; `parent` is empty where the chain starts."""

    parent: bytes
    keys: PackedKeys
    medium: Medium


class Snapshot(Message, frozen=True):
    """Every page held once the event numbered `sequence` had happened; parents stand before their children.
    A large one comes in parts, of which only the last says `last`."""

    sequence: Count
    runs: tuple[PageSegment, ...]
    part: Count = 0
    last: bool = True


# --- one union per direction ------------------------------------------------------------------------------------------

ToAny: TypeAlias = Welcome | Rejected | RequestHello | RouterHeartbeat | StartTrace | StopTrace
ToDecode: TypeAlias = ToAny | Decode | Cancel | Resend | ChangeRole | LoadWeights | LoadAdapter | UnloadAdapter
ToPrefill: TypeAlias = ToAny | Prefill | Cancel | ChangeRole | LoadWeights | LoadAdapter | UnloadAdapter
ToStore: TypeAlias = ToAny | PinPages | UnpinPages
FromDecode: TypeAlias = (
    Hello
    | Heartbeat
    | Accepted
    | Refused
    | FetchIncomplete
    | Started
    | PromptLogprobs
    | Tokens
    | AttemptFailed
    | AdapterFailed
)
FromPrefill: TypeAlias = Hello | Heartbeat | Refused | Prefilled | AttemptFailed | AdapterFailed
FromStore: TypeAlias = Hello | Heartbeat | WorkerDied | PagesPinned
ToRouter: TypeAlias = (
    Hello
    | Heartbeat
    | WorkerDied
    | PagesPinned
    | Accepted
    | Refused
    | FetchIncomplete
    | Started
    | PromptLogprobs
    | Tokens
    | Prefilled
    | AttemptFailed
    | AdapterFailed
)  # a router hears all three on one socket
ToPublisher: TypeAlias = SnapshotRequest
FromPublisher: TypeAlias = Snapshot
