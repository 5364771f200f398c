"""Why recent requests were served as they were: what placement weighed, what it predicted, and what came of it.

Owns a record of each of the last requests, running ones included, with an account of each attempt. Without a reader it
costs a few microseconds a request: the inputs of placement are kept as they were, and laid out as candidates on demand.
Pure.
"""

# pyright: strict

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from baton.operator_api import CascadeChoice
from baton.timeline import Timeline
from router.events import RequestOutcome, Summary
from router.placement.types import Candidate, Placement
from router.request import Attempt, Request

SHOWN = 16  # candidates of an attempt that are told, at most: the best
_ALIKE = 5e-5  # seconds: what is shown as 0.0 ms
_TERMS = {
    "queue": "queueing",
    "load": "loading",
    "compute": "computing",
    "transfer": "the way between nodes",
    "wait": "waiting for a decode worker",
    "step": "the first step",
    "delay": "late answers",
}
_ATTEMPTS = 16  # of one request, the last; a request that waits for a full cluster may be refused hundreds of times
_ROWS = 100_000  # workers in all that was weighed: some 20 MB; with 64 of them, 1,500 attempts


@dataclass(frozen=True, slots=True)
class ConsideredPlacements:
    """What placement chose from: `rows` workers, and what lays the candidates out."""

    rows: int
    candidates: Callable[[], Sequence[Candidate]]


@dataclass(slots=True)
class AttemptAccount:
    """One attempt: the choice, and what happened."""

    number: int
    placement: Placement
    decode: str  # name
    prefill: str  # name; "": the decode worker computes the prompt itself
    start: int  # tokens known when it began
    cached: int  # of those, how many need no computing, as predicted
    timeline: Timeline  # the request's own while the attempt is current; afterwards a copy
    considered: ConsideredPlacements | None  # none: it was too long ago
    attempt: Attempt | None  # while it is current
    first_token: float | None = None  # of this attempt
    prefill_computed: int = 0
    unreported: int = 0  # tokens that its prefill worker was asked to compute and has not accounted for
    decode_computed: int | None = None
    verified: int = 0  # proposals, by the decode worker's steps
    accepted: int = 0
    saved: float = 0.0  # seconds, by speculation
    ended: float | None = None
    end_reason: str = ""  # why it ended; "": it has not, or it brought the request to its end
    notes: list[str] = field(default_factory=list[str])

    @property
    def actually_cached(self) -> int | None:
        """Tokens that no worker computed for this attempt; none before the first token."""
        if self.decode_computed is None:
            return None
        unreported = self.attempt.prefill_unreported if self.attempt else self.unreported
        return max(0, self.start - self.prefill_computed - unreported - self.decode_computed)

    @property
    def predicted_ttft(self) -> float | None:
        """From the request's receipt, seconds; none where an earlier attempt had brought the first token."""
        if self.timeline.placed is None or self.resumes:
            return None
        return self.timeline.placed - self.timeline.received + self.placement.predicted.total

    @property
    def resumes(self) -> bool:
        """The request had its first token already."""
        first, placed = self.timeline.first_token, self.timeline.placed
        return first is not None and placed is not None and first < placed

    def candidates(self) -> tuple[list[Candidate], int]:
        """The best of those that were weighed, the chosen one among them, and how many more there were."""
        if self.considered is None:
            return [], 0
        every = list(self.considered.candidates())
        if not any(map(self.chose, every)):  # placement lays out the best of each kind only
            every.append(Candidate(self.decode, self.prefill, self.cached, self.placement.predicted))
        every.sort(key=_merit)
        best = every[:SHOWN]
        if chosen := next((one for one in every[SHOWN:] if self.chose(one)), None):
            best[-1] = chosen
        return best, len(every) - len(best)

    def chose(self, candidate: Candidate) -> bool:
        return (candidate.decode, candidate.prefill) == (self.decode, self.prefill)


