"""The life of requests: coming in, being placed, losing an attempt, ending. See `router.request` for the automaton.

Owns the requests and their queue. Gives work to members and takes it back. `router.requests.worker_messages` reads the
workers' messages about an attempt. `router.state` knows which processes are live and what a heartbeat lacks. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from msgspec.structs import replace

from baton.config import Config
from baton.errors import AttemptsExhausted, BatonError, DeadlineExpired, InvalidRequest, Unavailable
from baton.messages import MIXED, AttemptName, Cancel, Decode, ModelCard, WorkerRole
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.adapters import RuntimeAdapters
from router.events import PIN, Cancelled, Failed, Finished, RequestEnded, RequestOutcome
from router.generation_request import GenerationRequest
from router.members import AssignedAttempt, ClusterMembership, MemberRecord, PendingPrefill
from router.not_cached import NotCached
from router.outbox import Outbox
from router.placement.cached_prefix import CacheablePrefix
from router.placement.cluster_view import ClusterView
from router.placement.cost_matrix import PlacementCosts
from router.placement.kv_index import KvIndex
from router.placement.policy import PlacementPolicy
from router.placement.prompt_history import PlacedPrompt, PromptHistory
from router.placement.reuse_ceiling import ReuseCeiling
from router.placement.step_costs import FittedCosts
from router.placement.types import Placement, PlacementRequest, Reject, SecondsReservation
from router.placement.utilization import UtilizationMonitor
from router.queueing.admission import AdmissionControl, ModelLimits, check_tokens, settle_length
from router.queueing.queue_scan import QueueScan
from router.request import Attempt, Request, RequestPhase
from router.requests.counts import RequestCounts
from router.requests.explain import ConsideredPlacements, Explanations
from router.requests.gap_fillers import GapFillers
from router.requests.slo_attainment import SloAttainment

_MIXED = "model.numerics is mixed: on other workers, or with other pages in caches, its tokens may differ"


MAX_FRUITLESS = 64
"""Attempts in a row that brought no token, whatever ended them. With their pauses they take about a minute."""
_FREE_OF_PAUSE = 2  # attempts: a fail-over is immediate
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0  # seconds


class RequestManager:
    """Every request that has not ended."""

    def __init__(
        self,
        config: Config,
        limits: ModelLimits,
        members: ClusterMembership,
        prefixes: KvIndex,
        costs: FittedCosts,
        outbox: Outbox,
        placer: PlacementPolicy,
        *,
        admission: AdmissionControl,
        explanations: Explanations,
        utilization: UtilizationMonitor,
        counts: RequestCounts,
        attainment: SloAttainment,
        reuse_ceiling: ReuseCeiling,
        prompts: PromptHistory,
        adapters: RuntimeAdapters,
    ) -> None:
        self._config = config
        self._policy = placer
        self.view = ClusterView(config, members, costs)
        self._costs = costs
        self._limits = limits
        self._members = members
        self._kv_index = prefixes
        self._out = outbox
        self._arrivals = 0
        self._shut = False
        self._requests: dict[str, Request] = {}
        self._admission, self._queue = admission, admission.queue
        self._scan = QueueScan(admission.queue, members.changes)
        self._held = False  # a request is held here that could as well wait at a worker
        self._paused = False  # a request waits for the end of its pause
        self._gap_fillers = GapFillers(config, members, costs)
        self._next_expiry = -inf  # until then no request has waited for too long
        self._adapters = adapters
        self._explanations, self._utilization, self._counts = explanations, utilization, counts
        self._attainment, self._reuse_ceiling, self._prompts = attainment, reuse_ceiling, prompts

    def find(self, name: str) -> Request | None:
        """The request of that name, if it has not ended."""
        return self._requests.get(name)

    def find_attempt(self, name: str, attempt: int) -> tuple[Request, Attempt] | None:
        """The request of that name and its attempt, if it is the current one."""
        request = self._requests.get(name)
        if request is None or request.attempt is None or request.attempt.name.attempt != attempt:
            return None
        return request, request.attempt

    def find_served(
        self, member: MemberRecord, name: str, attempt: int, role: WorkerRole
    ) -> tuple[Request, Attempt] | None:
        """The same, if this member serves the attempt in this role; none: drop its message."""
        if (current := self.find_attempt(name, attempt)) is None:
            return None
        named = current[1]
        if role == "decode":
            has_a_say = named.decode == member.incarnation
        else:
            has_a_say = named.prefill == member.incarnation and named.prefill_sent
        return current if has_a_say else None

    def find_helped(self, member: MemberRecord, name: str, attempt: int) -> tuple[Request, Attempt] | None:
        """The same, if this member computes a part of its prompt."""
        current = self.find_attempt(name, attempt)
        return current if current and member.incarnation in current[1].helpers else None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    # --- coming in ---------------------------------------------------------------------------------------------------

    def submit(self, spec: GenerationRequest, now: float) -> None:
        """Raises InvalidRequest for a name in use, since no outcome could be told apart then; everything else that is
        wrong with a request ends it as Failed."""
        if spec.name in self._requests:
            raise InvalidRequest(f"request {spec.name!r} is being served already")
        self._arrivals += 1
        request = Request(spec, self._arrivals, now)
        self._admission.set_objectives(request)
        self._requests[request.name] = request
        self._explanations.submitted(request)
        try:
            if self._shut:
                raise Unavailable("this router is stopping")
            check_tokens(spec.tokens, self._limits.vocab_size)
            self._settle_length(request)
            self._admission.charge_quota(
                request, spec.max_tokens or self.view.expected_output(self._limits.max_context), now
            )
        except BatonError as error:
            self.end(request, Failed(error), now)
            return
        self._admission.enqueue(request, now)
        if self._members.changes.room:
            self.place_waiting(now)
        # For requests that wait already nothing has changed.
        elif self._can_place() and (not self._held or self._queue.first(now) is request):
            self.view.now = now
            self._place(request, now)
        self._clear_gaps(now)
        if request in self._queue and self._members.changes.room:
            self.place_waiting(now)
        if request in self._queue:
            self._check_wait(request, now)
        self._expires_with(request)

    def _check_wait(self, request: Request, now: float) -> None:
        """Check a new request that was not placed at once: its wait may be too long, or the queue too full."""
        work, seconds = request.prompt, 0.0
        if (card := self._members.card) is not None:
            request.derive_keys(card)
            held = self._held_prefix(request).values()
            work -= max((match.pages for match in held), default=0) * self._config.pages.page_size
            rates = [m.load.prefill_rate for m in self.view.prefill_workers or self.view.decode_workers]
            seconds = work / rate if (rate := max(rates, default=0.0)) else 0.0
        if (error := self._admission.check_wait(request, work, seconds, now)) is not None:
            self.end(request, Failed(error), now)
        while (surplus := self._admission.shed_excess(now)) is not None:
            self.end(surplus[0], Failed(surplus[1]), now)

    def context(self) -> tuple[int, int | None]:
        """The tokens of prompt and output together that the model takes, and that the largest decode worker has pages
        for; none: no worker is known."""
        card, pool = self._members.card, self._members.longest_context
        context = min(self._limits.max_context, card.max_context) if card else self._limits.max_context
        return context, None if pool is None else pool * self._config.pages.page_size

    def _settle_length(self, request: Request) -> None:
        """Raises InvalidRequest or ContextTooLong. Without a worker, an open length stays open."""
        context, pool = self.context()
        size = self._config.pages.page_size
        endless = pool is not None and request.most_pages(size) * size <= pool
        length = settle_length(request.prompt, request.max_tokens, context, None if endless else pool)
        if pool is not None:
            request.max_tokens = length

    # --- placing -----------------------------------------------------------------------------------------------------

    def place_waiting(self, now: float) -> None:
        """Place what can be placed, if there may be room now: call when an event has been handled."""
        if not self._scan.due:
            return
        self.view.begin_scan(now)
        self._held = self._paused = False
        for request in self._scan.scan(now):
            if not self._can_place():
                return
            if now < request.history.paused_until:
                self._paused = True
                continue
            if not self._policy.may_go(request.name, self.view) or self._admission.lacks_retry_budget(request, now):
                continue
            if not self._place(request, now):
                self._scan.mark_unplaceable(request)
        self._clear_gaps(now)

    def _can_place(self) -> bool:
        """Whether anything can be placed at all."""
        return any(member.takes_sequences for member in self._members.schedulable("decode"))

    def _place(self, request: Request, now: float) -> bool:
        card = self._members.card
        if card is None:
            return False
        if request.generated and request.root_in(card) != request.root:
            message = "the model was replaced while this request was being served"
            self.end(request, Failed(Unavailable(message)), now)
            return True
        if request.max_tokens is None:
            try:
                self._settle_length(request)
            except BatonError as error:
                self.end(request, Failed(error), now)
                return True
        if request.lowest and not self._queue.only_lowest:
            self._explanations.kept_waiting(request, "more urgent requests wait", None)
            return False
        ask = self._placement_request(request, card, now)
        decision = self._policy.place(ask, self.view)
        choice, considered = decision.choice, _considered(decision.considered)
        if decision.reservation is not None:
            self.view.reserve(decision.reservation)
        if isinstance(choice, Placement):
            self.view.mark_used(choice)
            if self._should_hold(request, choice, considered):
                return False
            if request.lowest and not self._gap_fillers.fits(request, choice, now):
                self._held = True
                self._explanations.kept_waiting(request, "it would slow more urgent requests", considered)
                return False
            self._begin(request, ask, choice, considered, now)
            if request.lowest:
                self._gap_fillers.add_placed(request, choice, now)
            for other in self._gap_fillers.in_the_way(request, choice):
                self.give_way(other, f"{request.name} is more urgent", now)
            return True
        self._explanations.kept_waiting(request, choice.why, considered)
        if isinstance(choice, Reject) and not request.history.ever_accepted:
            error = self._admission.unreachable(request, choice.why, choice.retry_after, now)
            self.end(request, Failed(error), now)
            return True
        return False

    def _placement_request(self, request: Request, card: ModelCard, now: float) -> PlacementRequest:
        request.derive_keys(card)
        excluded = request.history.excluded
        if request.spec.adapter:
            excluded = excluded | self._adapters.lacking(request.spec.adapter)
        final = request.history.failures >= self._config.router.max_attempts - 1
        assert request.max_tokens is not None, request.name
        return PlacementRequest(
            request=request.name,
            prefix=CacheablePrefix(len(request.keys), self._config.pages.page_size, card.page_bytes),
            keys=request.keys,
            held=self._held_prefix(request),
            tokens=request.known,
            max_tokens=request.max_tokens,
            prompt=request.prompt,
            ttft=None
            if request.ttft is None or request.history.ever_accepted
            else request.ttft - (now - request.timeline.received),
            tpot=request.tpot,
            waited=now - request.submitted,
            priority=request.spec.priority,
            tenant=request.spec.tenant,
            excluded=excluded,
            decode_only=final or request.history.decode_only or request.unscored,
            affinity=request.spec.affinity,
            most_pages=request.most_pages(self._config.pages.page_size),
            shares_with=self._shares_with(request),
        )

    def _held_prefix(self, request: Request) -> Mapping[str, PrefixMatch]:
        """How much of the request's prefix each holder has, as far as it may be used."""
        if request.unscored:
            return {}
        held = self._kv_index.map.match(request.keys)
        if worker := self._shares_with(request):
            held[worker] = PrefixMatch(len(request.keys), {"GPU": len(request.keys)})
        return held

    def _shares_with(self, request: Request) -> str:
        """The live worker that has just computed its prompt; empty: none, or it has refused or failed the request."""
        worker = request.spec.cached_on
        return worker if not request.history.attempts and self._members.get(worker) else ""

    def _not_cached(self, request: Request, ask: PlacementRequest, now: float) -> NotCached:
        """Say why pages of a prompt that is placed first are not cached."""
        card, held = self._members.card, max((match.pages for match in ask.held.values()), default=0)
        assert card is not None, request.name
        return self._prompts.add_prompt(
            PlacedPrompt(request.name, request.spec, request.root, request.keys, card.namespace, request.timeline),
            held,
            now,
        )

    def _should_hold(self, request: Request, plan: Placement, considered: ConsideredPlacements | None) -> bool:
        """Whether it waits here, since its worker has prompts enough; for those behind it that counts like a prompt."""
        worker = self._members.require_live(plan.prefill or plan.decode)
        prompts = [prompt for prompt in worker.pending_prefills.values() if not prompt.fills_gap]
        enough = len(prompts) >= self._config.prefill.max_num_seqs
        if not enough or not self._admission.should_hold(request, sum(prompt.seconds for prompt in prompts)):
            return False
        self.view.reserve(SecondsReservation(worker.incarnation, plan.predicted.load + plan.predicted.compute))
        self._explanations.kept_waiting(request, f"{worker.peer.name} has prompts enough", considered)
        self._held = True
        return True

    # --- yielding ----------------------------------------------------------------------------------------------------

    def _clear_gaps(self, now: float) -> None:
        """Have all requests of the lowest class leave while more urgent ones wait for room."""
        for request in () if self._queue.only_lowest else self._gap_fillers:
            self.give_way(request, "more urgent requests wait", now)

    def may_yield(self, request: Request, now: float) -> None:
        """Have a request that runs yield once it has had its class's quantum and others wait for room to decode."""
        attempt, quantum = request.attempt, self._config.router.service_quantum.get(request.spec.priority)
        if attempt is None or quantum is None or request.known - attempt.start < quantum or self._members.changes.room:
            return
        if (following := self._queue.turn_comes_before(request, now)) is None:
            return
        pages = -(-following.known // self._config.pages.page_size)
        workers = self._members.schedulable("decode")
        if not any(each.takes_sequences and each.free_pages - each.growth >= pages for each in workers):
            self.give_way(request, f"it has generated {request.known - attempt.start} tokens, and others wait", now)

    def give_way(self, request: Request, why: str, now: float) -> None:
        """End the current attempt, so that others may have its place. The request waits for its turn as if it came now,
        and goes on with every token so far. No attempt is counted."""
        self._out.log(f"yields: {why}", request.name, detail=True)
        self._explanations.attempt_ended(request, why, now)
        self.cancel_attempt(request)
        self._arrivals += 1
        request.arrival, request.queueing.yielded = self._arrivals, now
        self._counts.yielded += 1
        self.requeue(request, now)

    def _begin(
        self,
        request: Request,
        ask: PlacementRequest,
        plan: Placement,
        considered: ConsideredPlacements | None,
        now: float,
    ) -> None:
        request.history.attempts += 1
        if request.history.attempts == 1:
            self._reuse_ceiling.count_prompt(request.keys, request.prompt, now)
            request.not_cached = self._not_cached(request, ask, now)
        self._admission.placed(request, min(request.prompt, plan.cached_pages * ask.prefix.page_size), now)
        name = AttemptName(request.name, request.history.attempts)
        request.attempt = Attempt(name, plan, request.known, now, plan.decode, plan.prefill, helpers=plan.helpers)
        _start_over(request, now)
        self._counts.attempts += 1
        self._counts.split += plan.prefill is not None
        self._counts.local += plan.prefill is None
        decoder = self._members.require_live(plan.decode)
        known = plan.cached_pages * ask.prefix.page_size
        left = self.view.expected_output(ask.max_tokens - request.generated)
        if plan.prefill is not None:
            prompt = PendingPrefill(ask.tokens - 1 - known, known, fills_gap=request.lowest)
            self._members.require_live(plan.prefill).assign_prefill(name, prompt, now)
            for helper in plan.helpers:
                part = PendingPrefill(prompt.new // (1 + len(plan.helpers)), known)
                self._members.require_live(helper).assign_prefill(name, part, now)
        else:
            prompt = PendingPrefill(request.known - known, known, fills_gap=request.lowest)
            decoder.assign_prefill(name, prompt, now)
        cost = self._costs.prefill(plan.prefill or plan.decode)
        self._utilization.prompt(cost.seconds(prompt.new, prompt.context, self._config.prefill.max_num_batched_tokens))
        prefill = self._members.require_live(plan.prefill).peer.name if plan.prefill else ""
        cached = min(request.known, plan.cached_pages * self._config.pages.page_size)
        self._explanations.placed(request, decoder.peer.name, prefill, cached, considered)
        if plan.helpers:
            names = ", ".join(self._members.require_live(helper).peer.name for helper in plan.helpers)
            ways = [f"{w}: {each:.2f} s" for w, each in enumerate(plan.ring_seconds, 1) if each < inf]
            note = f"{prefill} and {names} compute chunks of {plan.chunk_pages} pages in turn. Predicted by workers"
            self._explanations.noted(request, f"{note}: {', '.join(ways)}")
        if (card := self._members.card) is not None and card.namespace.numerics == MIXED:
            self._explanations.noted(request, _MIXED)
        served = request.account.served
        if served.decode_workers[-1:] != (decoder.peer.name,):
            served.decode_workers += (decoder.peer.name,)
        assert request.max_tokens is not None, request.name
        spec = request.spec
        message = Decode(
            request=request.name,
            attempt=name.attempt,
            root=request.root,
            tokens=bytes(request.tokens),
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            sampling=spec.sampling if request.unscored else replace(spec.sampling, prompt_logprobs=None),
            stop_token_ids=spec.stop_token_ids,
            fetch=plan.fetch_pages,
            prefilled_remotely=plan.prefilled_remotely,
            sources=plan.sources,
            priority=spec.priority,
            deadline_ms=request.left_ms(now),
            adapter=request.adapter_digest,
            kv_compression=spec.kv_compression,
        )
        pages = int(min(-(-request.known // self._config.pages.page_size), ask.most_pages))
        work = AssignedAttempt(
            self._out.send(plan.decode, message),
            pages,
            context=request.known + left / 2,
            new_pages=pages - ask.device_pages(plan.decode),
            growth=min(left / self._config.pages.page_size, ask.most_pages - pages),
            tpot=request.tpot,
        )
        decoder.assign(name, work)
        decoder.unanswered.add(name)
        split = f", prefill by {prefill}" if prefill else ""
        loads = "".join(f", {run.pages} from {run.speed.tier}" for run in plan.loads)
        self._out.log(
            f"attempt {name.attempt} on {decoder.peer.name}{split}: {len(request.keys)} pages, "
            f"{plan.cached_pages} cached{loads}, {plan.fetch_pages} to fetch; predicted {plan.predicted}",
            request.name,
            detail=True,
        )

    def place_elsewhere(self, request: Request, member: MemberRecord, now: float) -> Placement | None:
        """Where a request would be placed now if this worker were not there; none: nowhere."""
        if (card := self._members.card) is None:
            return None
        ask = self._placement_request(request, card, now)
        ask = replace(ask, excluded={*ask.excluded, member.incarnation}, shares_with="")
        choice = self._policy.place(ask, self.view).choice
        return choice if isinstance(choice, Placement) else None

    # --- attempts end ------------------------------------------------------------------------------------------------

    def member_gone(self, member: MemberRecord, now: float) -> None:
        """`member` is no longer listed; whatever it had is placed anew."""
        names = {*member.assigned, *member.pending_prefills}
        self._gap_fillers.forget(member.incarnation)
        if member.peer.role == "store":
            names = {name for name, attempt in self._attempts() if member.incarnation in attempt.stores}
        for name in sorted(names):
            member.unassign(name)
            if (current := self.find_attempt(name.request, name.attempt)) is None:
                continue
            request, attempt = current
            needed = member.incarnation != attempt.prefill or attempt.needs_prefill
            if member.incarnation in attempt.helpers:
                self.release_helpers(request, attempt, f"{member.peer.name} is gone: {member.gone}")
                continue
            if member.incarnation == attempt.prefill:
                attempt.prefill = None
            if needed:
                # One that fell silent before it was chosen has not been silenced by this attempt: when a link breaks,
                # many do at once, and are noticed one after the other.
                placed = request.timeline.placed
                before = member.gone == "silent" and placed is not None and member.heard_at < placed
                self.retry(request, f"{member.peer.name} is gone: {member.gone}", now, free=before, death=True)

    def _attempts(self) -> list[tuple[AttemptName, Attempt]]:
        return [(r.attempt.name, r.attempt) for r in self._requests.values() if r.attempt is not None]

    def retry(
        self,
        request: Request,
        why: str,
        now: float,
        *,
        free: bool = False,
        reported: bool = False,
        blame: bool = False,
        death: bool = False,
    ) -> None:
        """End the current attempt; the next one knows every token so far. `free`: it does not count against the
        request's budget. `reported`: its worker gave it up, which counts also before it accepted. `blame`: its decode
        worker is chosen again only if there is no other. `death`: a process that it needed has gone. A failure on live
        workers also uses the common retry budget. A dead worker can't fail the next attempt."""
        attempt = request.attempt
        assert attempt is not None, request.name
        self._out.log(f"attempt {attempt.name.attempt} is over: {why}", request.name, warning=not free, kind="attempt")
        if blame:
            request.history.excluded.add(attempt.decode)
        failed = reported or (attempt.phase is not RequestPhase.PLACED and not free)
        request.history.failures += failed
        request.history.is_retry = failed and not death
        self._explanations.attempt_ended(request, why, now)
        self.cancel_attempt(request)
        if request.history.failures >= self._config.router.max_attempts:
            message = f"{request.history.attempts} attempts failed; the last because {why}"
            self.end(request, Failed(AttemptsExhausted(message)), now)
            return
        self._try_again(request, why, now)

    def release_helper(self, request: Request, attempt: Attempt, helper: str) -> None:
        """A helper has done its part, and forgets this attempt."""
        attempt.helpers = tuple(other for other in attempt.helpers if other != helper)
        if (member := self._members.get(helper)) and member.unassign(attempt.name):
            self._out.send(helper, Cancel(request.name, attempt.name.attempt))

    def release_helpers(self, request: Request, attempt: Attempt, why: str = "") -> None:
        """All helpers forget this attempt, since each waits for the one before it. The prefill worker goes on alone.
        `why` is told where they have not done their parts."""
        if why and attempt.helpers:
            self._explanations.noted(request, f"{why}; its prefill worker goes on alone")
        for helper in attempt.helpers:
            self.release_helper(request, attempt, helper)

    def release_prefill(self, request: Request, attempt: Attempt) -> None:
        """The prefill worker forgets this attempt, done or not."""
        self.release_helpers(request, attempt)
        prefill, attempt.prefill = attempt.prefill, None
        if prefill is None or (member := self._members.get(prefill)) is None:
            return
        if member.unassign(attempt.name):
            self._out.send(prefill, Cancel(request.name, attempt.name.attempt))

    def requeue(self, request: Request, now: float) -> None:
        """Wait for a worker, within the limits of the queue."""
        self._admission.enqueue(request, now)
        self._expires_with(request)

    def _try_again(self, request: Request, why: str, now: float) -> None:
        """Wait for a worker, after a pause if several attempts in a row brought no token. Whatever ended them, their
        number is bounded."""
        request.history.fruitless += 1
        if request.history.fruitless >= MAX_FRUITLESS:
            message = f"{request.history.fruitless} attempts in a row brought no token; the last because {why}"
            self.end(request, Failed(AttemptsExhausted(message)), now)
            return
        request.history.paused_until = now + pause_before(request.history.fruitless)
        self.requeue(request, now)

    def cancel_attempt(self, request: Request) -> None:
        """Withdraw the current attempt from every process involved."""
        attempt, request.attempt = request.attempt, None
        if attempt is None:
            return
        self._gap_fillers.discard(request)
        request.account.prefill_unreported += attempt.prefill_unreported
        self.release_prefill(request, attempt)
        decoder = self._members.get(attempt.decode)
        if decoder is not None and decoder.unassign(attempt.name):
            self._out.send(attempt.decode, Cancel(request.name, attempt.name.attempt))
            if attempt.phase is not RequestPhase.PLACED:
                decoder.clear_busy()  # it has given pages back

    # --- requests end ------------------------------------------------------------------------------------------------

    def end(self, request: Request, outcome: RequestOutcome, now: float, completion: int | None = None) -> None:
        """The one way out. `completion`: how many tokens count, if not all."""
        request.timeline.ended = now
        summary = request.summary(completion)
        self._explanations.request_ended(request, outcome, summary, now)
        self._attainment.request_ended(request, outcome, summary)
        self.cancel_attempt(request)
        self._admission.request_ended(request, summary.usage, now)
        self._policy.request_ended(request.name)
        del self._requests[request.name]
        match outcome:
            case Finished(reason=reason):
                self._counts.finished[reason] += 1
                self.view.learn_output(request.generated)
                self._counts.prompt_tokens += summary.usage.prompt
                self._counts.cached_tokens += summary.usage.cached
                if summary.not_cached is not None:
                    self._counts.not_cached_tokens.update(summary.not_cached.tokens)
                usage = summary.usage
                tokens = f"{usage.prompt} prompt tokens, {usage.cached} cached, {usage.completion} generated"
                self._out.log(f"finished: {reason}, {tokens}", request.name)
            case Failed(error=error):
                self._counts.failed[error.reason] += 1
                self._out.log(
                    f"failed: {error.reason}: {error}",
                    request.name,
                    warning=not isinstance(error, InvalidRequest),
                    kind=f"failed: {error.reason}",
                )
            case Cancelled(why=why):
                self._counts.cancelled += 1
                self._out.log(f"cancelled: {why}", request.name, kind="cancelled")
        self._out.put(RequestEnded(request.name, outcome, summary))

    def expire(self, now: float) -> None:
        """Everything that has waited for too long: a client, a place in the queue, an attempt."""
        self._scan.tick(again=self._queue.begun or self._held or self._paused)
        if now < self._next_expiry:
            return
        progress = self._config.router.attempt_timeout_ms / 1_000
        self._next_expiry = now + progress  # attempts that are made from now on
        late: list[Request] = []
        for request in self._requests.values():
            if now >= request.next_timeout(progress):
                late.append(request)
            else:
                self._expires_with(request)
        for request in late:
            if request.spec.deadline is not None and now >= request.spec.deadline:
                message = f"the deadline passed after {request.generated} of {request.max_tokens} tokens"
                self.end(request, Failed(DeadlineExpired(message)), now)
            elif request.queueing.deadline is not None and now >= request.queueing.deadline:
                self.end(request, Failed(self._no_place(request, now)), now)
            else:
                self.retry(request, f"no progress for {self._config.router.attempt_timeout_ms} ms", now, blame=True)

    def _expires_with(self, request: Request) -> None:
        """There is a new limit to what it waits for."""
        self._next_expiry = min(self._next_expiry, request.next_timeout(self._config.router.attempt_timeout_ms / 1_000))

    def shut(self, now: float) -> None:
        """Serve no more requests. The workers are told, so that they need not wait for this router's silence."""
        self._shut = True
        for request in list(self._requests.values()):
            self.end(request, Failed(Unavailable("this router is stopping")), now)

    def _no_place(self, request: Request, now: float) -> BatonError:
        if not self._members.with_role("decode"):
            return Unavailable("the request could not wait any longer, and no decode worker is live")
        return self._admission.queue_timeout(request, now)

    def extend(self, seconds: float) -> None:
        """We stood still for so long. What a client asked for does not wait for us; all else does."""
        for request in self._requests.values():
            if request.queueing.deadline is not None:
                request.queueing.deadline += seconds
            if request.attempt is not None:
                request.attempt.progressed_at += seconds

    def validate(self) -> None:
        self._admission.validate()
        fillers = {request.name for request in self._requests.values() if request.lowest and request.attempt}
        assert fillers == {request.name for request in self._gap_fillers}
        expected: dict[str, set[AttemptName]] = {member.incarnation: set() for member in self._members}
        slots: dict[str, set[AttemptName]] = {member.incarnation: set() for member in self._members}
        for request in self._requests.values():
            attempt = request.attempt
            assert (attempt is None) == (request in self._queue), request.name
            limit = request.next_timeout(self._config.router.attempt_timeout_ms / 1_000)
            assert self._next_expiry <= limit < inf, f"{request.name} waits without a limit"
            if attempt is None:
                continue
            expected[attempt.decode].add(attempt.name)
            for store in attempt.stores:
                assert self._members.get(store) is not None, f"{attempt.name} waits for pages of a store that is gone"
            for helper in attempt.helpers:
                slots[helper].add(attempt.name)
                if attempt.prefill_sent:
                    expected[helper].add(attempt.name)
            if attempt.prefill is not None:
                if attempt.prefill_sent:
                    expected[attempt.prefill].add(attempt.name)
                if not attempt.prefilled:
                    slots[attempt.prefill].add(attempt.name)
            if attempt.placement.prefill is None and request.known == attempt.start:
                slots[attempt.decode].add(attempt.name)
        for member in self._members:
            work = {name for name in member.assigned if not name.request.startswith(PIN)}
            assert work == expected[member.incarnation], member.peer.name
            pending = {name for name in member.pending_prefills if not name.request.startswith(PIN)}
            assert pending == slots[member.incarnation], member.peer.name


def cached_share(members: ClusterMembership, prefixes: KvIndex, request: Request) -> float:
    """Return the share of a request's tokens whose pages some live holder has."""
    if (card := members.card) is None or request.unscored:
        return 0.0
    request.derive_keys(card)
    pages = max((match.pages for match in prefixes.map.match(request.keys).values()), default=0)
    return min(1.0, pages * card.namespace.page_size / request.known)


def pause_before(fruitless: int) -> float:
    """Return the seconds between two attempts, after so many in a row that brought no token."""
    doublings = fruitless - _FREE_OF_PAUSE - 1
    return 0.0 if doublings < 0 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(doublings, 16))


def _start_over(request: Request, now: float) -> None:
    """A new attempt overwrites the instants between `placed` and `started`."""
    line = request.timeline
    line.placed = now
    line.accepted = line.prefill_sent = line.prefilled = line.started = None
    request.account.begin_attempt()


def _considered(considered: PlacementCosts | None) -> ConsideredPlacements | None:
    return None if considered is None else ConsideredPlacements(len(considered.workers), considered.candidates)
