"""What a decode worker knows and decides: admission by pages, fetching, batching, preemption, write-through.

Pure: the worker's loop carries out the commands, the copies and the plan. Events may come while a step or copies are
under way. A page given back then is in limbo until these have ended (`kvstore.client.device_block_manager`).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from baton import messages as msg
from baton.attempt_table import AttemptTable
from baton.clock import Tick
from baton.config import DecodeConfig
from baton.errors import BatonError, InvalidGrammar, NonFiniteLogits
from baton.membership import RouterLost, SendToRouter
from baton.router_fairness import RouterFairness
from baton.store_protocol import StoreReply
from baton.waits import WaitEdge
from decode_worker.admission import SequenceAdmission
from decode_worker.drafter import Drafter
from decode_worker.growth_reserve import GrowthReserve, LearnedGrowthReserve
from decode_worker.page_fetches import PageFetches
from decode_worker.proposers import Proposer
from decode_worker.request_reader import RequestReader
from decode_worker.sequence import ChunkUnderWay, Sequence, SequencePhase
from decode_worker.sequence_pages import SequencePages
from decode_worker.sliding_window import SlidingWindow
from decode_worker.speculation import Speculation, SpeculationStats, accepted, right_proposals
from decode_worker.step_budget import DecodeRows
from decode_worker.step_planner import StepPlanner, rows_of
from decode_worker.write_through import WriteThrough
from engine.sampling.token_masks import OutputGrammars
from engine.step.batch import Chunk, Sampled
from engine.step.outcome import ScheduledBatch, StepDone, StepFailed, StepLaunched, StepOutOfMemory
from engine.step.recomputation import ComparePages, PagesCompared, Recomputation
from kvstore.client.device_block_manager import DeviceBlockManager, DuplicatePage
from kvstore.client.refill import StoreRefill
from kvstore.client.transfer import CallStore, CopiedIn, CopiedOut, Copy, StoreLost, StoreUp, TransferEvent
from kvstore.window_groups import NO_GROUPS, WindowGroups

_SCORES_PER_MESSAGE = 256  # prompt tokens, each with up to 20 alternatives: 150 KB
OTHERS_AHEAD = 8
"""A step goes ahead without the sequences that need their token if it has so many times as many others. A step that is
not ahead costs all of them the time between two steps, and being left out costs a whole step."""

DecodeCommand: TypeAlias = SendToRouter | CallStore | DuplicatePage | ComparePages
DecodeEvent: TypeAlias = (
    msg.Decode | msg.Cancel | msg.Resend | msg.RouterHeartbeat | StoreReply | CopiedIn | CopiedOut | StoreUp | StoreLost
    | RouterLost | Tick | StepLaunched | StepDone | StepOutOfMemory | StepFailed | PagesCompared
)  # fmt: skip


@dataclass(frozen=True)
class DecodeStats:
    """Counts since the start, and the present size of things."""

    running: int
    waiting: int
    ended: int
    pages_free: int
    pages_total: int
    preemptions: int
    tokens_generated: int
    prompt_tokens_computed: int
    tokens_copied: int  # that came with copies of pages which begin with them
    prompt_pages_device: int
    prompt_pages_fetched: int
    kv_loads_incomplete: int
    pages_stored: int
    pages_refilled: int  # of those that were cached when a store came up, those written to it
    pages_recomputed: int
    pages_differing: int
    writes_refused: int
    growth_reserve: int  # pages to keep free for what the present sequences are going to take
    speculation: SpeculationStats
    load_regret: Mapping[msg.LowerTier, float]  # seconds lost to loads that took longer than computing would have


class DecodeScheduler:
    """The sequences of one decode worker and the device pages they own."""

    def __init__(
        self,
        config: DecodeConfig,
        page_size: int,
        num_pages: int,
        *,
        event_tokens: bool = False,
        growth_reserve: GrowthReserve | None = None,
        calibration: Items[msg.StepSample] = (),
        vocab_size: int | None = None,
        grammars: OutputGrammars | None = None,
        copies_overlap: bool = False,
        window: int | None = None,
        groups: WindowGroups = NO_GROUPS,
        adapters: Collection[str] = (),
        recompute_share: float = 0.0,
        fixed_borders: bool = False,
        proposer: Callable[[], Proposer] | None = None,
        drafter: Drafter | None = None,
        verify_all: bool = False,
        no_kv_windows: str = "",
        no_page_weights: str = "",
    ) -> None:
        """`growth_reserve`: the rule for admission, the learned one by default. `calibration`: steps that were run
        before there was any work. `vocab_size`, where known: a token id of an order must be lower, because it would
        fail the whole step. `grammars`: makes those that outputs follow; none: an order with one fails.
        `copies_overlap`: copies are made beside steps, and delay none. `window`: the positions that no layer of the
        model looks beyond, a token's own included; none: some layer attends to all. `groups`: those of its layers that
        attend to a window beside it. `adapters`: digests of those that orders may name. `recompute_share`: part of the
        pages that is checked. `fixed_borders`: see `engine.runner.Runner`. `proposer`: makes those of sequences; none:
        they propose nothing. `drafter`: guesses where they don't. No step may be planned while one with proposals
        runs. `verify_all`: whatever they cost, all are verified. `no_kv_windows` and `no_page_weights`: see
        `engine.runner.Runner`."""
        self._config = config
        self._copies_overlap = copies_overlap
        self._page_size = page_size
        sliding = None if window is None else SlidingWindow(window, page_size, num_pages)
        self._pages = SequencePages(
            num_pages, page_size, sliding, groups, tell_tokens=event_tokens, fixed_borders=fixed_borders
        )
        self._groups = groups
        self._reader = RequestReader(
            page_size, sliding, groups, vocab_size, adapters, grammars, config.ageing_ms, no_kv_windows,
            no_page_weights,
        )  # fmt: skip
        self._sequences = AttemptTable[Sequence]()
        self._admission = SequenceAdmission(
            self._pages.blocks, growth_reserve or LearnedGrowthReserve(), page_size, groups
        )
        self._router_fairness = RouterFairness()
        self._planner = StepPlanner(config, page_size, calibration, fixed_borders=fixed_borders)
        self._speculation = (
            Speculation(proposer, self._planner.costs, self._pages, page_size, drafter=drafter, verify_all=verify_all)
            if proposer or drafter
            else None
        )
        leases = itertools.count(1)
        self._fetches = PageFetches(self._pages.blocks, leases, page_size)
        self._write_through = WriteThrough(self._pages.blocks, leases, page_size)
        self._refill = StoreRefill(self._pages.blocks, leases)
        self._copy_queues = (self._fetches.copies, self._write_through.copies, self._refill.copies)
        self._recomputation = Recomputation(self._pages.blocks, leases, page_size, recompute_share)
        self._arrivals = itertools.count()
        self._store_up = False
        self._page_bytes = 0
        self._copying = 0.0  # since when the copies that were handed out are being made, seconds
        self._under_way: list[ScheduledBatch] = []  # steps that run, if another may be planned meanwhile
        self._looked_at: list[Sequence] = []  # those that a plan which runs was seen to change
        self._step = 0
        self._preemptions = self._generated = self._computed = 0
        self._device_pages = self._fetched_pages = self._tokens_copied = 0

    # --- events -------------------------------------------------------------------------------------------------

    def handle(self, event: DecodeEvent, now: float, router: str = "") -> list[DecodeCommand]:
        """Take one event; what it changes elsewhere comes back as commands, in order. `router`: the incarnation of the
        router that said it, where one did; it decides about what it has ordered itself, and about nothing else."""
        match event:
            case msg.Decode():
                return self._decode(event, router, now)
            case msg.Cancel() | msg.RouterHeartbeat() | RouterLost():
                ended, cut = self._sequences.ended_by(event, router), False
                if isinstance(event, RouterLost):
                    self._router_fairness.admitted(event.router)
                    cut = True
                return [command for sequence in ended for command in self._drop_sequence(sequence, cut=cut)]
            case msg.Resend(request=request, attempt=attempt, position=position):
                sequence = self._sequences.find(msg.AttemptName(request, attempt), router)
                return [] if sequence is None else self._resend(sequence, position)
            case StepLaunched(plan=plan):
                self._under_way.append(plan)
                return []
            case StepDone() | StepOutOfMemory() | StepFailed():
                return [*self._step_ended(event, now), *self._recomputation.step_ended(event)]
            case PagesCompared():
                return [*self._recomputation.compared(event)]
            case StoreUp(slots=slots, page_bytes=page_bytes):
                self._store_up, self._page_bytes = True, page_bytes
                self._refill.begin(slots)
                self._recomputation.store_changed()
                for sequence in self._sequences.values():  # this store has nothing of what the last one had
                    sequence.stored_pages, sequence.writes_through = 0, True
                return []
            case StoreLost():
                return self._store_lost(now)
            case Tick(paused=paused):
                return self._tick(now, paused)
            case _:
                return self._transfer(event, now)

    def _decode(self, order: msg.Decode, router: str, now: float) -> list[DecodeCommand]:
        name = msg.AttemptName(order.request, order.attempt)
        commands: list[DecodeCommand] = []
        try:
            if (old := self._sequences.before(name, router)) is not None:
                if old.name.attempt >= order.attempt:
                    return []
                commands += self._drop_sequence(old, cut=True)
            sequence = self._reader.sequence(order, router, next(self._arrivals), now)
        except BatonError as error:
            return [*commands, SendToRouter(msg.AttemptFailed(*name.parts, error.reason, str(error)), router)]
        if old is not None:
            sequence.priority_time = old.priority_time
        if not self._pages.can_hold(sequence):
            need = f"prompt and output take up to {sequence.total_pages} pages at a time"
            message = f"{need} and this worker has {self._pages.total}"
            return [*commands, SendToRouter(msg.Refused(*name.parts, "too_large", message), router)]
        waits = self._router_fairness.must_wait(router, self._held(), now)
        if waits or not self._make_room(sequence, commands):
            self._router_fairness.refused(router, now)
            return [
                *commands,
                SendToRouter(
                    msg.Refused(*name.parts, "busy", f"{self._pages.blocks.available} pages are free"), router
                ),
            ]
        self._router_fairness.admitted(router)
        self._sequences.add(sequence)
        self._reader.begin_grammar(sequence)
        sequence.device_pages = sequence.computed // self._page_size
        self._device_pages += sequence.device_pages
        commands.append(SendToRouter(msg.Accepted(*name.parts, sequence.device_pages), router))
        return commands + self._begin(sequence, order.fetch, now)

    # --- admission ----------------------------------------------------------------------------------------------

    def _make_room(self, newcomer: Sequence, commands: list[DecodeCommand]) -> bool:
        """Reserve pages for a newcomer, if need be those of less urgent sequences. Return whether there is room."""
        sequences = self._sequences.values()
        leaving = self._admission.displaced_by(newcomer, sequences, self._write_through.spare)
        if leaving != [] and (cancels := self._refill.give_way()) is not None:
            commands += cancels
            leaving = self._admission.displaced_by(newcomer, sequences, self._write_through.spare)
        if leaving is None:
            return False
        for victim in leaving:
            commands += self._preempt(victim)
        while (reservations := self._pages.reserve(newcomer)) is None:
            # What is written only for others' sake makes room.
            if (cancels := self._abandon_write()) is None:
                windows = any(s.kv_window is not None for s in (newcomer, *sequences))
                assert windows or newcomer.window or newcomer.groups.count, "there is room, and nothing holds it"
                return False  # cached pages that were counted are kept by those of others after them
            commands += cancels
        commands += reservations
        return True

    def _abandon_write(self) -> list[CallStore] | None:
        """End a write of pages that no sequence refers to; none: there is no such write."""
        cancels = self._refill.give_way()
        return self._write_through.abandon() if cancels is None else cancels

    def _held(self) -> Mapping[str, int]:
        """Device pages by owner; shared ones count for each."""
        held: Counter[str] = Counter()
        for sequence in self._sequences.values():
            held[sequence.owner] += sequence.pages.num_held
        return held

    def _holders(self) -> list[Sequence]:
        return [s for s in self._sequences.values() if s.pages]

    def _begin(self, sequence: Sequence, goal: int, now: float) -> list[DecodeCommand]:
        """Fetch the pages from the cached prefix up to `goal`, or run at once where no full one is to be fetched. A
        sequence in parts computes all, since it has no room for what it would fetch."""
        have, full = sequence.computed // self._page_size, len(sequence.reusable_keys())
        keys = sequence.fetchable_keys()[have:goal]
        if have == full or not keys or sequence.in_parts:
            return self._run(sequence, now)
        if not self._store_up:
            return self._end_fetch(sequence, "the node's store is gone", now)
        sequence.computed, sequence.copied = have * self._page_size, 0  # a fetched page comes over the one copied to
        return [*self._fetches.start(sequence, keys, now)]

    def _run(self, sequence: Sequence, now: float) -> list[DecodeCommand]:
        sequence.phase = SequencePhase.RUNNING
        self._pages.give_back_unseen(sequence)
        sequence.running_since, sequence.remaining_prefill = now, sequence.pending
        self._tokens_copied += sequence.copied
        loading = sequence.loading
        predicted, took = (loading.predicted, loading.seconds) if loading else (0.0, 0.0)
        pages = (sequence.device_pages, sequence.fetched_pages)
        started = msg.Started(*sequence.name.parts, *pages, int(predicted * 1_000), int(took * 1_000))
        return [SendToRouter(started, sequence.owner)]

    # --- transfers ----------------------------------------------------------------------------------------------

    def _transfer(self, event: TransferEvent, now: float) -> list[DecodeCommand]:
        """Something about a lease; one that we have forgotten meanwhile means nothing any more."""
        lease = getattr(event, "lease", 0)
        ended: list[DecodeCommand] = []
        if isinstance(event, CopiedIn | CopiedOut):
            for queue in self._copy_queues:
                ended += queue.copies_ended(event)
            self._planner.budget.observe_copies(
                event.pages, now - self._copying if event.seconds is None else event.seconds
            )
            self._copying = now
        if (sequence := self._fetches.find(lease)) is None or (fetch := sequence.fetch) is None:
            written = [*self._write_through.handle(lease, event, now), *self._refill.handle(lease, event, now)]
            return [*ended, *written, *self._recomputation.handle(lease, event)]
        calls, came = self._fetches.handle(sequence, event, now)
        self._count_fetched(sequence, came)
        rate = self._planner.costs.rate(sequence.computed)
        calls += self._fetches.decide(sequence, self._page_bytes, rate, now)
        return [*ended, *calls, *(self._end_fetch(sequence, "the store has no more", now) if fetch.ended else [])]

    def _count_fetched(self, sequence: Sequence, count: int) -> None:
        if not count:
            return
        end = sequence.computed // self._page_size + count
        sequence.computed = min(end * self._page_size, len(sequence.tokens) - 1)
        self._pages.give_back_windows(sequence)  # those that were not fetched
        self._pages.cache_full(sequence)
        sequence.stored_pages = sequence.cached_pages
        sequence.fetched_pages += count
        self._fetched_pages += count

    def _end_fetch(self, sequence: Sequence, why: str, now: float) -> list[DecodeCommand]:
        """No more pages will come. A prefix that was merely cached is computed instead, as is the rest of a page; full
        pages that a prefill worker was to make are the router's to decide about."""
        have = sequence.computed // self._page_size
        reach = have + (sequence.fetch.in_arena if sequence.fetch is not None else 0)
        calls, complete = self._fetches.end(sequence, now)
        commands: list[DecodeCommand] = [*calls]
        merely_cached = not (complete or sequence.prefilled_remotely)
        if sequence.groups.count and merely_cached and self._store_up and reach < sequence.branch:
            sequence.branch = reach  # of so few pages the window pages may be there
            return commands + self._begin(sequence, reach, now)
        full = have == len(sequence.reusable_keys())
        if complete or full or not sequence.prefilled_remotely:
            return commands + self._run(sequence, now)
        sequence.phase = SequencePhase.KV_LOAD_INCOMPLETE
        return [*commands, SendToRouter(msg.FetchIncomplete(*sequence.name.parts, have, why), sequence.owner)]

    def _store_lost(self, now: float) -> list[DecodeCommand]:
        self._store_up = False
        self._recomputation.store_changed()
        commands: list[DecodeCommand] = [*self._write_through.end_all(), *self._refill.stop()]
        for sequence in self._sequences.values():
            if sequence.fetch is not None:
                commands += self._end_fetch(sequence, "the node's store is gone", now)
        return commands

    # --- steps --------------------------------------------------------------------------------------------------

    def take_copies(self) -> list[Copy]:
        """Return the copies to make now, as many as decoding sequences can bear, awaited ones first. Report each as
        CopiedIn or CopiedOut."""
        if not self._copying_now:
            return []
        most = self._room_for_copies
        copies: list[Copy] = []
        for queue in self._copy_queues:
            copies += queue.take_copies(most - len(copies))
        return copies

    @property
    def _copying_now(self) -> bool:
        """Copies wait to be made."""
        return any(self._copy_queues)

    @property
    def _room_for_copies(self) -> int:
        """How many more may be under way. If they delay steps, that is what the next step can bear."""
        budget = self._planner.budget
        most = self._config.copies_per_step if self._copies_overlap else budget.copies(self._decoding())
        return max(0, most - sum(queue.under_way for queue in self._copy_queues))

    @property
    def patience(self) -> float:
        """Seconds worth waiting for the store before the next plan: it need only confirm pages that were copied, and
        their sequence joins this step rather than the one after it. 0: there is nothing to wait for."""
        if not self._fetches.confirming:
            return 0.0
        return self._planner.budget.patience(self._decoding())

    def uses_adapter(self, digest: str) -> bool:
        """Whether a sequence, ended or not, is computed with that LoRA adapter."""
        return any(sequence.adapter == digest for sequence in self._sequences.values())

    @property
    def busy(self) -> bool:
        """There is something to do without waiting for a message, or for the end of a copy."""
        self._leave_limbo()
        running = any(s.steps for s in self._sequences.values())
        return running or (self._copying_now and self._room_for_copies > 0)

    def prepare(self, now: float) -> list[DecodeCommand]:
        """Before a plan: give every running sequence the pages that its known tokens need, at the cost of the last in
        rank where none are left; then resume preempted ones, in order of rank, as far as there is room. While a step
        runs, pages come at the cost of none."""
        commands: list[DecodeCommand] = []
        self._look_ahead()
        lacking = [s for s in self._sequences.values() if _lacks_pages(s)]
        for sequence in sorted(lacking, key=lambda s: s.rank):
            while sequence.phase is SequencePhase.RUNNING and not self._pages.grow(sequence):
                if self._under_way:
                    break  # the next step waits for the end of this one, which may bring pages
                if (cancels := self._abandon_write()) is not None:
                    commands += cancels
                else:
                    commands += self._preempt(max(self._holders(), key=lambda s: s.rank))
        preempted = (s for s in self._sequences.values() if s.phase is SequencePhase.PREEMPTED)
        for sequence in sorted(preempted, key=lambda s: s.rank):
            if not self._admission.fits(sequence, self._holders()):
                break
            reserved = self._pages.reserve(sequence)
            assert reserved is not None
            commands += reserved
            commands += self._begin(sequence, len(sequence.keys) if self._store_up else 0, now)
        return commands

    def schedule(self, now: float) -> ScheduledBatch:
        """The next step; empty when there is none, or the one that runs must end first. Call `prepare` before."""
        self._leave_limbo()
        if self._under_way and self._must_await():
            return {}
        plan = self._planner.plan(self._sequences.values(), now)
        if self._speculation is not None:
            drafting = self._speculation.extend(
                plan, lambda name: self._sequences.get(name.request), self._planner.tokens
            )
            self._planner.step_delayed(drafting)
        return plan if plan or self._under_way else self._recomputation.plan()

    def _must_await(self) -> bool:
        """Whether the step that runs must end before the next one is planned."""
        if any(s.must_be_awaited or _lacks_pages(s) for s in self._sequences.values()):
            return True
        # Those that need their token would get one only every second step, unless they wait for their masks anyway.
        delayed = sum(s.needs_its_token and not s.awaits_a_slow_mask for s in self._sequences.values())
        return delayed > 0 and sum(s.steps for s in self._sequences.values()) < OTHERS_AHEAD * delayed

    def _look_ahead(self) -> None:
        """Note what the step that runs is going to make of its sequences, as far as it will count."""
        self._look_back()
        assert len(self._under_way) <= 1, "a step is planned while two run"
        for plan in self._under_way:
            for number, (name, chunk) in enumerate(plan.items()):
                if (sequence := self._in_step(name, chunk)) is not None:
                    sequence.under_way = ChunkUnderWay(chunk, number)
                    self._looked_at.append(sequence)

    def _look_back(self) -> None:
        """Forget what `_look_ahead` has noted."""
        for sequence in self._looked_at:
            sequence.under_way = None
        self._looked_at.clear()

    def _leave_limbo(self) -> None:
        for sequence in self._sequences.values():
            self._fetches.leave_limbo(sequence)

    def _decoding(self) -> DecodeRows:
        return rows_of([s for s in self._sequences.values() if s.phase is SequencePhase.RUNNING and s.pending == 1])

    def _preempt(self, sequence: Sequence) -> list[DecodeCommand]:
        """Forget its device pages. What was published stays cached as long as there is room, and in the store. One
        whose fetch ended short waits for the router all the same."""
        commands: list[DecodeCommand] = [*self._fetches.drop(sequence)]
        self._preemptions += 1
        self._pages.release(sequence)
        sequence.computed = sequence.cached_pages = 0
        sequence.forget_choices()
        if sequence.phase is SequencePhase.KV_LOAD_INCOMPLETE:
            return commands
        sequence.phase = SequencePhase.PREEMPTED
        sequence.sources, sequence.loading = (), None
        sequence.prefilled_remotely = False  # what the store has by then is taken, the rest is computed here
        return commands

    def _step_ended(self, end: StepDone | StepOutOfMemory | StepFailed, now: float) -> list[DecodeCommand]:
        self._under_way = [plan for plan in self._under_way if plan is not end.plan]
        self._look_back()
        if self._speculation is not None and not isinstance(end, StepDone):
            self._speculation.step_failed()
        match end:
            case StepDone():
                return self._step_done(end, now)
            case StepOutOfMemory(plan=plan) if self._planner.out_of_memory(plan) and not self._groups.states:
                return []  # its sequences are in the next, smaller step, or take turns
            case StepOutOfMemory(plan=plan, message=message) | StepFailed(plan=plan, message=message):
                return self._step_failed(plan, message)

    def _step_done(self, done: StepDone, now: float) -> list[DecodeCommand]:
        self._step += 1
        step = self._planner.step_ended(done.plan, now, done.seconds)
        drawn = [
            accepted(chunk, (*done.verified.get(number, ()), done.sampled[number]))
            for number, chunk in enumerate(done.plan.values())
        ]
        if self._speculation is not None:
            self._speculation.step_ended(done.plan, step, drawn)
        scored = self._take_scores(done)
        learns = self._speculation if self._speculation is not None and self._speculation.guesses else None
        for number, (name, chunk) in enumerate(done.plan.items() if done.weights or learns is not None else ()):
            if (sequence := self._in_step(name, chunk)) is None:
                continue
            if number in done.weights:
                sequence.observe(done.weights[number])
            if learns is not None:
                learns.learn(sequence, chunk, drawn[number])
        drawn = [_with_forced(chunk, each) for chunk, each in zip(done.plan.values(), drawn, strict=True)]
        return scored + self._take_tokens(done.plan, drawn, now)

    def _take_scores(self, done: StepDone) -> list[DecodeCommand]:
        """Tell the log-probabilities of prompt tokens that the step has computed."""
        if not done.scores:
            return []
        commands: list[DecodeCommand] = []
        for number, (name, chunk) in enumerate(done.plan.items()):
            if (scores := done.scores.get(number)) and (sequence := self._in_step(name, chunk)) is not None:
                position = len(sequence.prompt_logprobs) + 1
                sequence.prompt_logprobs += scores
                commands += self._tell_scores(sequence, position)
        return commands

    def _tell_scores(self, sequence: Sequence, position: int) -> list[DecodeCommand]:
        return [
            SendToRouter(
                msg.PromptLogprobs(
                    *sequence.name.parts, at, tuple(sequence.prompt_logprobs[at - 1 : at - 1 + _SCORES_PER_MESSAGE])
                ),
                sequence.owner,
            )
            for at in range(position, len(sequence.prompt_logprobs) + 1, _SCORES_PER_MESSAGE)
        ]

    def _in_step(self, name: msg.AttemptName, chunk: Chunk) -> Sequence | None:
        """The sequence that a step has run, unless the chunk does not count for it: it has gone, for example."""
        sequence = self._sequences.get(name.request)
        return sequence if sequence is not None and sequence.name == name and sequence.counts(chunk) else None

    def _take_tokens(
        self, plan: ScheduledBatch, sampled: Items[Items[Sampled]], now: float, *, computed: bool = False
    ) -> list[DecodeCommand]:
        """The plan has been run. `sampled`: for each chunk the tokens that come after it. `computed`: all but the last
        of them have been computed, too."""
        deltas: dict[str, list[msg.Delta]] = {}  # by owner
        commands: list[DecodeCommand] = []
        for (name, chunk), drawn in zip(plan.items(), sampled, strict=True):
            if (sequence := self._in_step(name, chunk)) is None:
                continue
            # A token that was to be drawn and was not: its mask is late. The last token is computed once more.
            end = chunk.known if drawn or chunk.sample is None else chunk.known - 1
            sequence.choose_pages(end)
            if chunk.start < sequence.prompt:
                in_prompt = min(sequence.prompt, end) - chunk.start
                sequence.prompt_computed += in_prompt
                self._computed += in_prompt
            sequence.last_step = self._step
            if (failed := _failure(drawn, chunk.known)) is not None:
                commands += self._drop_sequence(sequence, cut=True)  # none of this step's pages is cached
                commands.append(SendToRouter(msg.AttemptFailed(*name.parts, *failed), sequence.owner))
                continue
            if not drawn:
                sequence.computed = end
            else:
                position = len(sequence.tokens)
                sequence.append(drawn)
                self._generated += len(sequence.tokens) - position
                deltas.setdefault(sequence.owner, []).append(sequence.delta(position))
                sequence.computed = len(sequence.tokens) - 1
                if not computed:
                    sequence.computed = min(sequence.computed, chunk.known + right_proposals(chunk, drawn))
            self._pages.cache_full(sequence)
            if drawn and chunk.known == sequence.first_new:
                self._pages.share_last(sequence)
            if self._store_up:
                commands += self._write_through.store(sequence, now)
            if sequence.finish is not None:
                self._admission.sequence_ended(sequence, cut=sequence.finish == "length")
                sequence.phase = SequencePhase.ENDED
                complete = 0 if sequence.pages.first else sequence.cached_pages
                self._recomputation.note(sequence.tokens, sequence.keys, complete, sequence.adapter)
                self._pages.release(sequence)
            else:
                self._pages.give_back_unseen(sequence)
                commands += self._pages.take_apart(sequence)
        return [
            *(SendToRouter(msg.Tokens(self._step, tuple(each)), owner) for owner, each in deltas.items()),
            *commands,
        ]

    def _step_failed(self, plan: ScheduledBatch, message: str) -> list[DecodeCommand]:
        commands: list[DecodeCommand] = []
        for name, chunk in plan.items():
            if (sequence := self._in_step(name, chunk)) is None:
                continue
            commands += self._drop_sequence(sequence, cut=True)
            commands.append(SendToRouter(msg.AttemptFailed(*name.parts, "internal", message), sequence.owner))
        return commands

    # --- ends ---------------------------------------------------------------------------------------------------

    def _resend(self, sequence: Sequence, position: int) -> list[DecodeCommand]:
        scores = self._tell_scores(sequence, max(1, position))
        position = min(max(position, sequence.first_new), len(sequence.tokens))
        delta = sequence.delta(position)
        if not delta.tokens and sequence.finish is None:
            return scores
        return [*scores, SendToRouter(msg.Tokens(self._step, (delta,)), sequence.owner)]

    def _drop_sequence(self, sequence: Sequence, cut: bool) -> list[DecodeCommand]:
        """Free everything it holds. Its complete pages stay cached, which is what makes a new attempt cheap. `cut`: its
        request goes on elsewhere, so its output would have been longer."""
        commands: list[DecodeCommand] = [*self._fetches.drop(sequence)]
        if sequence.phase is not SequencePhase.ENDED:
            self._admission.sequence_ended(sequence, cut)
        self._pages.release(sequence)
        self._sequences.remove(sequence)
        return commands

    def _tick(self, now: float, paused: float) -> list[DecodeCommand]:
        self._copying = now
        most = self._config.fetch_timeout_ms / 1_000
        idle = not any(s.pages for s in self._sequences.values())
        commands: list[DecodeCommand] = [
            *self._write_through.tick(now, paused, most), *self._refill.tick(now, paused, most, idle=idle)
        ]  # fmt: skip
        for sequence in list(self._sequences.values()):
            sequence.progressed_at += paused
            if sequence.deadline is not None and now > sequence.deadline and sequence.phase is not SequencePhase.ENDED:
                commands += self._drop_sequence(sequence, cut=False)
                failed = msg.AttemptFailed(*sequence.name.parts, "deadline", "the request's deadline has passed")
                commands.append(SendToRouter(failed, sequence.owner))
            elif sequence.fetch is not None and now - sequence.progressed_at > most:
                commands += self._end_fetch(sequence, f"no page came for {self._config.fetch_timeout_ms} ms", now)
        return commands

    # --- what others read ---------------------------------------------------------------------------------------

    @property
    def step_tokens(self) -> int:
        """The most tokens of a step: as configured, or fewer since a step ran out of memory."""
        return self._planner.tokens

    @property
    def blocks(self) -> DeviceBlockManager:
        """For its KV events and its snapshot; never to change it."""
        return self._pages.blocks

    def attempts(self, router: str) -> frozenset[msg.AttemptName]:
        """Those of this router that have not ended."""
        return frozenset(s.name for s in self._sequences.owned_by(router) if s.phase is not SequencePhase.ENDED)

    @property
    def leases(self) -> tuple[int, ...]:
        """Every lease at the store that we still care about."""
        return (*self._fetches.leases, *self._write_through.leases, *self._refill.leases, *self._recomputation.leases)

    def heartbeat(self, heard: int, router: str = "") -> msg.Heartbeat:
        """For one router: what it owns, and how busy we are with all."""
        sequences = self._sequences.values()
        load = replace(
            _load(sequences),
            pages_free=self._pages.blocks.available // (1 + self._groups.count),
            pages_total=self._pages.total // (1 + self._groups.count),
            prefill_rate=self._planner.costs.rate(),
            steps=self._planner.costs.last,
        )
        others = _load(sequence for sequence in sequences if sequence.owner != router)
        return msg.Heartbeat(heard, load, self._step, attempts=self._sequences.held_for(router), others=others)

    def waits(self, me: str) -> Iterator[WaitEdge]:
        """Yield the edges of the wait-for graph that this worker knows; for tests. `me`: its incarnation."""
        holders = [sequence.name.request for sequence in self._holders()]
        for sequence in self._sequences.values():
            node = ("sequence", me, sequence.name.request)
            if sequence.fetch is not None:
                yield from ((node, ("lease", me, lease)) for lease in sequence.fetch.leases)
            elif sequence.phase is SequencePhase.PREEMPTED:
                yield from ((node, ("sequence", me, other)) for other in holders)

    def stats(self) -> DecodeStats:
        phases = [s.phase for s in self._sequences.values()]
        return DecodeStats(
            running=sum(phase is SequencePhase.RUNNING for phase in phases),
            waiting=sum(
                phase
                in (SequencePhase.WAITING_FOR_REMOTE_KVS, SequencePhase.KV_LOAD_INCOMPLETE, SequencePhase.PREEMPTED)
                for phase in phases
            ),
            ended=sum(phase is SequencePhase.ENDED for phase in phases),
            pages_free=self._pages.blocks.available,
            pages_total=self._pages.total,
            preemptions=self._preemptions,
            tokens_generated=self._generated,
            prompt_tokens_computed=self._computed,
            tokens_copied=self._tokens_copied,
            prompt_pages_device=self._device_pages,
            prompt_pages_fetched=self._fetched_pages,
            kv_loads_incomplete=self._fetches.short,
            pages_stored=self._write_through.written,
            pages_refilled=self._refill.written,
            pages_recomputed=self._recomputation.recomputed,
            pages_differing=self._recomputation.differing,
            writes_refused=self._write_through.refused,
            growth_reserve=self._admission.growth_reserve(self._holders()),
            speculation=SpeculationStats() if self._speculation is None else self._speculation.stats,
            load_regret=self._fetches.regret,
        )

    def validate(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests."""
        self._pages.blocks.validate()
        for sequence in self._sequences.values():
            assert sequence.computed <= len(sequence.tokens), sequence.name
            self._pages.validate(sequence)
            assert (sequence.phase is SequencePhase.WAITING_FOR_REMOTE_KVS) == (sequence.fetch is not None), (
                sequence.name
            )
        self._fetches.validate(iter(self._sequences.values()))
        self._write_through.validate()
        self._refill.validate()


def _lacks_pages(sequence: Sequence) -> bool:
    """Whether it could be in the next step, but for pages."""
    lacking = sequence.phase is SequencePhase.RUNNING and sequence.table_pages > len(sequence.pages)
    return lacking and not sequence.draws_its_last


def _load(sequences: Iterable[Sequence]) -> msg.LoadReport:
    """What these make of our load. In one pass: it is told with every step."""
    running = waiting = queued = context = 0
    for sequence in sequences:
        known, phase = len(sequence.tokens), sequence.phase
        attended = known if sequence.kv_window is None else sequence.attended
        if phase is SequencePhase.ENDED:
            continue
        if phase is SequencePhase.RUNNING:
            running += 1
            context += attended
        else:
            waiting += 1
        if (pending := known - sequence.computed) > 1:
            queued += pending
    return msg.LoadReport(running=running, waiting=waiting, tokens_queued=queued, context=context)


def _with_forced(chunk: Chunk, drawn: Items[Sampled]) -> Items[Sampled]:
    """Return the tokens drawn with those behind the last that its grammar leaves no choice of. They are not drawn, so
    they have no log-probabilities and know no other rules: a request with these draws them one by one."""
    if not drawn or chunk.sample is None or chunk.sample.mask is None:
        return drawn
    _, draw = chunk.draws[len(drawn) - 1]
    if draw.mask is None or draw.logprobs is not None or draw.edits is not None:
        return drawn
    forced, last = draw.mask.forced, drawn[-1]
    return (*drawn, *map(Sampled, forced[1:])) if forced and last.token == forced[0] and last.finite else drawn


def _failure(drawn: Items[Sampled], position: int) -> tuple[str, str] | None:
    """Return an error's label and message if one of the tokens, the first at `position`, could not be drawn."""
    for number, each in enumerate(drawn):
        if each.failure:
            return InvalidGrammar.reason, each.failure
        if not each.finite:
            message = f"the logits of token {position + number} are not finite; look at the checkpoint and its dtype"
            return NonFiniteLogits.reason, message
    return None