@dataclass(slots=True)
class RequestRecord:
    """One request."""

    name: str  # the cluster's name for it
    tenant: str
    priority: int
    session: str  # "": the client names none
    request: Request | None  # while it has not ended
    timeline: Timeline
    attempts: deque[AttemptAccount] = field(default_factory=lambda: deque[AttemptAccount](maxlen=_ATTEMPTS))
    attempts_begun: int = 0  # attempts, also those that are not kept
    refusal: str = ""  # why placement had no worker for it when it was last tried
    considered: ConsideredPlacements | None = None  # and what it looked at then
    outcome: RequestOutcome | None = None
    summary: Summary | None = None
    cascade: CascadeChoice | None = None  # none: it is of no cascade, or the choice is to come

    @property
    def request_id(self) -> str:
        """What the client calls it."""
        return client_name(self.name)

    def candidates(self) -> tuple[list[Candidate], int]:
        """The best of those that were weighed and not chosen, and how many more there were; none once it was placed."""
        every = sorted(self.considered.candidates(), key=_merit) if self.considered else []
        return every[:SHOWN], len(every[SHOWN:])

    @property
    def running(self) -> bool:
        """A worker has it, or was offered it."""
        return self.request is not None and self.request.attempt is not None

    @property
    def waits(self) -> str:
        """Why it has no worker; "": it has one, or has ended."""
        if self.request is None or self.running:
            return ""
        return self.refusal or "no decode worker takes work now, or others come first"

    @property
    def account(self) -> Summary:
        """As it stands, or as it stood in the end."""
        if self.summary is None:
            assert self.request is not None, self.name
            return self.request.summary()
        return self.summary


def reason(account: AttemptAccount, candidates: Sequence[Candidate]) -> str:
    """The choice in words. `candidates`: the best first."""
    chosen = next((one for one in candidates if account.chose(one)), None)
    others = [one for one in candidates if one is not chosen and not one.why_not]
    if chosen is None:
        return ""
    if not others:
        return "the only way there was"
    mine, other = chosen.predicted, others[0]
    ahead = other.predicted.total - mine.total
    saved = {term: getattr(other.predicted, term) - getattr(mine, term) for term in _TERMS}
    if ahead > _ALIKE:
        term = max(saved, key=lambda term: saved[term])
        return f"{_ms(ahead)} quicker than {_who(other)}, most of it {_TERMS[term]} ({_ms(saved[term])} less)"
    behind = "as quick as" if ahead > -_ALIKE else f"{_ms(-ahead)} slower than"
    if chosen.prefill and not other.prefill and other.predicted.compute:
        return f"{behind} {_who(other)}, where the prompt would hold up what decodes"
    if chosen.cached > other.cached:
        return f"{behind} {_who(other)}, with {chosen.cached - other.cached} tokens less to compute"
    return f"{behind} {_who(other)}; less loaded, or next in turn"


def _who(candidate: Candidate) -> str:
    return f"{candidate.decode} with {candidate.prefill}" if candidate.prefill else f"{candidate.decode} alone"


def _ms(seconds: float) -> str:
    return f"{seconds * 1_000:.1f} ms"


def client_name(name: str) -> str:
    """What a client calls the request that the cluster calls `name`."""
    return name.rpartition("-")[0] or name


def _merit(candidate: Candidate) -> tuple[bool, float]:
    return (bool(candidate.why_not), candidate.predicted.total)


