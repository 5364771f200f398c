"""One attempt at one request, as the decode worker has it.

                        Decode
                          │ pages reserved → Accepted
                          ▼         a prefill worker's pages don't come → FetchIncomplete
        ┌──▶ WAITING_FOR_REMOTE_KVS ─────────────────────────────────▶ KV_LOAD_INCOMPLETE
        │                 │ every fetched page counts, or none was to be fetched   │
    resumed               ▼                                                  Cancel, or the
        │              RUNNING ── stop token, max_tokens ─▶ ENDED ── Cancel ──▶ next attempt
        │                 │                                                        ▼
        └── PREEMPTED ◀───┘ pages ran out                                     (forgotten)

A sequence in any phase is forgotten by Cancel, by a newer attempt of its request, by a heartbeat of its router that
doesn't list it, and with its router. To other routers it is load, and nothing else.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from baton import messages as msg
from decode_worker.proposers import Proposer
from decode_worker.sliding_window import SlidingWindow
from engine.sampling.logits_rules import LogitsEditor
from engine.sampling.token_masks import OutputGrammar
from engine.step.batch import Chunk, PromptScoring, Sampled, TokenDraw
from engine.step.block_table import BlockTable
from kvstore.client.transfer import PageFetch
from kvstore.keys import cacheable_pages, pack_tokens, page_keys, partial_key, split_keys
from kvstore.kv_window import KvWindow
from kvstore.load_or_recompute import LoadInProgress
from kvstore.window_groups import NO_GROUPS, WindowGroups


class SequencePhase(Enum):
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    KV_LOAD_INCOMPLETE = "kv_load_incomplete"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


class ChunkUnderWay(NamedTuple):
    """A chunk of the step that runs, and its number there."""

    chunk: Chunk
    number: int


@dataclass
class Proposals:
    """What is guessed of a sequence, and what came of it."""

    proposer: Proposer | None
    rights: list[float]  # probabilities that a guess is right: of the proposer, and of the drafter
    drafted: bool = False  # the guess is the drafter's
    guess: Items[int] = ()  # how it goes on, until its next draw
    verified: int = 0  # proposals
    accepted: int = 0
    saved: float = 0.0  # seconds


@dataclass
class Sequence:
    """Tokens, device pages and progress of one attempt."""

    name: msg.AttemptName
    root: bytes
    tokens: list[int]
    prompt: int  # how many of the tokens are the prompt
    max_tokens: int  # output tokens over all attempts
    sampling: msg.SamplingParams
    stop_token_ids: frozenset[int]
    priority_time: float  # seconds: when its request came here, later by `decode.ageing_ms` for each level of priority
    priority: int
    arrival: int  # order of arrival at this worker
    page_size: int
    window: SlidingWindow | None = None  # that every layer of the model has
    groups: WindowGroups = NO_GROUPS  # whose layers have one
    kv_window: KvWindow | None = None  # that its request asks for
    adapter: str = ""  # digest of the LoRA adapter that it is computed with
    owner: str = ""  # incarnation of the router that ordered it
    deadline: float | None = None
    phase: SequencePhase = SequencePhase.WAITING_FOR_REMOTE_KVS
    pages: BlockTable = field(default_factory=BlockTable)  # given back and reserved again as another table
    window_pages: BlockTable = field(default_factory=BlockTable)  # of the groups with a window
    in_limbo: list[int] = field(default_factory=list[int])  # of these, those that no step may write to yet
    keys: list[bytes] = field(default_factory=list[bytes])  # of the full pages of `tokens`
    known_at_first: int = 0  # tokens known when pages were last reserved
    in_parts: bool = False  # it was given pages for a part of these only
    apart: bool = False  # those that it keeps behind its sinks are copies, which no other sequence knows
    computed: int = 0  # tokens from the start whose K and V lie in `pages`
    copied: int = 0  # of these, the last ones, which came with a copy of another sequence's page
    cached_pages: int = 0  # pages from the start that this sequence has handed to the device cache
    stored_pages: int = 0  # pages from the start that need no write-through any more
    branch: int = 0  # pages from the start that were to be fetched: another prompt may go on behind them
    # write-through goes on; false once the store refused a page, since its children are orphans
    writes_through: bool = True
    device_pages: int = 0  # prompt pages found on the device
    fetched_pages: int = 0  # prompt pages that came from the store
    fetch: PageFetch | None = None
    prefilled_remotely: bool = False  # a prefill worker makes the pages to fetch
    fetch_goal: int = 0  # how many pages that is
    sources: tuple[msg.PageSource, ...] = ()  # other stores to get them from
    loading: LoadInProgress | None = None  # what the store was asked to bring from lower tiers
    loaded_from: int = 0  # page of the fetch from which on that was
    progressed_at: float = 0.0  # when the fetch last went on
    running_since: float = 0.0  # when it last began to run
    remaining_prefill: int = 0  # tokens that were to be computed then
    last_step: int = 0  # number of the last step that it was part of
    under_way: ChunkUnderWay | None = None  # what of it runs while the next step is planned
    prompt_computed: int = 0  # prompt tokens computed by this attempt
    draw: TokenDraw | None = None  # of every token, before the rules that depend on those before it
    logits_editor: LogitsEditor | None = None
    grammar: OutputGrammar | None = None
    first_new: int = 0  # tokens known when the attempt began
    logprobs: list[msg.TokenLogprob] = field(default_factory=list[msg.TokenLogprob])  # of tokens[first_new:]
    prompt_logprobs: list[msg.PromptTokenLogprob] = field(default_factory=list[msg.PromptTokenLogprob])  # of tokens[1:]
    page_weights: list[Items[float]] = field(default_factory=list[Items[float]])  # of the tokens observed so far
    proposals: Proposals | None = None
    finish: msg.FinishReason | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def pending(self) -> int:
        """Tokens known but not computed; the last of them yields the next token."""
        return len(self.tokens) - self.computed

    @property
    def unscored(self) -> int:
        """Prompt tokens whose log-probabilities are still to be computed: those at the end of the prompt."""
        return 0 if self.sampling.prompt_logprobs is None else self.prompt - 1 - len(self.prompt_logprobs)

    @property
    def unobserved(self) -> int:
        """Tokens that are still to be observed before the next choice of pages."""
        if self.kv_window is None:
            return 0
        return self.kv_window.observed_until - self.kv_window.observed_from - len(self.page_weights)

    @property
    def next_observed(self) -> int:
        """The next token to be observed, if there are any."""
        return 0 if self.kv_window is None else self.kv_window.observed_until - self.unobserved

    def observed(self, end: int) -> int:
        """How many tokens of a chunk up to the token before `end` are to be observed, its last ones."""
        return max(0, end - self.next_observed) if self.unobserved else 0

    def observe(self, weights: Items[Items[float]]) -> None:
        """Take what tokens attend to, those after the last observed one."""
        self.page_weights += weights

    def choose_pages(self, computed: int) -> None:
        """So many tokens are computed. If all that are to be observed were, choose pages. The last one is computed
        twice where a mask is late, and attends to the same both times."""
        own = self.kv_window
        if own is not None and self.page_weights and not self.unobserved and computed >= own.observed_until:
            self.kv_window, self.page_weights = own.choose(self.page_weights), []

    def forget_choices(self) -> None:
        """It is computed again. Its tokens attend to the pages that were chosen before each."""
        if self.kv_window is not None and self.kv_window.again:
            self.kv_window, self.page_weights = self.kv_window.anew(), []

    @property
    def chunk_limit(self) -> int:
        """The most tokens that one chunk may hold. With states none goes beyond a page. Where a prompt is scored, its
        last token is a step of its own.

        It scores nothing. Without it, the rows of a step are those that transformers runs to score the same prompt, so
        that equal kernels give equal bits.
        """
        most = self.prompt - 1 - self.next_start if self.unscored else self.next_pending
        if self.unobserved:  # tokens of the output attend to what is chosen then
            most = min(most, self.next_observed + self.unobserved - self.next_start)
        return self.groups.longest_chunk(self.next_start, most)

    def scoring(self, end: int) -> PromptScoring | None:
        """What a chunk up to the token before `end` scores."""
        if (top := self.sampling.prompt_logprobs) is None:
            return None
        known = len(self.prompt_logprobs)
        targets = self.tokens[known + 1 : min(end + 1, self.prompt)]
        return PromptScoring(known - self.next_start, targets, top) if targets else None

    @property
    def steps(self) -> bool:
        """Whether it runs, and may be in the next step: one that follows a grammar waits until that is compiled."""
        ready = not self.in_limbo and (self.grammar is None or self.grammar.ready)
        goes_on = self.under_way is None or not (self.draws_its_last or self.needs_its_token)
        return self.phase is SequencePhase.RUNNING and ready and goes_on

    def counts(self, chunk: Chunk) -> bool:
        """Whether a chunk of this sequence that has run adds to it: it was planned with the pages that the sequence has
        now, and starts where its computed tokens end. One that was launched ahead starts too far if the chunk before
        it drew no token."""
        return chunk.pages is self.pages and chunk.start == self.computed

    # While a step runs, the next one is planned for what its end is going to make of the sequences. If nothing runs,
    # that is what they are.

    @property
    def next_start(self) -> int:
        """Where the next chunk begins: tokens that are computed by then."""
        return self.computed if self.under_way is None else self.under_way.chunk.end

    @property
    def next_known(self) -> int:
        """Tokens known by then, the one that is being drawn among them."""
        known = len(self.tokens)
        return known if self.under_way is None else max(known, self.under_way.chunk.end + 1)

    @property
    def next_pending(self) -> int:
        """Tokens known by then and not computed."""
        return len(self.tokens) - self.computed if self.under_way is None else self.next_known - self.next_start

    @property
    def draws_its_last(self) -> bool:
        """Whether `max_tokens` is reached by the token that is being drawn."""
        drawing = self.under_way is not None and self.under_way.chunk.sample is not None
        return drawing and self.next_known - self.prompt >= self.max_tokens

    @property
    def must_be_awaited(self) -> bool:
        """Whether the step after the one that runs can't be planned before that has ended. A prompt's scores say where
        the next chunk ends, and a sequence in parts gives pages back first."""
        if self.under_way is None or self.draws_its_last:
            return False
        chunk = self.under_way.chunk
        return self.in_parts or chunk.scoring is not None or chunk.observed > 0

    @property
    def needs_its_token(self) -> bool:
        """Whether the token that is being drawn must be known before its next chunk is planned: a grammar's mask and
        the rules for logits follow from it. Such a sequence is in no step ahead."""
        drawing = self.under_way is not None and self.under_way.chunk.sample is not None
        ruled = self.grammar is not None or self.logits_editor is not None
        return drawing and ruled and not self.draws_its_last

    @property
    def awaits_a_slow_mask(self) -> bool:
        """Whether the token that is being drawn waits for a mask of a grammar whose last one took long."""
        mask = None if (draw := self.under_way and self.under_way.chunk.sample) is None else draw.mask
        return mask is not None and mask.slow and not mask.ready

    @property
    def rank(self) -> tuple[float, int]:
        """Order of service, of resumption and, backwards, of preemption: urgent first, then oldest first. It never
        changes, and a request is only ever overtaken by those that come within `decode.ageing_ms` for each level of
        priority between them."""
        return (self.priority_time, self.arrival)

    @property
    def pages_needed(self) -> int:
        """Device pages that all known tokens take."""
        return -(-len(self.tokens) // self.page_size)

    @property
    def exceeds_pool(self) -> bool:
        """Whether all its tokens may take more pages than there are; only its window's need be there."""
        return self.window is not None and self.total_pages > self.window.num_pages

    @property
    def total_pages(self) -> int:
        """Pages that prompt and output may take in the end, or at a time if it has a window of its own."""
        pages = -(-(self.prompt + self.max_tokens) // self.page_size)
        return pages if self.kv_window is None else min(pages, self.kv_window.most)

    @property
    def must_be_in_parts(self) -> bool:
        """Whether pages for all known tokens would leave too few for what follows."""
        return self.window is not None and self.window.in_parts(self.pages_needed, self.total_pages)

    def reservation(self) -> tuple[Items[bytes], int]:
        """The keys of the cached pages that it begins with, and how many pages it needs in all to begin."""
        if self.window is not None and self.must_be_in_parts:
            return (), min(self.pages_needed, self.window.part)
        needed = self.pages_needed
        return self.reusable_keys(), needed if self.kv_window is None else min(needed, self.kv_window.most)

    @property
    def coming(self) -> int:
        """Full pages that a prefill worker makes, and all before them: it begins behind these, or not at all."""
        return min(self.fetch_goal, len(self.reusable_keys())) if self.prefilled_remotely else 0

    @property
    def table_pages(self) -> int:
        """How far its table should reach: to the end of the known tokens, or of the part."""
        if self.in_parts and self.window is not None:
            return min(self.pages_needed, self.window.first_page(self.computed) + self.window.part)
        pages = -(-self.next_known // self.page_size)
        return pages if self.kv_window is None else min(pages, self.kv_window.reach(self.computed, self.apart))

    @property
    def computable(self) -> int:
        """Tokens from the next one on that there are pages for."""
        return min(self.next_known, len(self.pages) * self.page_size) - self.next_start

    @property
    def cacheable(self) -> int:
        """Pages from the start that may be cached on the device, once they are full. A cached page keeps all before it
        in the cache, so none is cached that would let a context which is larger than the pool grow there."""
        if self.in_parts or self.cached_pages < self.pages.first:
            return 0
        if self.kv_window is None and (self.pages.first or self.exceeds_pool):
            return min(self.computed, self.known_at_first) // self.page_size
        return min(self.computed, self.exact) // self.page_size

    @property
    def attended(self) -> int:
        """Known tokens that the next one attends to."""
        known = len(self.tokens)
        return known if self.kv_window is None else known - self.kv_window.gap(known) * self.page_size

    @property
    def exact(self) -> int:
        """Known tokens whose K and V are those of the whole context: others may have their pages."""
        known = len(self.tokens)
        return known if self.kv_window is None else min(known, self.kv_window.exact)

    def append(self, drawn: Items[Sampled]) -> None:
        """Take what was drawn, up to the token that ends the sequence."""
        for each in drawn:
            self.tokens.append(each.token)
            if each.logprob is not None:
                self.logprobs.append(msg.TokenLogprob(each.token, each.logprob, each.top))
            if each.token in self.stop_token_ids:
                self.finish = "stop"
            elif self.generated >= self.max_tokens:
                self.finish = "length"
            if self.finish is not None:
                break
        self.extend_keys()

    def delta(self, position: int) -> msg.Delta:
        """What its router is told of the tokens from `position` on, which this attempt has drawn."""
        computed = self.prompt_computed if position == self.first_new else 0
        tokens, logprobs = tuple(self.tokens[position:]), tuple(self.logprobs[position - self.first_new :])
        counts = (0, 0, 0.0) if (own := self.proposals) is None else (own.verified, own.accepted, own.saved)
        chosen = () if self.kv_window is None or position > self.first_new else self.kv_window.chosen
        name = self.name
        return msg.Delta(name.request, name.attempt, position, tokens, logprobs, self.finish, computed, *counts, chosen)

    def extend_keys(self) -> None:
        """Derive the keys of the exact pages that have filled up since."""
        known = len(self.keys)
        full = self.exact // self.page_size
        if full > known:
            new = pack_tokens(self.tokens[known * self.page_size : full * self.page_size])
            self.keys += split_keys(page_keys(self.chain_before(known), new, self.page_size))

    def parent_of(self, page: int) -> bytes:
        """Key of the page before `page`, empty at the start of the chain."""
        return self.keys[page - 1] if page else b""

    def chain_before(self, page: int) -> bytes:
        """Key of the page before `page`, the root at the start of the chain."""
        return self.keys[page - 1] if page else self.root

    def reusable_keys(self) -> Items[bytes]:
        """Keys of the pages that may come from elsewhere: the last token must be computed to sample from it, and every
        token that is to be observed, or before one that is to be scored."""
        pages = cacheable_pages(len(self.tokens), self.page_size)
        if self.unobserved:
            pages = min(pages, self.next_observed // self.page_size)
        if self.unscored:
            pages = min(pages, len(self.prompt_logprobs) // self.page_size)
        return self.keys[:pages]

    def partial_key(self, length: int) -> bytes:
        """The key of the page that ends after the first `length` tokens; empty if that page is full then, or empty."""
        full = length // self.page_size
        rest = self.tokens[full * self.page_size : length]
        return partial_key(self.chain_before(full), pack_tokens(rest)) if rest else b""

    def fetchable_keys(self) -> list[bytes]:
        """Those, and that of the partial page after them where a prefill worker makes it."""
        keys = [*self.reusable_keys()]
        length = len(self.tokens) - 1
        if (
            self.prefilled_remotely
            and length <= self.exact
            and not self.unobserved
            and (rest := self.partial_key(length))
        ):
            keys.append(rest)
        return keys

    def held(self) -> msg.AttemptHeld:
        ended = self.phase is SequencePhase.ENDED
        short = self.phase is SequencePhase.KV_LOAD_INCOMPLETE
        return msg.AttemptHeld(self.name.request, self.name.attempt, len(self.tokens), ended, self.computed, short)
