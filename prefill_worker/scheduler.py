"""What a prefill worker knows and decides: which prompts it takes, what it computes next, what it ships and holds.

Pure: the worker's loop carries out the commands, the copies and the plan. Events may come while a step or copies are
under way. A device page given back then is in limbo until these have ended (`kvstore.client.device_block_manager`).
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from baton import messages as msg
from baton.attempt_table import AttemptTable
from baton.clock import Tick
from baton.config import PrefillConfig
from baton.errors import BatonError, MalformedMessage, ModelMismatch, StoreError, StoreGone
from baton.membership import RouterLost, SendToRouter
from baton.router_fairness import RouterFairness
from baton.store_protocol import NotReserved, Reserved, StoreCall, StoreReply
from baton.waits import WaitEdge
from engine.step.block_table import BlockTable
from engine.step.limit import StepLimit
from engine.step.outcome import ScheduledBatch, StepDone, StepFailed, StepLaunched, StepOutOfMemory
from engine.step.recomputation import NAME, ComparePages, PagesCompared, Recomputation
from engine.step.timing import WorkerStepTimes, sample_of
from kvstore.arena.shared_slots import LeaveRing
from kvstore.client.device_block_manager import FEWEST_COPIED, DeviceBlockManager, DuplicatePage
from kvstore.client.refill import StoreRefill
from kvstore.client.transfer import (
    CallStore,
    CopiedIn,
    CopiedOut,
    Copy,
    CopyQueue,
    PageFetch,
    PrefixLookup,
    StoreLost,
    StorePages,
    StoreUp,
    TransferEvent,
)
from kvstore.keys import pack_tokens, prompt_keys, unpack_tokens
from kvstore.load_or_recompute import LoadInProgress, LoadRegret, choose_load_length
from kvstore.window_groups import NO_GROUPS, WindowGroups
from prefill_worker import shared_prefix
from prefill_worker.chunking import build_batch
from prefill_worker.last_chunk import CopyRate
from prefill_worker.prefill_request import PrefillPhase, PrefillRequest
from prefill_worker.ring import JOIN, Ring

_SLOTS_AGAIN = 0.02  # seconds until a full store is asked again
_PATIENCE = 0.05  # of a step's time, at most waited for the store before it
_SHORT = 0.5  # of a step's time: behind a step that is shorter, the next one is launched ahead


PrefillCommand: TypeAlias = SendToRouter | CallStore | DuplicatePage | ComparePages | LeaveRing
PrefillEvent: TypeAlias = (
    msg.Prefill | msg.Cancel | msg.RouterHeartbeat | StoreReply | CopiedIn | CopiedOut | StoreUp | StoreLost
    | RouterLost | Tick | StepLaunched | StepDone | StepOutOfMemory | StepFailed | PagesCompared
)  # fmt: skip


@dataclass(frozen=True)
class PrefillStats:
    """Counts since the start, and the present size of things."""

    running: int
    waiting: int  # of these, those that wait for pages which another prompt is making
    holding: int  # prompts that are done and whose pages we still hold
    pages_free: int
    pages_total: int
    tokens_computed: int
    tokens_copied: int  # that came with copies of pages which begin with them
    pages_hit: int
    pages_hit_in_store: int  # of these, those that the store had; the device had the others
    pages_stored: int
    pages_refilled: int  # of those that were cached when a store came up, those written to it
    pages_recomputed: int
    pages_differing: int
    load_regret: Mapping[msg.LowerTier, float]  # seconds lost to loads that took longer than computing would have


class PrefillScheduler:
    """The prompts of one prefill worker and the device pages they own."""

    def __init__(
        self,
        config: PrefillConfig,
        page_size: int,
        num_pages: int,
        *,
        event_tokens: bool = False,
        calibration: Sequence[msg.StepSample] = (),
        vocab_size: int | None = None,
        copies_overlap: bool = False,
        groups: WindowGroups = NO_GROUPS,
        adapters: Collection[str] = (),
        recompute_share: float = 0.0,
        fixed_borders: bool = False,
        rings: bool = False,
    ) -> None:
        """`calibration`: steps that were run before there was any work. `vocab_size`, where known: a token id of an
        order must be lower, because it would fail the whole step. `copies_overlap`: copies are made beside steps.
        `groups`: those of the model's layers that attend to a window. `adapters`: digests of those that orders may
        name. `recompute_share`: part of the pages that is checked. `fixed_borders`: see `engine.runner.Runner`; no
        prompt begins in the middle of a page. `rings`: a prompt may be computed beside other workers."""
        self._config = config
        self._fixed_borders = fixed_borders
        self._rings = rings
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._page_size = page_size
        self._num_pages = num_pages
        self._groups = groups
        self._blocks = DeviceBlockManager(num_pages, tell_tokens=event_tokens)
        self._requests = AttemptTable[PrefillRequest]()
        self._owners: dict[int, PrefillRequest] = {}  # by lease
        self._fairness = RouterFairness()
        self._copies = CopyQueue(self._blocks)
        self._leases = itertools.count(1)
        self._refill = StoreRefill(self._blocks, self._leases)
        self._recomputation = Recomputation(self._blocks, self._leases, page_size, recompute_share)
        self._window = msg.MAX_KEYS_PER_CALL  # pages of a write, at most
        self._slots = 0  # of the arena; 0 without a store
        self._page_bytes = 0
        self._step_limit = StepLimit(config.max_num_batched_tokens, page_size)
        self._step_costs = WorkerStepTimes(calibration)
        self._copy_rate = CopyRate() if copies_overlap else None
        self._planned = 0.0  # when the step that runs was planned, seconds
        self._last_launched: ScheduledBatch | None = None  # while it runs, where a step may be launched ahead
        self._regret = LoadRegret()
        self._step = 0
        self._computed = self._copied = self._hit = self._hit_in_store = self._pages_stored = 0

    # --- events -------------------------------------------------------------------------------------------------

    def handle(self, event: PrefillEvent, now: float, router: str = "") -> list[PrefillCommand]:
        """Take one event; what it changes elsewhere comes back as commands, in order. `router`: the incarnation of the
        router that said it, where one did; it decides about what it has ordered itself, and about nothing else."""
        if isinstance(event, StepDone | StepOutOfMemory | StepFailed) and event.plan is self._last_launched:
            self._last_launched = None
        commands = [*self._handle(event, router, now), *self._wake(now)]
        if isinstance(event, StepDone | StepOutOfMemory | StepFailed):
            commands += self._recomputation.step_ended(event)
        return commands

    def _handle(self, event: PrefillEvent, router: str, now: float) -> list[PrefillCommand]:
        match event:
            case msg.Prefill():
                return self._prefill(event, router, now)
            case msg.Cancel() | msg.RouterHeartbeat() | RouterLost():
                if isinstance(event, RouterLost):
                    self._fairness.admitted(event.router)
                return [c for job in self._requests.ended_by(event, router) for c in self._drop_request(job)]
            case PagesCompared():
                return [*self._recomputation.compared(event)]
            case StepLaunched(plan=plan):
                self._last_launched = plan
                return []
            case StepDone(plan=plan, seconds=seconds):
                return self._step_done(plan, now - self._planned if seconds is None else seconds, now)
            case StepFailed(plan=plan) | StepOutOfMemory(plan=plan) if any(chunk.ring for chunk in plan.values()):
                return [c for job in self._in_step(plan) for c in self._leave_ring(job)]
            case StepOutOfMemory(plan=plan) if self._can_run_again(plan):
                # Its prompts are in the next, smaller step. What was launched behind it has read what it did not write.
                return [c for job in self._in_step(plan) for c in self._begin_again(job)]
            case StepFailed(plan=plan, message=message) | StepOutOfMemory(plan=plan, message=message):
                return [c for job in self._in_step(plan) for c in self._fail(job, "internal", message)]
            case StoreUp(slots=slots, page_bytes=page_bytes):
                self._slots, self._page_bytes = slots, page_bytes
                self._refill.begin(slots)
                self._recomputation.store_changed()
                return []
            case StoreLost():
                self._slots = 0
                self._recomputation.store_changed()
                # What was done is in that store no more either: the router must not count on it.
                message = "the node's store is gone"
                jobs = list(self._requests.values())
                return [c for job in jobs for c in self._fail(job, StoreGone.reason, message)] + self._refill.stop()
            case Tick(paused=paused):
                return self._tick(now, paused)
            case _:
                return self._transfer(event, now)

    def _prefill(self, order: msg.Prefill, router: str, now: float) -> list[PrefillCommand]:
        name = msg.AttemptName(order.request, order.attempt)
        commands: list[PrefillCommand] = []
        try:
            if (old := self._requests.before(name, router)) is not None:
                if old.name.attempt >= order.attempt:
                    return []
                commands += self._drop_request(old)
            if order.adapter and order.adapter not in self._adapters:
                raise ModelMismatch("this worker has not loaded that adapter")
            tokens = unpack_tokens(order.tokens, self._vocab_size)
            if len(tokens) < self._page_size:
                raise MalformedMessage(f"{len(tokens)} tokens are less than a page of {self._page_size}")
        except BatonError as error:
            return [*commands, SendToRouter(msg.AttemptFailed(*name.parts, error.reason, str(error)), router)]
        if not self._slots:
            failed = msg.AttemptFailed(*name.parts, StoreGone.reason, "this worker's node has no store now")
            return [*commands, SendToRouter(failed, router)]
        keys = prompt_keys(order.root, order.tokens, self._page_size)
        first = self._groups.first_page(len(tokens) // self._page_size * self._page_size)
        window_pages = (len(keys) - first) * self._groups.count
        if len(keys) + window_pages > self._slots:
            # No window helps: pages keep the pages before them, so a chain must fit as a whole.
            message = f"the prompt takes {len(keys) + window_pages} pages and the node's arena has {self._slots}"
            return [*commands, SendToRouter(msg.Refused(*name.parts, "too_large", message), router)]
        if (needed := len(keys) * (1 + self._groups.count)) > self._num_pages:
            message = f"the prompt takes {needed} pages and this worker has {self._num_pages}"
            return [*commands, SendToRouter(msg.Refused(*name.parts, "too_large", message), router)]
        commands += [c for job in self._active for c in self._leave_ring(job)]
        active = self._active
        waits = self._fairness.must_wait(router, Counter(job.owner for job in active), now)
        full = waits or len(active) >= self._config.max_num_seqs
        allocation = None if full else self._allocate(keys)
        if allocation is None and not full and (cancels := self._refill.give_way()) is not None:
            commands += cancels
            allocation = self._allocate(keys)
        if allocation is None:
            self._fairness.refused(router, now)
            message = f"{len(active)} prompts are being computed and {self._blocks.available} pages are free"
            return [*commands, SendToRouter(msg.Refused(*name.parts, "busy", message), router)]
        self._fairness.admitted(router)
        pages, complete, table = allocation
        job = PrefillRequest(
            name=name,
            owner=router,
            tokens=tokens,
            keys=keys,
            page_size=self._page_size,
            priority=order.priority,
            arrival=now,
            deadline=None if order.deadline_ms is None else now + order.deadline_ms / 1_000,
            pages=BlockTable(pages),
            root=order.root,
            groups=self._groups,
            window_pages=table,
            sources=order.sources,
            adapter=order.adapter,
            progressed_at=now,
            window=self._window,
        )
        if order.ring is not None and self._rings and not active:
            job.ring = Ring.of(order, job.total, self._page_size, self._step_limit.tokens, router)
        job.mark_complete(complete)
        job.in_limbo = self._blocks.in_limbo([*pages[complete:], *table[complete * self._groups.count :]])
        self._requests.add(job)
        if order.ring is not None and order.ring.place and not job.helps:
            return commands + self._end_help(job)
        return commands + self._start_lookup(job)

    def _allocate(self, keys: Sequence[bytes]) -> tuple[list[int], int, BlockTable] | None:
        """Device pages for a prompt, all or nothing, how many of them are complete, and its window pages."""
        if not self._groups.count:
            allocation = shared_prefix.allocate_shared(self._blocks, keys, self._sharing)
            return None if allocation is None else (*allocation, BlockTable())
        if (allocation := self._groups.allocate(self._blocks, keys, len(keys))) is None:
            return None
        pages, cached, window_pages, first = allocation
        return pages, cached, BlockTable(window_pages, first * self._groups.count)

    @property
    def _sharing(self) -> list[PrefillRequest]:
        """The prompts that share device pages with others at hand. Where layers have groups none does: of what one has
        loaded, another one lacks the window pages in its middle. Nor does one that this worker only helps with: what
        others have computed of it is not sealed."""
        return [] if self._groups.count else [job for job in self._active if not job.helps]

    # --- prompts that begin alike -----------------------------------------------------------------------------------

    @property
    def _active(self) -> list[PrefillRequest]:
        """The prompts that are not done, in the order in which they came."""
        return [job for job in self._requests.values() if job.active]

    def _gained(self, job: PrefillRequest, before: int) -> None:
        """Pages of `job` from `before` on have become complete: full ones can be found in the cache, and prompts
        that share them have them, too."""
        for page in range(before, min(job.ready, job.full)):
            tokens = job.tokens[page * self._page_size : (page + 1) * self._page_size]
            self._blocks.cache_block(job.keys[page], job.keys[page - 1] if page else b"", job.pages[page], tokens)
            self._share_beginning(job, page)
            for entry, key in enumerate(self._groups.keys([job.keys[page]]), page * self._groups.count):
                if entry >= job.window_pages.first:
                    self._blocks.cache_block(key, job.keys[page], job.window_pages[entry], apart=True)
        shared_prefix.mark_complete(job, self._sharing)

    def _wake(self, now: float) -> list[PrefillCommand]:
        """Resume the waiters for pages that are complete or have lost their maker, the most urgent first. Otherwise
        they might all wait again for the least urgent one."""
        waiting = [job for job in self._requests.values() if job.phase is PrefillPhase.WAITING]
        commands: list[PrefillCommand] = []
        for job in sorted(waiting, key=lambda job: (job.priority, job.arrival)):
            job.waits_for = shared_prefix.computing_request(job, self._sharing)
            if job.waits_for is None:
                job.progressed_at = now
                commands += self._advance(job)
        return commands

    # --- from phase to phase --------------------------------------------------------------------------------------

    def _start_lookup(self, job: PrefillRequest) -> list[PrefillCommand]:
        left = self._leave_ring(job) if job.ring is not None and job.ring.lease else []
        job.phase = PrefillPhase.LOOKUP
        job.lookup = PrefixLookup(self._leases, job.keys[: job.full], job.sources)
        return left + self._ask(job, job.lookup.leases, job.lookup.start())

    def _continue_lookup(
        self, job: PrefillRequest, lookup: PrefixLookup, event: TransferEvent, now: float
    ) -> list[PrefillCommand]:
        """The store has said something about what it has, and what it could load."""
        lookup.handle(event)
        if job.phase is not PrefillPhase.LOOKUP:
            return []
        commands: list[PrefillCommand] = []
        if lookup.undecided:
            runs = lookup.runs
            spared = max(0, shared_prefix.pages_not_to_compute(job, self._sharing) - lookup.here)
            rate = self._step_costs.rate(lookup.here * self._page_size)
            choice = choose_load_length(runs, self._page_bytes, self._page_size, rate, spared)
            commands = [CallStore(call) for call in lookup.decide(choice.pages)]
            if choice.pages:
                job.loading = LoadInProgress(choice, runs, now)
                job.loaded_from = lookup.here
        if (hits := lookup.hits) is None:
            return commands
        if job.loading is not None and not job.loading.seconds:
            self._regret.load_ended(job.loading, hits - job.loaded_from, now)
        return commands + self._looked_up(job, hits, now)

    def _looked_up(self, job: PrefillRequest, hits: int, now: float) -> list[PrefillCommand]:
        """The store has, and holds for us, a prefix of `hits` pages."""
        job.stored = job.committed = job.offered = hits
        if hits == job.to_commit:
            return self._end_help(job) if job.helps else self._finish(job, now)
        return self._advance(job)

    def _advance(self, job: PrefillRequest) -> list[PrefillCommand]:
        """Bring what the store has to the device, as far as computing the rest needs it, and compute the rest; unless
        another prompt is making the same pages."""
        job.waits_for = shared_prefix.computing_request(job, self._sharing)
        if job.waits_for is not None:
            job.phase = PrefillPhase.WAITING
            return []
        have, hits = job.ready, job.stored
        if hits <= have:
            return self._compute(job)
        job.phase = PrefillPhase.LOADING
        job.mark_complete(have)  # a page that is loaded comes over one that was copied in part
        groups = self._groups
        first = max(have, groups.first_page(min(hits * self._page_size, len(job.tokens))))
        pages = job.pages[have:hits] + job.window_pages[first * groups.count : hits * groups.count]
        apart = groups.keys(job.keys[first:hits])
        sources = [
            msg.PageSource(s.store, s.endpoint, s.pages - have) for s in job.sources if apart and s.pages >= hits
        ]
        job.fetch = PageFetch(self._leases, job.keys[have:hits], pages, False, b"", sources, apart=apart)
        return self._ask(job, job.fetch.leases, job.fetch.start())

    def _compute(self, job: PrefillRequest) -> list[PrefillCommand]:
        job.phase = PrefillPhase.COMPUTING if job.pending else PrefillPhase.COMMITTING
        joining = self._join_ring(job)
        if job.name.request not in self._requests or job.helps:
            return joining
        return joining + self._copy_beginning(job) + self._reserve(job) + self._offer_pages(job)

    def _copy_beginning(self, job: PrefillRequest) -> list[PrefillCommand]:
        """Begin in the middle of the next page, if a page is here that begins alike. Its last token is computed: copies
        out of the device come after steps, and after nothing else."""
        start = job.ready * self._page_size
        if not job.pending or job.computed > start or self._groups.count or self._fixed_borders or job.ring:
            return []
        if job.pages[job.ready] in job.in_limbo:
            return []
        rest = job.tokens[start : min(start + self._page_size, len(job.tokens)) - 1]
        source, count = self._blocks.find_beginning(job.chain_before(job.ready), pack_tokens(rest))
        if count < FEWEST_COPIED:
            return []
        job.computed += count
        self._copied += count
        return [DuplicatePage(source, job.pages[job.ready])]

    def _share_beginning(self, job: PrefillRequest, page: int) -> None:
        """Let others copy a complete page. It is found below the page before it, if that is cached."""
        above = self._blocks.find(job.keys[page - 1]) if page else None
        if not self._groups.count and (page == 0 or (above is not None and above.page == job.pages[page - 1])):
            tokens = job.tokens[page * self._page_size : (page + 1) * self._page_size]
            self._blocks.share_beginning(job.chain_before(page), pack_tokens(tokens), job.pages[page])

    def _join_ring(self, job: PrefillRequest) -> list[PrefillCommand]:
        """The pages that are cached are here. Other workers count on just these."""
        if job.ring is None:
            return []
        if job.ring.lease or job.computed != job.ring.plan.part.first * self._page_size:
            return self._leave_ring(job)
        lease = next(self._leases)
        return self._ask(job, (lease,), (job.ring.join(lease, job.progressed_at),))

    def _leave_ring(self, job: PrefillRequest) -> list[PrefillCommand]:
        """Go on alone behind what is complete, or not at all."""
        if (ring := job.ring) is None:
            return []
        if ring.helps:
            return self._end_help(job)
        job.ring = None
        return [*ring.leave(), *self._drop(ring.lease)]

    def _end_help(self, job: PrefillRequest) -> list[PrefillCommand]:
        account = msg.Prefilled(*job.name.parts, computed=job.computed_here, hit=0, stored=0)
        return [*self._drop_request(job), SendToRouter(account, job.owner)]

    def _ring_heard(self, job: PrefillRequest, ring: Ring, event: TransferEvent) -> list[PrefillCommand]:
        """What the store says of the shared slots."""
        if not isinstance(event, Reserved):
            return self._leave_ring(job)
        ring.slots = [slot for slot in event.slots if slot is not None]
        return []

    def _reserve(self, job: PrefillRequest) -> list[PrefillCommand]:
        """Ask for slots for the next pages that the store lacks."""
        first, apart = job.committed, job.committed >= job.total
        last = min(first + job.window, job.to_commit if apart else job.total)
        parent = job.keys[first - 1] if first and not apart else b""
        keys, _ = job.to_write(first, last)
        if job.line_number is None:
            job.line_number = next(self._leases)
            self._owners[job.line_number] = job
        job.store = StorePages(
            next(self._leases), parent, keys, True,
            partial=last > job.full and not apart, prompt=job.line_number, apart=apart,
        )  # fmt: skip
        job.retry_at = None
        return self._ask(job, (job.store.lease,), job.store.start())

    def _offer_pages(self, job: PrefillRequest) -> list[PrefillCommand]:
        """Hand the pages that are complete on the device to the write that covers them."""
        write = job.store
        if write is None:
            return []
        commands: list[PrefillCommand] = []
        last = min(job.to_offer, job.committed + write.count)
        if last <= job.offered:
            return []
        _, pages = job.to_write(job.offered, last)
        for place, page in enumerate(pages, job.offered):
            commands += self._copies.add_copies(write.offer(place - job.committed, page))
        job.offered = last
        return commands

    def _window_stored(self, job: PrefillRequest, write: StorePages, now: float) -> list[PrefillCommand]:
        """Every page of a write is in the store: go on with the next, or be done."""
        job.pages_stored += write.pages_written
        job.committed += write.count
        job.offered = max(job.offered, job.committed)  # pages that others had sealed were never offered
        commands: list[PrefillCommand] = []
        job.holding.append(write.lease)
        job.window = min(2 * job.window, self._window)  # another prompt may have needed the share
        job.store = None
        if job.committed == job.to_commit:
            return commands + self._finish(job, now)
        return commands + self._reserve(job) + self._offer_pages(job)

    def _no_slots(self, job: PrefillRequest, write: StorePages, now: float) -> list[PrefillCommand]:
        commands = self._drop(write.lease)
        job.store, job.offered = None, job.committed
        if write.refused == "quota" and job.window > 1:
            # What our own prompts have reserved is our share. They write it without waiting for other slots, so this
            # prompt may keep what it holds.
            job.window = max(1, write.count // 2)
            return commands + self._reserve(job) + self._offer_pages(job)
        if write.refused == "orphan":
            # What we found when we looked has gone since: look again. Two that pass through the same few slots, each of
            # them taking what the other one has written, would do so for ever, and call that progress.
            job.lost_at = max(job.lost_at, job.committed + 1)
            commands += self._give_back(job)
            job.looks_again = job.steps > 0  # what is found now might be copied over what a step computes
            return commands if job.looks_again else commands + self._start_lookup(job)
        if write.refused == "behind":
            # Another prompt may wait for what this one holds. It goes first: see `kvstore.server.head_of_line`.
            commands += self._give_back(job)
        job.refused, job.retry_at = write.refused, now + _SLOTS_AGAIN
        return commands

    def _give_back(self, job: PrefillRequest) -> list[PrefillCommand]:
        """End the holds of this prompt on pages of the store. They stay there as long as there is room."""
        leases = [*job.holding, *(job.lookup.leases if job.lookup else ())]
        job.holding, job.lookup = [], None
        return [c for lease in leases for c in self._drop(lease)]

    def _finish(self, job: PrefillRequest, now: float) -> list[PrefillCommand]:
        if job.phase is PrefillPhase.COMMITTING and job.total > job.full:
            self._share_beginning(job, job.full)
        job.phase = PrefillPhase.DONE
        job.steps = 0  # where others have sealed its pages meanwhile: the end of a step must not revive it
        left, job.line_number = self._drop(job.line_number) if job.line_number is not None else [], None
        left += self._leave_ring(job)
        self._recomputation.note(job.tokens, job.keys, min(job.ready, job.full), job.adapter)
        self._free(job)
        hit = job.total - -(-job.computed_here // self._page_size)
        self._hit += hit
        self._hit_in_store += min(hit, job.stored)
        self._pages_stored += job.pages_stored
        begun = job.first_step if job.first_step is not None else now
        return [
            *left,
            SendToRouter(
                msg.Prefilled(
                    *job.name.parts,
                    computed=job.computed_here,
                    hit=hit,
                    stored=job.pages_stored,
                    queue_ms=int((begun - job.arrival) * 1_000),
                    compute_ms=int((now - begun) * 1_000),
                    predicted_ms=int(job.loading.predicted * 1_000) if job.loading else 0,
                    load_ms=int(job.loading.seconds * 1_000) if job.loading else 0,
                ),
                job.owner,
            ),
        ]

    # --- transfers ----------------------------------------------------------------------------------------------

    def _transfer(self, event: TransferEvent, now: float) -> list[PrefillCommand]:
        """Something about a lease; one that we have forgotten meanwhile means nothing any more."""
        lease: int = getattr(event, "lease", 0)
        job = self._owners.get(lease)
        ended: list[CallStore] = []
        if isinstance(event, CopiedIn | CopiedOut):
            ended = [*self._copies.copies_ended(event), *self._refill.copies.copies_ended(event)]
        if isinstance(event, CopiedOut) and self._copy_rate is not None:
            self._copy_rate.copied(event.pages, now)
        if job is None:
            theirs = [*self._refill.handle(lease, event, now), *self._recomputation.handle(lease, event)]
            return [*ended, *theirs]
        if not isinstance(event, NotReserved) and job.committed >= job.lost_at:
            job.progressed_at = now
        if job.lookup is not None and lease in job.lookup.leases:
            return self._continue_lookup(job, job.lookup, event, now)
        elif job.fetch is not None and lease in job.fetch.leases:
            return self._fetch_went_on(job, job.fetch, event)
        elif job.ring is not None and lease == job.ring.lease:
            return self._ring_heard(job, job.ring, event)
        elif job.store is not None and lease == job.store.lease:
            write = job.store
            commands: list[PrefillCommand] = [*self._copies.add_copies(write.handle(event))]
            if write.refused:
                return commands + self._no_slots(job, write, now)
            return commands + (self._window_stored(job, write, now) if write.done else [])
        return []

    def _fetch_went_on(self, job: PrefillRequest, fetch: PageFetch, event: TransferEvent) -> list[PrefillCommand]:
        before = fetch.usable
        commands: list[PrefillCommand] = [*self._copies.add_copies(fetch.handle(event))]
        if fetch.undecided:
            # What was worth loading of the chain has been loaded. Of use it is with its window pages alone.
            pages = sum(run.pages for run in fetch.runs) if self._groups.count else 0
            commands += [CallStore(call) for call in fetch.decide(pages)]
        ready = job.ready
        if fetch.usable > before:
            first = self._groups.first_page(min((ready + fetch.usable) * self._page_size, len(job.tokens)))
            self._blocks.free(job.window_pages.give_back(first * self._groups.count))  # those that were not loaded
        job.mark_complete(ready + fetch.usable - before)
        self._gained(job, ready)
        if fetch.ended:
            job.fetch = None
            if self._groups.count and not fetch.complete:
                job.branch = job.stored
                if job.to_commit > self._slots:
                    job.branch = 0
            commands += [c for lease in fetch.leases for c in self._drop(lease)]
            # Where copies under way still write.
            job.in_limbo = self._copies.busy([*job.pages, *job.window_pages.held])
            commands += self._compute(job)
        return commands

    def _ask(self, job: PrefillRequest, leases: Sequence[int], calls: Sequence[StoreCall]) -> list[PrefillCommand]:
        self._owners |= dict.fromkeys(leases, job)
        return [CallStore(call) for call in calls]

    def _drop(self, lease: int) -> list[PrefillCommand]:
        """Forget a lease, and the copies under it that have not been handed out."""
        self._owners.pop(lease, None)
        return [*self._copies.end_lease(lease)]

    # --- steps --------------------------------------------------------------------------------------------------

    def take_copies(self) -> list[Copy]:
        """The copies to make now, so that at most `copies_per_step` are under way. Report each as CopiedIn or
        CopiedOut."""
        most = self._room_for_copies
        copies = self._copies.take_copies(most)
        return copies + self._refill.copies.take_copies(most - len(copies))

    @property
    def _room_for_copies(self) -> int:
        """How many more may be under way."""
        return max(0, self._config.copies_per_step - self._copies.under_way - self._refill.copies.under_way)

    def uses_adapter(self, digest: str) -> bool:
        """Whether a prompt, ended or not, is computed with that LoRA adapter."""
        return any(request.adapter == digest for request in self._requests.values())

    @property
    def busy(self) -> bool:
        """There is something to do without waiting for a message, or for the end of a copy."""
        self._leave_limbo()
        copying = bool(self._copies) or bool(self._refill.copies)
        return (copying and self._room_for_copies > 0) or any(job.ready_to_step for job in self._requests.values())

    @property
    def patience(self) -> float:
        """For how many seconds the next step should wait for the store: an answer takes far less than a step. A prompt
        that gets it now has its part in the step, instead of waiting for the next; one whose last page is sealed now
        is done a step earlier, and its place free."""
        active = self._active
        if not any(job.phase is PrefillPhase.COMPUTING for job in active) or not any(map(self._answered_soon, active)):
            return 0.0
        return _PATIENCE * self._config.step_ms / 1_000

    def _answered_soon(self, job: PrefillRequest) -> bool:
        """The store is about to say what lets it go on."""
        if job.phase is PrefillPhase.COMMITTING:
            return job.store is not None and job.offered == job.total and job.store.lease not in self._copies.leases
        return job.phase is PrefillPhase.LOADING or (job.phase is PrefillPhase.LOOKUP and not job.loading_now)

    def prepare(self, now: float) -> list[PrefillCommand]:
        """Return no command: a prefill step needs no preparation."""
        return []

    def schedule(self, now: float) -> ScheduledBatch:
        """The next step; empty when nothing computes, or a step runs that none is launched behind."""
        step = self._config.step_ms / 1_000
        if (runs := self._last_launched) is not None and not self._is_short(runs):
            return {}
        self._leave_limbo()
        copy = self._copy_rate.seconds if self._copy_rate is not None else 0.0
        plan = self._chunk_of_ring() or build_batch(
            self._requests.values(), self._step_costs, step, self._step_limit.tokens, copy
        )
        self._planned = now
        if not plan:
            return self._recomputation.plan() if runs is None else {}
        for name, chunk in plan.items():
            job = self._requests[name.request]
            job.first_step = now if job.first_step is None else job.first_step
            job.steps, job.launched = job.steps + 1, chunk.end
        return plan

    def _is_short(self, plan: ScheduledBatch) -> bool:
        """Whether a step is over soon. One launched ahead fills the gap behind it, and prompts that come now wait for
        the end of both. A page that is recomputed is compared first."""
        step = sample_of(list(plan.values()), 0.0)
        return (
            NAME not in plan
            and self._step_costs.seconds(step.tokens, step.pairs) < _SHORT * self._config.step_ms / 1_000
        )

    def _chunk_of_ring(self) -> ScheduledBatch:
        jobs = [(job, job.ring) for job in self._requests.values() if job.ring is not None and job.ready_to_step]
        return {job.name: ring.chunk(job.tokens, job.pages, self._page_size, self._step_costs) for job, ring in jobs}

    def _leave_limbo(self) -> None:
        for job in self._requests.values():
            if job.in_limbo:
                job.in_limbo = self._copies.busy(job.in_limbo)

    def _in_step(self, plan: ScheduledBatch) -> list[PrefillRequest]:
        """The prompts of a step that has ended, as far as they are still here."""
        jobs = [job for name in plan if (job := self._requests.get(name.request)) and job.name == name and job.steps]
        for job in jobs:
            job.steps -= 1
        return jobs

    def _step_done(self, plan: ScheduledBatch, seconds: float, now: float) -> list[PrefillCommand]:
        self._step += 1
        if not any(chunk.ring for chunk in plan.values()):  # or it may have waited for others
            self._step_costs.stepped(plan, seconds)
        commands: list[PrefillCommand] = []
        for job in self._in_step(plan):
            chunk, before = plan[job.name], job.ready
            if job.ring is None and chunk.start != job.computed:  # it was launched behind one that ran out of memory
                commands += self._begin_again(job)
                continue
            job.computed_here += len(chunk.tokens) if job.ring is None or job.ring.helps else chunk.end - job.computed
            job.computed = chunk.end
            self._computed += len(chunk.tokens)
            job.progressed_at = now
            if job.ring is not None:
                following = job.ring.plan.next_own(job.ring.number + 1)
                if following is None:
                    job.ring.slots = ()  # others wait for what this worker has done, and for no more
                    commands += self._leave_ring(job)
                else:
                    job.ring.number = following
            if job.helps or job.name.request not in self._requests:
                continue
            self._gained(job, before)
            if not job.pending:
                job.phase = PrefillPhase.COMMITTING
            commands += self._look_again(job) if job.looks_again else self._offer_pages(job)
        return commands

    def _can_run_again(self, plan: ScheduledBatch) -> bool:
        """Whether a step that ran out of memory can be run again, smaller. It may have changed states."""
        return self._step_limit.out_of_memory(plan.values()) and not self._groups.states

    def _begin_again(self, job: PrefillRequest) -> list[PrefillCommand]:
        """Go on behind what is complete."""
        job.launched = 0
        return self._look_again(job) if job.looks_again else []

    def _look_again(self, job: PrefillRequest) -> list[PrefillCommand]:
        if job.steps:
            return []
        job.looks_again = False
        return self._start_lookup(job)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _drop_request(self, job: PrefillRequest) -> list[PrefillCommand]:
        """Free everything it holds. Its complete pages stay cached, here and in the store."""
        self._requests.remove(job)
        self._free(job)
        left = [] if job.ring is None else job.ring.leave()
        leases = [lease for lease, owner in self._owners.items() if owner is job]
        return [*left, *(c for lease in leases for c in self._drop(lease))]

    def _free(self, job: PrefillRequest) -> None:
        self._blocks.free([*job.pages, *job.window_pages.held])
        job.pages, job.window_pages = BlockTable(), BlockTable()

    def _fail(self, job: PrefillRequest, reason: str, message: str) -> list[PrefillCommand]:
        return [
            *self._drop_request(job),
            SendToRouter(msg.AttemptFailed(*job.name.parts, reason, message), job.owner),
        ]

    def _tick(self, now: float, paused: float) -> list[PrefillCommand]:
        most = self._config.store_timeout_ms / 1_000
        commands: list[PrefillCommand] = [*self._refill.tick(now, paused, most, idle=not self._active)]
        if self._copy_rate is not None and not self._copies.under_way:
            self._copy_rate.idle(now)
        for job in list(self._requests.values()):
            job.progressed_at += paused
            if job.phase is PrefillPhase.DONE:
                continue
            if job.deadline is not None and now > job.deadline:
                commands += self._fail(job, "deadline", "the request's deadline has passed")
            elif job.awaits_store and now - job.progressed_at > most:
                message = f"the store gave neither answers nor slots that last for {self._config.store_timeout_ms} ms"
                commands += self._fail(job, StoreError.reason, message)
            elif job.ring is not None and job.ring.lease and not job.ring.slots and now - job.ring.join_began > JOIN:
                commands += self._leave_ring(job)
            elif job.retry_at is not None and now >= job.retry_at:
                commands += self._reserve(job) + self._offer_pages(job)
        return commands

    # --- what others read ---------------------------------------------------------------------------------------

    @property
    def step_tokens(self) -> int:
        """The most tokens of a step: as configured, or fewer since a step ran out of memory."""
        return self._step_limit.tokens

    @property
    def blocks(self) -> DeviceBlockManager:
        """For its KV events and its snapshot; never to change it."""
        return self._blocks

    @property
    def leases(self) -> tuple[int, ...]:
        """Every lease at the store that we still care about."""
        return (*self._owners, *self._copies.ending, *self._refill.leases, *self._recomputation.leases)

    def heartbeat(self, heard: int, router: str = "") -> msg.Heartbeat:
        """For one router: what it owns, and how busy we are with all."""
        active = self._active
        load = replace(
            self._load(active),
            pages_free=self._blocks.available // (1 + self._groups.count),
            pages_total=self._num_pages // (1 + self._groups.count),
            prefill_rate=self._step_costs.rate(),
            steps=self._step_costs.last,
        )
        others = self._load([job for job in active if job.owner != router])
        return msg.Heartbeat(heard, load, self._step, attempts=self._requests.held_for(router), others=others)

    def _load(self, active: Sequence[PrefillRequest]) -> msg.LoadReport:
        running = sum(job.phase is PrefillPhase.COMPUTING for job in active)
        queued = sum(job.pending - self._made_by_others(job) for job in active)
        return msg.LoadReport(running=running, waiting=len(active) - running, tokens_queued=queued)

    def _made_by_others(self, job: PrefillRequest) -> int:
        """Tokens of this prompt that another one computes."""
        if job.waits_for is None:
            return 0
        return min((job.waits_for.in_common(job.keys) - job.ready) * self._page_size, job.pending)

    def waits(self, me: str, store: str) -> Iterator[WaitEdge]:
        """Yield the edges of the wait-for graph that this worker knows; for tests. `me` and `store`: incarnations."""
        for job in self._active:
            prompt = ("prompt", me, job.name.request)
            transfer = job.lookup if job.phase is PrefillPhase.LOOKUP else job.fetch
            yield from ((prompt, ("lease", me, lease)) for lease in (transfer.leases if transfer else ()))
            yield from ((("promise", store, key), prompt) for key in job.keys[job.committed :])
            if job.waits_for is not None:
                yield prompt, ("prompt", me, job.waits_for.name.request)
            if job.line_number is not None:
                yield ("place", me, job.line_number), prompt
                if job.waits_in_line is not None:
                    yield prompt, ("line", store) if job.waits_in_line == "behind" else ("slots", me, job.line_number)

    def stats(self) -> PrefillStats:
        done = sum(job.phase is PrefillPhase.DONE for job in self._requests.values())
        return PrefillStats(
            running=len(self._requests) - done,
            waiting=sum(job.phase is PrefillPhase.WAITING for job in self._requests.values()),
            holding=done,
            pages_free=self._blocks.available,
            pages_total=self._num_pages,
            tokens_computed=self._computed,
            tokens_copied=self._copied,
            pages_hit=self._hit,
            pages_hit_in_store=self._hit_in_store,
            pages_stored=self._pages_stored,
            pages_refilled=self._refill.written,
            pages_recomputed=self._recomputation.recomputed,
            pages_differing=self._recomputation.differing,
            load_regret=dict(self._regret.seconds),
        )

    def validate(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests."""
        self._blocks.validate()
        for job in self._requests.values():
            assert (job.phase is PrefillPhase.DONE) == (not job.pages), job.name
            assert job.offered >= job.committed or job.phase is PrefillPhase.DONE, job.name
            assert job.ready <= job.total, job.name
            assert job.pending >= 0, job.name
            assert job.phase is not PrefillPhase.COMPUTING or job.pending, job.name
            assert (job.phase is PrefillPhase.WAITING) == (job.waits_for is not None), job.name
            assert (job.fetch is not None) == (job.phase is PrefillPhase.LOADING), job.name
        active = self._active
        shared_prefix.validate(self._sharing)
        self._refill.validate()
        referenced = {page for job in active for page in (*job.pages, *job.window_pages.held)}
        referenced |= {*self._refill.pages, *self._recomputation.pages}
        assert self._blocks.stats().referenced == len(referenced)
        jobs = {id(job) for job in self._requests.values()}
        assert all(id(job) in jobs for job in self._owners.values())
        assert self._copies.leases <= set(self._owners)
