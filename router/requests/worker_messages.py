"""What each message from a worker means for the attempt it is about, once it is known to be the current one.

Reads and moves the attempt; what follows for the request (a new attempt, its end) is `router.requests.lifecycle`'s to
do. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from msgspec.structs import replace

from baton import messages
from baton.config import Config
from baton.errors import ContextTooLong, DeadlineExpired, InvalidRequest, NonFiniteLogits, from_reason
from baton.messages import Delta, Prefill, PromptTokenLogprob, Resend, RingPart, TokenLogprob
from router.events import Emit, Failed, Finished
from router.members import AssignedAttempt, ClusterMembership, MemberRecord, PendingPrefill
from router.outbox import Outbox
from router.placement.prediction_error import PredictionErrors
from router.placement.utilization import UtilizationMonitor
from router.queueing.admission import AdmissionControl, ModelLimits
from router.request import Attempt, Request, RequestPhase
from router.requests.counts import RequestCounts
from router.requests.explain import Explanations
from router.requests.lifecycle import RequestManager

_MOST_MS = 86_400_000  # that a worker's account tells of anything
_SHOWN = 32  # chosen pages
_TURNED_AWAY = 32  # times that busy prefill workers refuse a prompt before those that still do are not asked again


class WorkerMessageHandler:
    """The workers' side of a request's life."""

    def __init__(
        self,
        config: Config,
        limits: ModelLimits,
        members: ClusterMembership,
        manager: RequestManager,
        errors: PredictionErrors,
        outbox: Outbox,
        *,
        admission: AdmissionControl,
        explanations: Explanations,
        utilization: UtilizationMonitor,
        counts: RequestCounts,
    ) -> None:
        self._config = config
        self._limits = limits
        self._members = members
        self._manager = manager
        self._admission, self._explanations = admission, explanations
        self._utilization, self._counts = utilization, counts
        self._scores = errors
        self._out = outbox

    # --- what decode workers say -------------------------------------------------------------------------------------

    def accepted(self, request: Request, attempt: Attempt, device: int, now: float) -> None:
        """The decode worker has reserved its pages. Only now may a prefill worker begin: no process holds and waits."""
        if attempt.phase is not RequestPhase.PLACED:
            return
        self._accept(request, attempt, now)
        if attempt.prefill is None:
            return
        if device >= len(request.keys):
            self._manager.release_prefill(request, attempt)  # nothing is missing after all
        else:
            self._send_prefill(request, attempt, attempt.prefill, now)

    def _accept(self, request: Request, attempt: Attempt, now: float) -> None:
        """It has been accepted, whether or not we ever heard it said."""
        self._members.require_live(attempt.decode).answered(attempt.name)
        if attempt.phase is RequestPhase.PLACED:
            attempt.phase, attempt.progressed_at = RequestPhase.PREPARING, now
            request.timeline.accepted = now
            request.queueing.deadline, request.history.ever_accepted = None, True

    def refused(self, request: Request, attempt: Attempt, refusal: messages.Refused, now: float) -> None:
        """The decode worker has no room. Nothing was done, so the budget of attempts is not touched."""
        if attempt.phase is not RequestPhase.PLACED:
            return
        member = self._members.require_live(attempt.decode)
        if refusal.reason == "too_large":
            self._manager.end(request, Failed(ContextTooLong(f"{member.peer.name}: {refusal.message}")), now)
            return
        member.mark_busy(attempt.name)
        member.unassign(attempt.name)
        self._out.log(f"attempt {attempt.name.attempt}: {member.peer.name} is busy", request.name, detail=True)
        self._explanations.attempt_ended(request, f"{member.peer.name} is busy", now)
        self._manager.cancel_attempt(request)
        self._manager.requeue(request, now)

    def started(self, request: Request, attempt: Attempt, event: messages.Started, now: float) -> None:
        attempt.progressed_at = now
        pages = self._pages(request)
        on_device, fetched = min(event.device_pages, pages), min(event.fetched_pages, pages)
        across = sum(source.pages for source in attempt.placement.sources)
        name = self._members.require_live(attempt.decode).peer.name
        self._counts.count_pages(name, fetched=fetched, across=min(fetched, across), on_device=on_device)
        if attempt.phase is not RequestPhase.RUNNING:  # a preempted sequence says it again when it resumes
            served = request.account.served
            served.pages_on_device, served.pages_fetched = on_device, fetched
            self._loaded(request, event)
        self._run(request, attempt, now)

    def fetch_incomplete(self, request: Request, attempt: Attempt, event: messages.FetchIncomplete, now: float) -> None:
        """A fetch ended short: the prefill worker has died, perhaps, and we have not noticed yet; or its pages have
        been evicted since. Whichever, it is not asked again for this request."""
        self._accept(request, attempt, now)  # or nothing could have been fetched: so this counts as an attempt
        if attempt.prefill is not None:
            request.history.excluded.add(attempt.prefill)
        # the link may be cut, not the store
        request.history.excluded.update(source.store for source in attempt.placement.sources)
        member = self._members.require_live(attempt.decode)
        why = f"{member.peer.name} has only {event.pages} of {attempt.placement.fetch_pages} pages: {event.message}"
        self._manager.retry(request, why, now)

    def _run(self, request: Request, attempt: Attempt, now: float) -> None:
        """The prompt is covered, so the prefill worker's leases are not needed any more. Its account may come a
        moment later than the pages, and is waited for."""
        if attempt.phase is RequestPhase.RUNNING:
            return
        self._accept(request, attempt, now)
        attempt.phase, request.queueing.yielded = RequestPhase.RUNNING, None
        request.timeline.started = now
        self._compare(request, attempt, now)
        if attempt.prefilled or not attempt.prefill_sent:
            self._manager.release_prefill(request, attempt)

    def _compare(self, request: Request, attempt: Attempt, now: float) -> None:
        """Record predicted and actual load times, for explanations."""
        took = now - (request.timeline.placed or now)
        served = request.account.served
        loads = f"; loads took {served.load_ms} ms, predicted {served.predicted_ms} ms" if served.load_ms else ""
        text = f"started in {took:.3f} s, predicted {attempt.placement.predicted.total:.3f} s{loads}"
        self._out.log(f"attempt {attempt.name.attempt} {text}", request.name, detail=True)

    def _loaded(self, request: Request, event: messages.Started | messages.Prefilled) -> None:
        predicted, took = min(event.predicted_ms, _MOST_MS), min(event.load_ms, _MOST_MS)
        request.account.served.predicted_ms += predicted
        request.account.served.load_ms += took
        self._scores.add_pair("fetch", predicted / 1_000, took / 1_000)

    def _pages(self, request: Request) -> int:
        """Return the pages of all tokens of a request: a worker's account never tells of more."""
        return -(-request.known // self._config.pages.page_size)

    def delta(self, request: Request, attempt: Attempt, delta: Delta, now: float) -> None:
        """Emit what is new of it, once and in order."""
        skip = request.known - delta.position
        if skip < 0 or request.unscored:
            self._gap(request, attempt)
            return
        if skip > len(delta.tokens):
            return
        new, logprobs = delta.tokens[skip:], delta.logprobs[skip:]
        if problem := self._problem(request, new, logprobs):
            self._manager.retry(
                request, f"{self._members.require_live(attempt.decode).peer.name} sent {problem}", now, blame=True
            )
            return
        self._run(request, attempt, now)
        computed = min(delta.computed, attempt.start)
        if delta.verified:
            self._explanations.speculated(request, delta.verified, delta.accepted, delta.saved)
            verified, accepted = attempt.speculated(delta.verified, delta.accepted)
            served = request.account.served
            served.drafts += verified > 0
            served.draft_tokens += verified
            served.accepted_tokens += accepted
        if request.account.decode_computed is None and delta.position == attempt.start:
            request.account.decode_computed = computed
        if new:
            if request.known == attempt.start:
                self._members.require_live(attempt.decode).prefill_done(attempt.name, now)
                self._explanations.first_token(request, computed, now)
                if delta.chosen:
                    self._explanations.noted(request, self._choice(request, delta.chosen))
            request.extend(new)
            attempt.progressed_at = now
            request.history.failures = request.history.fruitless = 0
            if request.timeline.first_token is None:
                request.timeline.first_token = now
                self._scores.add_pair("ttft", attempt.placement.predicted.total, now - (request.timeline.placed or now))
                self._admission.began(request, now)
            self._counts.generated_tokens += len(new)
            self._utilization.generated(len(new), request.known)
            self._admission.generated(request, len(new))
            self._out.put(Emit(request.name, attempt.decode, new, logprobs))
        if delta.finish is not None:
            began, rest = request.timeline.first_token, request.generated - 1
            if began is not None and rest and request.history.attempts == 1:
                self._scores.add_pair("tpot", attempt.placement.tpot, (now - began) / rest)
            self._manager.end(request, Finished(delta.finish), now)
        elif new:
            self._manager.may_yield(request, now)

    def _choice(self, request: Request, chosen: Sequence[int]) -> str:
        pages, shown = -(-request.prompt // self._config.pages.page_size), ", ".join(map(str, chosen[:_SHOWN]))
        more = ", …" if len(chosen) > _SHOWN else ""
        return f"of the prompt's {pages} pages the output keeps {len(chosen)} beside sinks and window: {shown}{more}"

    def prompt_scored(self, request: Request, attempt: Attempt, event: messages.PromptLogprobs, now: float) -> None:
        """Emit what is new of the prompt's log-probabilities, once and in order."""
        if not request.unscored:
            return
        skip = request.prompt_scored - event.position
        if skip < 0:
            self._gap(request, attempt)
            return
        if not (new := event.logprobs[skip:]):
            return
        problem = self._wrong_scores(new)
        if request.prompt_scored + len(new) > request.prompt:
            problem = "more log-probabilities than prompt tokens"
        if problem:
            name = self._members.require_live(attempt.decode).peer.name
            self._manager.retry(request, f"{name} sent {problem}", now, blame=True)
            return
        self._run(request, attempt, now)
        attempt.progressed_at = now
        request.prompt_scored += len(new)
        self._out.put(Emit(request.name, attempt.decode, prompt_logprobs=new))

    def _problem(self, request: Request, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> str:
        """What no worker in its right mind says; empty: all is well."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._limits.vocab_size:
            return "tokens that are not in the vocabulary"
        if request.max_tokens is not None and request.generated + len(tokens) > request.max_tokens:
            return f"more than {request.max_tokens} tokens"
        if len(logprobs) != (len(tokens) if request.spec.sampling.logprobs is not None else 0):
            return f"{len(logprobs)} log-probabilities for {len(tokens)} tokens"
        if any(each.token != token for each, token in zip(logprobs, tokens, strict=bool(logprobs))):
            return "log-probabilities of other tokens"
        return self._wrong_scores(logprobs)

    def _wrong_scores(self, logprobs: Sequence[TokenLogprob]) -> str:
        """What is wrong with log-probabilities; empty: nothing."""
        most = self._limits.vocab_size
        for each in logprobs:
            named = (each.token, *(token for token, _ in each.top))
            rank = each.rank if isinstance(each, PromptTokenLogprob) else 1
            if not 0 <= min(named) <= max(named) < most or rank > most:
                return "log-probabilities of tokens that are not in the vocabulary"
            if isnan(each.logprob) or any(isnan(logprob) for _, logprob in each.top):
                return "log-probabilities that are no numbers"
        return ""

    def _gap(self, request: Request, attempt: Attempt) -> None:
        if attempt.last_resend != request.awaited:  # once; if that gets lost, heartbeats will tell
            attempt.last_resend = request.awaited
            self.resend(request, attempt)

    def resend(self, request: Request, attempt: Attempt) -> None:
        self._counts.resends += 1
        self._out.send(attempt.decode, Resend(request.name, attempt.name.attempt, request.awaited))

    # --- what prefill workers say ------------------------------------------------------------------------------------

    def prefilled(self, request: Request, attempt: Attempt, event: messages.Prefilled, now: float) -> None:
        if attempt.prefilled:
            return
        attempt.prefill_unreported = 0
        served, pages, computed = request.account.served, self._pages(request), min(event.computed, attempt.start)
        hit, stored = min(event.hit, pages), min(event.stored, pages)
        served.tokens_computed += computed
        self._explanations.prefilled(request, computed)
        if attempt.prefill is not None:
            worker = self._members.require_live(attempt.prefill).peer.name
            self._counts.count_pages(worker, stored=stored, hits=hit)
        served.pages_hit += hit
        served.pages_shipped += stored
        served.prefill_queue_ms = min(event.queue_ms, _MOST_MS)
        served.prefill_compute_ms = min(event.compute_ms, _MOST_MS)
        if (plan := attempt.placement).helpers:
            chunks = -(-(plan.fetch_pages - plan.cached_pages) // plan.chunk_pages)
            workers = 1 + len(plan.helpers)
            own = -(-chunks // workers) * plan.chunk_pages * self._config.pages.page_size
            if 0 < computed - attempt.helped <= own:  # together, to the end
                self._manager.view.table.ring_took(workers, event.compute_ms / 1_000, plan.predicted.compute)
        self._loaded(request, event)
        self.prefill_ended(request, attempt, now)

    def prefill_ended(self, request: Request, attempt: Attempt, now: float) -> None:
        """The prefill worker has made every page, whether or not we heard its account."""
        attempt.prefilled, attempt.progressed_at = True, now
        self._manager.release_helpers(request, attempt)
        request.timeline.prefilled = now
        if attempt.prefill is not None:  # it still holds the pages, but has a slot for another prompt
            member = self._members.require_live(attempt.prefill)
            member.prefill_done(attempt.name)
            member.assigned[attempt.name].pages = 0
            member.clear_busy()
            if attempt.phase is RequestPhase.RUNNING:
                self._manager.release_prefill(request, attempt)

    def prefill_refused(self, request: Request, attempt: Attempt, refusal: messages.Refused, now: float) -> None:
        """Ask another prefill worker of that node, because the decode worker's store gets the pages from its store.
        Otherwise make a new attempt. A worker without room now may have some by its next heartbeat, since another
        router was quicker. A prompt that never finds room there is computed elsewhere."""
        assert attempt.prefill is not None, attempt.name
        if not attempt.needs_prefill:
            self._manager.release_prefill(request, attempt)
            return
        self._manager.release_helpers(request, attempt)
        member = self._members.require_live(attempt.prefill)
        if refusal.reason == "busy":
            member.mark_busy(attempt.name)
            request.history.busy_refusals += 1
        member.unassign(attempt.name)
        self._explanations.noted(request, f"{member.peer.name} refuses to prefill: {refusal.message}")
        attempt.prefill, attempt.prefill_sent, attempt.prefill_unreported = None, False, 0
        if refusal.reason != "busy" or request.history.busy_refusals >= _TURNED_AWAY:
            request.history.excluded.add(member.incarnation)
        most = self._config.prefill.max_num_seqs
        if (other := self._members.another_prefill(member.peer.node, most, request.history.excluded)) is not None:
            attempt.prefill = other.incarnation
            missing = request.missing_tokens(attempt.placement.cached_pages, self._config.pages.page_size)
            known = attempt.placement.cached_pages * self._config.pages.page_size
            prompt = PendingPrefill(missing, known, fills_gap=request.lowest)
            other.assign_prefill(attempt.name, prompt, now)
            self._send_prefill(request, attempt, other.incarnation, now)
            return
        self._manager.retry(request, f"{member.peer.name} refuses to prefill: {refusal.message}", now, free=True)

    def _send_prefill(self, request: Request, attempt: Attempt, prefill: str, now: float) -> None:
        count = min(attempt.start - 1, request.exact(self._config.pages.page_size))
        plan, ring, workers = attempt.placement, None, 1 + len(attempt.helpers)
        if attempt.helpers:
            ring = RingPart(plan.cached_pages, plan.chunk_pages, place=0, workers=workers)
        message = Prefill(
            request=request.name,
            attempt=attempt.name.attempt,
            root=request.root,
            tokens=bytes(request.tokens[: count * messages.TOKEN_BYTES]),
            sources=attempt.placement.prefill_sources,
            priority=request.spec.priority,
            deadline_ms=request.left_ms(now),
            adapter=request.adapter_digest,
            ring=ring,
        )
        for place, helper in enumerate(attempt.helpers, 1):
            part = replace(message, ring=RingPart(plan.cached_pages, plan.chunk_pages, place, workers))
            pages = (plan.fetch_pages - plan.cached_pages) // workers
            work = AssignedAttempt(self._out.send(helper, part), pages)
            self._members.require_live(helper).assign(attempt.name, work)
        member = self._members.require_live(prefill)
        work = AssignedAttempt(
            self._out.send(prefill, message), attempt.placement.fetch_pages - attempt.placement.cached_pages
        )
        member.assign(attempt.name, work)
        attempt.prefill_sent = True
        attempt.prefill_unreported = request.missing_tokens(
            attempt.placement.cached_pages, self._config.pages.page_size
        )
        request.account.served.prefill_worker = member.peer.name
        request.timeline.prefill_sent = now

    # --- what both say -----------------------------------------------------------------------------------------------

    def worker_failed(
        self, request: Request, attempt: Attempt, member: MemberRecord, event: messages.AttemptFailed, now: float
    ) -> None:
        """A worker gives an attempt up. What it says about the request itself is final; about itself, it is not."""
        if member.incarnation == attempt.prefill and not attempt.needs_prefill:
            self._manager.release_prefill(request, attempt)
            return
        member.unassign(attempt.name)
        error = from_reason(event.reason, event.message)
        if isinstance(error, InvalidRequest | DeadlineExpired | NonFiniteLogits):
            self._manager.end(request, Failed(error), now)
            return
        if member.incarnation == attempt.prefill:
            # a decode worker that can't, or has no store, is not asked again for this prompt
            request.history.decode_only = True
        why = f"{member.peer.name} failed: {event.reason}: {event.message}"
        self._manager.retry(request, why, now, reported=True, blame=member.incarnation == attempt.decode)