class Explanations:
    """The records of the last `most` requests; 0: none is kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._records: dict[str, RequestRecord] = {}  # by name, oldest first
        self._latest: dict[str, RequestRecord] = {}  # by what clients call them: they may use a name twice
        # those with something weighed, oldest first
        self._with_considered: deque[AttemptAccount | RequestRecord] = deque()
        self._rows = 0  # in all of them

    # --- what happens ------------------------------------------------------------------------------------------------

    def submitted(self, request: Request) -> None:
        if not self._most:
            return
        while len(self._records) >= self._most:
            self._forget(next(iter(self._records)))
        spec = request.spec
        record = RequestRecord(request.name, spec.tenant, spec.priority, spec.session, request, request.timeline)
        record.cascade = spec.cascade
        self._records[request.name] = self._latest[record.request_id] = record

    def kept_waiting(self, request: Request, why: str, considered: ConsideredPlacements | None) -> None:
        """No worker is given to it for now."""
        if record := self._records.get(request.name):
            record.refusal = why
            self._keep(record, considered)

    def placed(
        self, request: Request, decode: str, prefill: str, cached: int, considered: ConsideredPlacements | None
    ) -> None:
        """Its current attempt has begun. `decode` and `prefill` are names; `cached` tokens need no computing."""
        attempt = request.attempt
        if (record := self._records.get(request.name)) is None or attempt is None:
            return
        record.attempts_begun += 1
        record.refusal = ""
        self._keep(record, None)
        account = AttemptAccount(
            number=attempt.name.attempt,
            placement=attempt.placement,
            decode=decode,
            prefill=prefill,
            start=attempt.start,
            cached=cached,
            timeline=request.timeline,
            considered=None,
            attempt=attempt,
        )
        record.attempts.append(account)
        self._keep(account, considered)

    def noted(self, request: Request, text: str) -> None:
        """Something worth telling happened to the current attempt, which goes on."""
        if account := self._current(request):
            account.notes.append(text)

    def prefilled(self, request: Request, computed: int) -> None:
        """The prefill worker of the current attempt has computed so many tokens."""
        if account := self._current(request):
            account.prefill_computed += computed

    def first_token(self, request: Request, computed: int, now: float) -> None:
        """The first token of the current attempt is here; the decode worker computed so many tokens for it."""
        if account := self._current(request):
            account.first_token, account.decode_computed = now, computed

    def speculated(self, request: Request, verified: int, accepted: int, saved: float) -> None:
        """The decode worker has verified so many proposals for the current attempt, and saved so many seconds."""
        if account := self._current(request):
            account.verified, account.accepted = verified, min(accepted, verified)
            account.saved = saved if math.isfinite(saved) else 0.0

    def attempt_ended(self, request: Request, why: str, now: float) -> None:
        """The current attempt ends, and the request does not. Call before the attempt is withdrawn."""
        if account := self._current(request):
            self._close(account, replace(request.timeline), now)
            account.end_reason = why

    def request_ended(self, request: Request, outcome: RequestOutcome, summary: Summary, now: float) -> None:
        """The request ends, and its current attempt, if it has one, with it. Call before that is withdrawn."""
        if account := self._current(request):
            self._close(account, summary.timeline, now)
        if record := self._records.get(request.name):
            record.request, record.outcome, record.summary, record.timeline = None, outcome, summary, summary.timeline

    def decided(self, name: str, choice: CascadeChoice) -> None:
        """It is known which model of a cascade answers a request."""
        if record := self._records.get(name):
            record.cascade = choice

    def _current(self, request: Request) -> AttemptAccount | None:
        record = self._records.get(request.name)
        account = record.attempts[-1] if record is not None and record.attempts else None
        return account if account is not None and account.attempt is not None else None

    def _close(self, account: AttemptAccount, line: Timeline, now: float) -> None:
        assert account.attempt is not None
        account.unreported, account.attempt = account.attempt.prefill_unreported, None
        account.timeline, account.ended = line, now

    # --- what is asked -----------------------------------------------------------------------------------------------

    def find(self, name: str) -> RequestRecord | None:
        """That request, by the name that its client uses (the last of that name) or that logs use."""
        return self._records.get(name) or self._latest.get(name)

    def last(self, count: int, session: str = "") -> list[RequestRecord]:
        """The last requests of that session ("": of any), newest first."""
        newest = reversed(self._records.values())
        return list(islice((record for record in newest if session in ("", record.session)), count))

    # --- forgetting --------------------------------------------------------------------------------------------------

    def _forget(self, name: str) -> None:
        record = self._records.pop(name)
        if self._latest.get(record.request_id) is record:
            del self._latest[record.request_id]

    def _keep(self, holder: AttemptAccount | RequestRecord, considered: ConsideredPlacements | None) -> None:
        """What was weighed for `holder`, instead of what it has; the oldest of all goes."""
        if considered is not None and holder.considered is None:
            self._with_considered.append(holder)
        self._rows += (considered.rows if considered else 0) - (holder.considered.rows if holder.considered else 0)
        holder.considered = considered
        while self._rows > _ROWS or len(self._with_considered) > self._most:
            oldest = self._with_considered.popleft()
            self._rows -= oldest.considered.rows if oldest.considered else 0
            oldest.considered = None
