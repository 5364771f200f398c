"""The life of requests: what each event means for the one request it is about. See `router.request` for the automaton.

Owns the requests and their queue; gives work to members and takes it back. Judging members (who is live, what a
heartbeat lacks) is `router.state`'s part, which calls `retry` and `lost` here. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from baton import messages
from baton.config import Config
from baton.errors import (
    AttemptsExhausted,
    BatonError,
    ContextTooLong,
    DeadlineExpired,
    InvalidRequest,
    Overloaded,
    Unavailable,
    from_reason,
)
from baton.messages import AttemptName, Cancel, Decode, Delta, Prefill, Resend
from kvstore.keys import namespace_root
from router.admission import ModelLimits, Queue, check_tokens, settle_length
from router.candidates import decode_candidates, prefill_candidates, takes_work
from router.events import Cancelled, Emit, End, Failed, Finished, Outcome, Submit
from router.outbox import Outbox
from router.peers import Member, Members, Work
from router.placement import Plan, Wait, pick_prefill, place
from router.prefixes import Prefixes
from router.request import Attempt, Phase, Request

_LOOK_AHEAD = 64  # queued requests that are tried when the first can't be placed


@dataclass
class Counts:
    """What has happened since the start."""

    attempts: int = 0
    split: int = 0
    local: int = 0
    resends: int = 0
    prompt_tokens: int = 0  # of requests that finished
    cached_tokens: int = 0  # of requests that finished
    generated_tokens: int = 0


class Life:
    """Every request that has not ended."""

    def __init__(
        self, config: Config, limits: ModelLimits, members: Members, prefixes: Prefixes, outbox: Outbox
    ) -> None:
        self._config = config
        self._limits = limits
        self._members = members
        self._prefixes = prefixes
        self._out = outbox
        self._arrivals = 0
        self._shut = False
        self.requests: dict[str, Request] = {}
        self.queue = Queue()
        self.room = False  # something has changed that may let a queued request be placed
        self.counts = Counts()
        self.finished: Counter[str] = Counter()  # by reason
        self.failed: Counter[str] = Counter()  # by reason
        self.cancelled = 0

    # --- coming in ---------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit, now: float) -> None:
        """Raises InvalidRequest for a name in use, since no outcome could be told apart then; everything else that is
        wrong with a request ends it as Failed."""
        if submit.request in self.requests:
            raise InvalidRequest(f"request {submit.request!r} is being served already")
        self._arrivals += 1
        request = Request.from_submit(submit, self._arrivals, now)
        self.requests[request.name] = request
        try:
            if self._shut:
                raise Unavailable("this router is stopping")
            check_tokens(submit.tokens, self._limits.vocab_size)
            self._settle_length(request)
        except BatonError as error:
            self.end(request, Failed(error), now)
            return
        self._enqueue(request, now)
        self.settle(now)
        if request in self.queue and len(self.queue) > self._config.router.max_queued:
            message = f"{len(self.queue) - 1} requests wait for a worker already"
            self.end(request, Failed(Overloaded(message, self.queue.retry_after_ms(now))), now)

    def _settle_length(self, request: Request) -> None:
        """Raises InvalidRequest or ContextTooLong. Without a worker, an open length stays open."""
        card, pool = self._members.card, self._members.largest_pool
        context = min(self._limits.max_context, card.max_context) if card else self._limits.max_context
        pool_tokens = None if pool is None else pool * self._config.pages.page_size
        length = settle_length(request.prompt, request.max_tokens, context, pool_tokens)
        if pool is not None:
            request.max_tokens = length

    # --- placing -----------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Place what can be placed, if there may be room now: call when an event has been handled."""
        if self.room:
            self.room = False
            self._drain(now)

    def _drain(self, now: float) -> None:
        """In order of service. Who can't be placed is passed by: what one prompt waits for (a prefill slot) another may
        not need."""
        tried = 0
        for request in self.queue if len(self.queue) else ():
            if tried >= _LOOK_AHEAD or not any(takes_work(member) for member in self._members.of("decode")):
                return
            tried += not self._place(request, now)

    def _place(self, request: Request, now: float) -> bool:
        card = self._members.card
        if card is None:
            return False
        root = namespace_root(card.namespace, request.tenant)
        if request.generated and root != request.root:
            message = "the model was replaced while this request was being served"
            self.end(request, Failed(Unavailable(message)), now)
            return True
        if request.max_tokens is None:
            try:
                self._settle_length(request)
            except BatonError as error:
                self.end(request, Failed(error), now)
                return True
        request.derive_keys(root, self._config.pages.page_size)
        final = request.failures >= self._config.router.max_attempts - 1
        held = {holder: match.pages for holder, match in self._prefixes.match(request.keys).items()}
        needs = -(-(request.prompt + (request.max_tokens or 1)) // self._config.pages.page_size)
        decoders = decode_candidates(self._members, held, needs, request.failed_on)
        prefillers = prefill_candidates(self._members, held, self._config.prefill.max_prompts, request.failed_on)
        choice = place(len(request.keys), decoders, prefillers, local=final or request.local)
        if isinstance(choice, Wait):
            return False
        self._begin(request, choice, now)
        return True

    def _begin(self, request: Request, plan: Plan, now: float) -> None:
        self.queue.discard(request)
        request.attempts += 1
        name = AttemptName(request.name, request.attempts)
        request.attempt = Attempt(name, plan, request.known, now, plan.decode, plan.prefill)
        _start_over(request, now)
        self.counts.attempts += 1
        self.counts.split += plan.prefill is not None
        self.counts.local += plan.prefill is None
        decoder = self._member(plan.decode)
        if plan.prefill is not None:
            self._member(plan.prefill).slots.add(name)
        if request.decode_workers[-1:] != [decoder.peer.name]:
            request.decode_workers.append(decoder.peer.name)
        assert request.max_tokens is not None, request.name
        message = Decode(
            request=request.name,
            attempt=name.attempt,
            root=request.root,
            tokens=bytes(request.tokens),
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            fetch=plan.fetch,
            awaited=plan.awaited,
            priority=request.priority,
            deadline_ms=_left_ms(request, now),
        )
        pages = -(-request.known // self._config.pages.page_size)
        decoder.work[name] = Work(self._out.send(plan.decode, message), pages)
        decoder.unanswered.add(name)
        split = f", prefill by {self._member(plan.prefill).peer.name}" if plan.prefill else ""
        self._out.note(
            f"attempt {name.attempt} on {decoder.peer.name}{split}: {len(request.keys)} pages, {plan.cached} cached, "
            f"{plan.fetch} to fetch",
            request.name,
        )

    # --- what decode workers say -------------------------------------------------------------------------------------

    def accepted(self, request: Request, attempt: Attempt, device: int, now: float) -> None:
        """The decode worker has reserved its pages: only now may a prefill worker be set to work (rule 4)."""
        if attempt.phase is not Phase.PLACED:
            return
        self._accept(request, attempt, now)
        if attempt.prefill is None:
            return
        if device >= attempt.plan.fetch:
            self._release_prefill(request, attempt)  # nothing is missing after all
        else:
            self._send_prefill(request, attempt, attempt.prefill, now)

    def _accept(self, request: Request, attempt: Attempt, now: float) -> None:
        """It has been accepted, whether or not we ever heard it said."""
        self._member(attempt.decode).unanswered.discard(attempt.name)
        if attempt.phase is Phase.PLACED:
            attempt.phase, attempt.progress = Phase.PREPARING, now
            request.timeline.accepted = now
            request.give_up = None

    def refused(self, request: Request, attempt: Attempt, refusal: messages.Refused, now: float) -> None:
        """The decode worker has no room. Nothing was done, so the budget of attempts is not touched."""
        if attempt.phase is not Phase.PLACED:
            return
        member = self._member(attempt.decode)
        if refusal.reason == "too_large":
            self.end(request, Failed(ContextTooLong(f"{member.peer.name}: {refusal.message}")), now)
            return
        member.busy_since = member.work[attempt.name].sequence
        member.drop(attempt.name)
        self._out.note(f"attempt {attempt.name.attempt}: {member.peer.name} is busy", request.name)
        self._withdraw(request)
        self._enqueue(request, now)

    def started(self, request: Request, attempt: Attempt, event: messages.Started, now: float) -> None:
        attempt.progress = now
        if attempt.phase is not Phase.RUNNING:  # a preempted sequence says it again when it resumes
            request.pages_on_device, request.pages_fetched = event.device_pages, event.fetched_pages
        self._run(request, attempt, now)

    def short(self, request: Request, attempt: Attempt, event: messages.Have, now: float) -> None:
        """A fetch ended short: the prefill worker has died, perhaps, and we have not noticed yet; or its pages have
        been evicted since. Whichever, it is not asked again for this request."""
        self._accept(request, attempt, now)  # or nothing could have been fetched: so this counts as an attempt
        if attempt.prefill is not None:
            request.failed_on.add(attempt.prefill)
        member = self._member(attempt.decode)
        why = f"{member.peer.name} has only {event.pages} of {attempt.plan.fetch} pages: {event.message}"
        self.retry(request, why, now)

    def _run(self, request: Request, attempt: Attempt, now: float) -> None:
        """The prompt is covered: nobody needs the prefill worker's holds any more."""
        if attempt.phase is Phase.RUNNING:
            return
        self._accept(request, attempt, now)
        attempt.phase = Phase.RUNNING
        request.timeline.started = now
        self._release_prefill(request, attempt)

    def delta(self, request: Request, attempt: Attempt, delta: Delta, now: float) -> None:
        """Emit what is new of it, once and in order."""
        skip = request.known - delta.position
        if skip < 0:
            self._gap(request, attempt)
            return
        if skip > len(delta.tokens):
            return
        new, logprobs = delta.tokens[skip:], delta.logprobs[skip:]
        if problem := self._problem(request, new, logprobs):
            self.retry(request, f"{self._member(attempt.decode).peer.name} sent {problem}", now, blame=True)
            return
        self._run(request, attempt, now)
        if request.decode_computed is None and delta.position == attempt.start:
            request.decode_computed = delta.computed
        if new:
            request.extend(new)
            attempt.progress = now
            request.failures = 0
            if request.timeline.first_token is None:
                request.timeline.first_token = now
            self.counts.generated_tokens += len(new)
            self._out.put(Emit(request.name, new, logprobs))
        if delta.finish is not None:
            self.end(request, Finished(delta.finish), now)

    def _problem(self, request: Request, tokens: tuple[int, ...], logprobs: tuple[object, ...]) -> str:
        """What no worker in its right mind says; empty: all is well."""
        if any(not 0 <= token < self._limits.vocab_size for token in tokens):
            return "tokens that are not in the vocabulary"
        if request.max_tokens is not None and request.generated + len(tokens) > request.max_tokens:
            return f"more than {request.max_tokens} tokens"
        if logprobs and len(logprobs) != len(tokens):
            return f"{len(logprobs)} log-probabilities for {len(tokens)} tokens"
        return ""

    def _gap(self, request: Request, attempt: Attempt) -> None:
        if attempt.asked_from != request.known:  # once; if that gets lost, heartbeats will tell
            attempt.asked_from = request.known
            self.resend(request, attempt)

    def resend(self, request: Request, attempt: Attempt) -> None:
        self.counts.resends += 1
        self._out.send(attempt.decode, Resend(request.name, attempt.name.attempt, request.known))

    # --- what prefill workers say ------------------------------------------------------------------------------------

    def prefilled(self, request: Request, attempt: Attempt, event: messages.Prefilled, now: float) -> None:
        if attempt.prefilled:
            return
        attempt.prefilled, attempt.predicted, attempt.progress = True, 0, now
        request.timeline.prefilled = now
        request.prefill_computed += event.computed
        request.pages_hit += event.hit
        request.pages_shipped += event.shipped
        request.prefill_queue_ms, request.prefill_compute_ms = event.queue_ms, event.compute_ms
        if attempt.prefill is not None:  # it still holds the pages, but has a slot for another prompt
            member = self._member(attempt.prefill)
            member.slots.discard(attempt.name)
            member.work[attempt.name].pages = 0
            member.busy_since = None
            self.room = True

    def prefill_refused(self, request: Request, attempt: Attempt, refusal: messages.Refused, now: float) -> None:
        """Another one of that node, or the decode worker itself."""
        assert attempt.prefill is not None, attempt.name
        member = self._member(attempt.prefill)
        if refusal.reason == "busy":
            member.busy_since = member.work[attempt.name].sequence
        member.drop(attempt.name)
        attempt.prefill, attempt.prefill_sent, attempt.predicted = None, False, 0
        avoid = {*request.failed_on, member.incarnation}
        others = prefill_candidates(self._members, {}, self._config.prefill.max_prompts, avoid)
        if (other := pick_prefill(others, member.peer.node)) is not None:
            attempt.prefill = other.incarnation
            self._member(other.incarnation).slots.add(attempt.name)
            self._send_prefill(request, attempt, other.incarnation, now)
            return
        request.local = True
        self.retry(request, f"{member.peer.name} refuses to prefill: {refusal.message}", now, free=True)

    def _send_prefill(self, request: Request, attempt: Attempt, prefill: str, now: float) -> None:
        size = self._config.pages.page_size
        tokens = bytes(request.tokens[: attempt.plan.fetch * size * messages.TOKEN_BYTES])
        message = Prefill(
            request=request.name,
            attempt=attempt.name.attempt,
            root=request.root,
            tokens=tokens,
            priority=request.priority,
            deadline_ms=_left_ms(request, now),
        )
        member = self._member(prefill)
        work = Work(self._out.send(prefill, message), attempt.plan.fetch - attempt.plan.cached)
        member.work[attempt.name] = work
        attempt.prefill_sent = True
        attempt.predicted = request.missing_tokens(attempt.plan.cached, size)
        request.prefill_worker = member.peer.name
        request.timeline.prefill_sent = now

    def _release_prefill(self, request: Request, attempt: Attempt) -> None:
        """The prefill worker forgets this attempt, done or not."""
        prefill, attempt.prefill = attempt.prefill, None
        self.room = True
        if prefill is None or (member := self._members.get(prefill)) is None:
            return
        if member.drop(attempt.name):
            self._out.send(prefill, Cancel(request.name, attempt.name.attempt))

    # --- attempts end ------------------------------------------------------------------------------------------------

    def worker_failed(
        self, request: Request, attempt: Attempt, member: Member, event: messages.Failed, now: float
    ) -> None:
        """A worker gives an attempt up. What it says about the request itself is final; about itself, it is not."""
        member.drop(attempt.name)
        error = from_reason(event.reason, event.message)
        if isinstance(error, InvalidRequest | DeadlineExpired):
            self.end(request, Failed(error), now)
            return
        if member.incarnation == attempt.prefill:
            request.local = True  # who can't, or whose store can't, is not asked again for this prompt
        why = f"{member.peer.name} failed: {event.reason}: {event.message}"
        self.retry(request, why, now, blame=member.incarnation == attempt.decode)

    def member_gone(self, member: Member, now: float) -> None:
        """`member` is no longer listed; whatever it had is placed anew."""
        names = {*member.work, *member.slots}
        if member.peer.role == "store":
            names = {name for name, attempt in self._attempts() if self._fetches_from(attempt, member)}
        for name in sorted(names):
            member.drop(name)
            request = self.requests.get(name.request)
            if request is None or request.attempt is None or request.attempt.name != name:
                continue
            attempt = request.attempt
            needed = member.incarnation != attempt.prefill or not attempt.prefilled
            if member.incarnation == attempt.prefill:
                attempt.prefill = None
            if needed:
                self.retry(request, f"{member.peer.name} is gone: {member.gone}", now)

    def _attempts(self) -> list[tuple[AttemptName, Attempt]]:
        return [(r.attempt.name, r.attempt) for r in self.requests.values() if r.attempt is not None]

    def _fetches_from(self, attempt: Attempt, store: Member) -> bool:
        if attempt.phase is Phase.RUNNING or attempt.plan.fetch == 0:
            return False
        decoder = self._members.get(attempt.decode)
        return decoder is not None and decoder.peer.node == store.peer.node

    def retry(self, request: Request, why: str, now: float, *, free: bool = False, blame: bool = False) -> None:
        """The current attempt is over; the next one knows every token so far. `free`: it does not count against the
        budget; `blame`: its decode worker is chosen again only if there is no other."""
        attempt = request.attempt
        assert attempt is not None, request.name
        self._out.note(f"attempt {attempt.name.attempt} is over: {why}", request.name, warning=not free)
        if blame:
            request.failed_on.add(attempt.decode)
        request.failures += attempt.phase is not Phase.PLACED and not free
        self._withdraw(request)
        if request.failures >= self._config.router.max_attempts:
            message = f"{request.attempts} attempts failed; the last because {why}"
            self.end(request, Failed(AttemptsExhausted(message)), now)
            return
        self._enqueue(request, now)

    def _enqueue(self, request: Request, now: float) -> None:
        """Wait for a worker. Whoever comes back unaccepted goes on with the wait it had."""
        if request.give_up is None:
            request.give_up = now + self._config.router.queue_ms / 1_000
        self.queue.add(request)
        self.room = True

    def _withdraw(self, request: Request) -> None:
        """Everybody involved in the current attempt forgets it."""
        attempt, request.attempt = request.attempt, None
        if attempt is None:
            return
        request.unreported += attempt.predicted
        self._release_prefill(request, attempt)
        decoder = self._members.get(attempt.decode)
        if decoder is not None and decoder.drop(attempt.name):
            self._out.send(attempt.decode, Cancel(request.name, attempt.name.attempt))
            if attempt.phase is not Phase.PLACED:
                decoder.busy_since = None  # it has given pages back
        self.room = True

    # --- requests end ------------------------------------------------------------------------------------------------

    def end(self, request: Request, outcome: Outcome, now: float, completion: int | None = None) -> None:
        """The one way out. `completion`: how many tokens count, if not all."""
        request.timeline.ended = now
        summary = request.summary(completion)
        self._withdraw(request)
        self.queue.discard(request)
        del self.requests[request.name]
        match outcome:
            case Finished(reason=reason):
                self.finished[reason] += 1
                self.counts.prompt_tokens += summary.usage.prompt
                self.counts.cached_tokens += summary.usage.cached
                self._out.note(f"finished: {reason}, {summary.usage}", request.name)
            case Failed(error=error):
                self.failed[error.reason] += 1
                self._out.note(
                    f"failed: {error.reason}: {error}", request.name, warning=not isinstance(error, InvalidRequest)
                )
            case Cancelled(why=why):
                self.cancelled += 1
                self._out.note(f"cancelled: {why}", request.name)
        self._out.put(End(request.name, outcome, summary))

    def expire(self, now: float) -> None:
        """Everything that has waited for too long: a client, a place in the queue, an attempt."""
        for request in list(self.requests.values()):
            attempt = request.attempt
            if request.deadline is not None and now >= request.deadline:
                message = f"the deadline passed after {request.generated} of {request.max_tokens} tokens"
                self.end(request, Failed(DeadlineExpired(message)), now)
            elif request.give_up is not None and now >= request.give_up:
                self.end(request, Failed(self._no_place(now)), now)
            elif attempt is not None and now - attempt.progress >= self._config.router.progress_ms / 1_000:
                self.retry(request, f"no progress for {self._config.router.progress_ms} ms", now, blame=True)

    def shut(self, now: float) -> None:
        """Nobody is served any more, and the workers need not find that out by our silence."""
        self._shut = True
        for request in list(self.requests.values()):
            self.end(request, Failed(Unavailable("this router is stopping")), now)

    def _no_place(self, now: float) -> BatonError:
        waited = f"no worker took the request within {self._config.router.queue_ms} ms"
        if not self._members.of("decode"):
            return Unavailable(f"{waited}: no decode worker is live")
        return Overloaded(waited, self.queue.retry_after_ms(now))

    def extend(self, seconds: float) -> None:
        """We stood still for so long. What a client asked for does not wait for us; all else does."""
        for request in self.requests.values():
            if request.give_up is not None:
                request.give_up += seconds
            if request.attempt is not None:
                request.attempt.progress += seconds

    def _member(self, incarnation: str) -> Member:
        member = self._members.get(incarnation)
        assert member is not None, f"{incarnation} has an attempt and is not live"
        return member

    def validate(self) -> None:
        """Check every invariant; for tests."""
        expected: dict[str, set[AttemptName]] = {member.incarnation: set() for member in self._members}
        slots: dict[str, set[AttemptName]] = {member.incarnation: set() for member in self._members}
        for request in self.requests.values():
            attempt = request.attempt
            assert (attempt is None) == (request in self.queue), request.name
            assert attempt is not None or request.give_up is not None, f"{request.name} waits without a limit"
            if attempt is None:
                continue
            expected[attempt.decode].add(attempt.name)
            if attempt.prefill is not None:
                if attempt.prefill_sent:
                    expected[attempt.prefill].add(attempt.name)
                if not attempt.prefilled:
                    slots[attempt.prefill].add(attempt.name)
        for member in self._members:
            assert set(member.work) == expected[member.incarnation], member.peer.name
            assert member.slots == slots[member.incarnation], member.peer.name


def _start_over(request: Request, now: float) -> None:
    """A new attempt overwrites the instants between `placed` and `started`."""
    line = request.timeline
    line.placed = now
    line.accepted = line.prefill_sent = line.prefilled = line.started = None
    request.prefill_worker = ""
    request.prefill_queue_ms = request.prefill_compute_ms = None
    request.pages_on_device = request.pages_fetched = 0


def _left_ms(request: Request, now: float) -> int | None:
    return None if request.deadline is None else max(1, int((request.deadline - now) * 1_000))
