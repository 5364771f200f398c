"""The queue of requests that wait for a worker: their order, and the one that a full queue sheds.

Requests wait in lines, one for each level of urgency and tenant, oldest first. The next is found in three steps:

1. Requests that a worker had accepted before: a client may be in the middle of their output. Last of all come tenants
   that have had more than their share by some seconds of service, which bounds the advantage of urgency.
2. The most urgent level. Waiting raises a request one level for each `ageing` seconds, up to the most urgent level in
   the queue and no higher. Otherwise old requests would stand above all new ones, and the tenant that sends most would
   be served most.
   The lowest class comes after all others, whichever tenant's they are, and never rises.
3. Of those, the tenant that has been served least (`router.queueing.fairness`), and of its lines the one whose first
   request is the oldest, a level being worth `ageing` seconds.

Within a line, requests with more of their tokens in caches go first, since pages may be evicted while they wait. Once
the oldest has waited for `patience` seconds it is next, so no request is overtaken for longer.

A request that has yielded its place waits like a new one from then on, but is never refused.

Pure.
"""

# pyright: strict

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import exp, inf

from baton.messages import LOWEST_CLASS
from router.queueing.fairness import TenantFairness
from router.queueing.quantile import Spread
from router.request import Request

_HORIZON = 10.0  # seconds of draining after which they count a third
_MEMORY = 60.0  # seconds for which an empty line's past is kept
_TRUST = 2.0  # seconds of draining that outweigh what was expected of a line
_ENOUGH = 1.0  # seconds of draining that must have been seen before they say anything
_FURTHEST = 10.0  # times the draining that was seen: so far ahead anything is said

_LEAD = 5.0  # seconds of service, of all tenants together, that urgency may put a tenant ahead of its share
_SAVINGS = 10.0  # seconds of its share that a tenant has left over at most, from when it asked for nothing
_WINDOW = 8  # requests of a line that are looked up in caches
_FRESH = 0.25  # seconds for which what was found holds
_ROUGHLY = 2.0  # seconds: errors of forecasts are in proportion to these and the forecast
_MOST_DOUBT = 0.8
"""Share of the time that a request may wait. A request with a shorter forecast is queued in any case; otherwise
nothing would be learned any more."""

_Rank = tuple[bool, bool, int, float, float, int]


def _arrival(request: Request) -> int:
    return request.arrival


@dataclass
class _TenantQueue:
    """Requests of one tenant and level. The oldest is first."""

    tenant: str
    level: int
    newcomers: bool  # none goes before new requests
    requests: list[Request] = field(default_factory=list[Request])
    work: int = 0  # tokens to compute, for all of them
    past: DrainHistory = field(default_factory=lambda: DrainHistory())


class WaitingQueue:
    """Requests without an attempt. It refuses no request itself."""

    def __init__(
        self, fairness: TenantFairness, ageing: float, warmth: Callable[[Request], float] | None = None,
        patience: float = 0.0,
    ) -> None:  # fmt: skip
        """`ageing`: seconds of waiting that one level is worth. `warmth`: the share of a request's tokens that is
        cached now. `patience`: seconds for which warmer requests may go before an older one."""
        self._fairness = fairness
        self._ageing = ageing
        self._warmth, self._patience = warmth, patience
        self._tenant_queues: dict[tuple[str, int, bool], _TenantQueue] = {}
        self._histories: dict[tuple[str, int], DrainHistory] = {}  # of newcomers' lines, by tenant and level
        self._places: dict[str, tuple[_TenantQueue, int, float]] = {}  # line, work and since when, by request
        self._refused: dict[str, float] = {}  # tenants that were turned away lately, and when
        self.tokens = 0  # known ones, of all that wait
        self.drain_rate = DrainRate()  # prompt tokens to compute
        self._service = DrainRate()  # what tenants are charged for

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: Request) -> bool:
        return request.name in self._places

    @property
    def begun(self) -> bool:
        """Whether a request waits that goes before new ones."""
        return any(not line.newcomers for line in self._tenant_queues.values())

    def levels(self) -> Mapping[int, int]:
        """How many wait, by level."""
        levels: Counter[int] = Counter()
        for line in self._tenant_queues.values():
            levels[line.level] += len(line.requests)
        return levels

    @property
    def only_lowest(self) -> bool:
        """Whether no request waits but those of the lowest class."""
        return all(line.level == LOWEST_CLASS for line in self._tenant_queues.values())

    def add(self, request: Request, now: float) -> None:
        self._until(now, waiting=bool(self))
        key = (request.spec.tenant, request.level, not request.goes_first)
        if (line := self._tenant_queues.get(key)) is None:
            line = self._tenant_queues[key] = _TenantQueue(*key)
            if line.newcomers:
                line.past = self._remembered(request.spec.tenant, request.level, now)
        line.past.drain_rate.until(now, waiting=bool(line.requests))
        insort(line.requests, request, key=_arrival)
        self._places[request.name] = (line, 0, now)
        self.tokens += request.known
        self._waits(request.spec.tenant)
        for tenant in [tenant for tenant, at in self._refused.items() if now - at > _HORIZON]:
            del self._refused[tenant]
            self._fairness.stop_waiting(tenant)
        self.set_work(request, request.known)

    def set_work(self, request: Request, work: int) -> None:
        """Set how many tokens must be computed for a request: those that are cached nowhere."""
        line, before, since = self._places[request.name]
        self._places[request.name] = (line, work, since)
        line.work += work - before

    def remove(self, request: Request, now: float, *, placed: bool = False) -> None:
        """It waits no longer, having been placed or not; nothing happens if it did not wait."""
        if (place := self._places.pop(request.name, None)) is None:
            return
        self._until(now, waiting=True)
        line, work, since = place
        line.past.drain_rate.until(now, waiting=True)
        if placed and (self._places or now > since):
            self.drain_rate.took(work)
            line.past.drain_rate.took(work)
        del line.requests[bisect_left(line.requests, request.arrival, key=_arrival)]
        line.work -= work
        if not line.requests:
            del self._tenant_queues[line.tenant, line.level, line.newcomers]
        self.tokens -= request.known
        self._fairness.stop_waiting(request.spec.tenant)

    def refuse(self, request: Request, now: float) -> None:
        """Remove a waiting request that is refused. Its tenant counts for a while as if the request still waited:
        its queue is empty because the queue refuses, so the tenant keeps its due."""
        if request.spec.tenant not in self._refused:
            self._waits(request.spec.tenant)
        self._refused[request.spec.tenant] = now

    def _waits(self, tenant: str) -> None:
        self._fairness.start_waiting(tenant, _SAVINGS * self._service.rate)

    def served(self, cost: float) -> None:
        """Some tenant was charged for so much."""
        if self._places:
            self._service.took(cost)

    # --- order -------------------------------------------------------------------------------------------------------

    def in_order(self, now: float) -> Iterator[Request]:
        """In order of service. Requests may be discarded meanwhile, and tenants charged: that counts at once."""
        if not self._tenant_queues:
            return  # most often: the order is asked for after every event
        top, leaders = self._top(), self._over_served_tenants()
        heap: list[tuple[_Rank, _TenantQueue, list[Request]]] = []
        for line in self._tenant_queues.values():
            requests = self._by_warmth(line, now)[::-1]  # the next one last
            heap.append((self._rank(line, requests[-1], top, leaders, now), line, requests))
        heapify(heap)  # ranks differ: each has its request's arrival
        while heap:
            rank, line, requests = heap[0]
            request = requests[-1]
            if request in self:
                if (current := self._rank(line, request, top, leaders, now)) != rank:
                    heapreplace(heap, (current, line, requests))
                    continue
                yield request
            requests.pop()
            if requests:
                heapreplace(heap, (self._rank(line, requests[-1], top, leaders, now), line, requests))
            else:
                heappop(heap)

    def _by_warmth(self, line: _TenantQueue, now: float) -> list[Request]:
        """The requests of a line in their order."""
        oldest = line.requests[0]
        if self._warmth is None or len(line.requests) == 1 or now - oldest.waits_since >= self._patience:
            return line.requests.copy()
        window = line.requests[:_WINDOW]
        for request in window:
            if now - request.queueing.warm_at >= _FRESH:
                request.queueing.warm, request.queueing.warm_at = int(8 * self._warmth(request)), now
        return sorted(window, key=lambda request: -request.queueing.warm) + line.requests[_WINDOW:]

    def first(self, now: float) -> Request | None:
        """Return the next request; none: the queue is empty."""
        return next(self.in_order(now), None)

    def last(self, now: float) -> Request | None:
        """Return the request to refuse if one must be: the newest of a tenant far ahead of its share, or else of the
        least urgent tenant queue. Among those, it is the tenant that would be served last if all its requests were
        served, so that no flood leaves the other tenants without a place. None: only requests that a worker had
        accepted wait, and they stay."""
        top, leaders = self._top(), self._over_served_tenants()
        backlog: Counter[str] = Counter()
        for line in self._tenant_queues.values():
            backlog[line.tenant] += line.work
        newest = (
            next((request for request in reversed(line.requests) if not request.history.ever_accepted), None)
            for line in self._tenant_queues.values()
            if line.newcomers
        )
        return max(
            (request for request in newest if request is not None),
            key=lambda request: (
                request.lowest or request.spec.tenant in leaders,
                self._level(request, top, now),
                self._fairness.counter(request.spec.tenant)
                + backlog[request.spec.tenant] / self._weight(request.spec.tenant),
                self._due(request),
                request.arrival,
            ),
            default=None,
        )

    def _top(self) -> int:
        return min((line.level for line in self._tenant_queues.values() if line.newcomers), default=0)

    def _over_served_tenants(self) -> frozenset[str]:
        rate = self._service.rate
        return self._fairness.over_served(_LEAD * rate) if rate else frozenset()

    def _level(self, request: Request, top: int, now: float) -> int:
        if request.lowest:
            return request.level
        return max(top, request.level - int((now - request.waits_since) / self._ageing))

    def _due(self, request: Request) -> float:
        return request.waits_since + request.level * self._ageing

    def turn_comes_before(self, request: Request, now: float) -> Request | None:
        """Return the next request if it is at least as urgent as this one, which does not wait. None: there is none."""
        following = self.first(now)
        if following is None or following.goes_first or self._level(following, self._top(), now) <= request.level:
            return following
        return None

    def _rank(self, line: _TenantQueue, request: Request, top: int, leaders: frozenset[str], now: float) -> _Rank:
        leads, level = False, 0
        if line.newcomers:
            leads, level = request.lowest or line.tenant in leaders, self._level(request, top, now)
        return (line.newcomers, leads, level, self._fairness.counter(line.tenant), self._due(request), request.arrival)

    def _weight(self, tenant: str) -> float:
        return self._fairness.weight(tenant)

    # --- forecast ----------------------------------------------------------------------------------------------------

    def wait(self, request: Request, now: float) -> float:
        """Return the seconds until a new request, the last of its tenant queue, will be placed, if the queue drains
        as it did lately; 0: unknown. Before it come its own tenant queue, all that is more urgent, and the share of
        other tenants until its turn. Later arrivals that overtake it are learned from the drain rate of its own
        tenant queue. Its own work is part of that, except for the next request: a tenant that asks for less than its
        share must not lose its long prompts. A queue that has just formed predicts no half minute: the few prompts
        that have left it may have been short, or slow to leave."""
        self._until(now, waiting=True)
        if not (rate := self.drain_rate.rate):
            return 0.0
        line = self._tenant_queues[request.spec.tenant, request.level, True]
        line.past.drain_rate.until(now, waiting=True)
        own = self._places[request.name][1] if self._is_next(request) else 0
        work = line.work - own
        expected = (self._ahead(request, work) - own) / rate
        if expected > 0 and work > 0:
            expected = work / line.past.drain_rate.rate_for(work / expected)
        return min(expected, _FURTHEST * self.drain_rate.seconds)

    def safety_margin(self, request: Request, wait: float, limit: float) -> float:
        """Return the seconds by which it may wait longer than the forecast `wait`, where `limit` is all its time.
        Later arrivals may overtake it, and an early refusal is better than one after a wait."""
        longer = self._tenant_queues[request.spec.tenant, request.level, True].past.longer.most
        return min(longer * (wait + _ROUGHLY), _MOST_DOUBT * limit)

    def learn(self, request: Request, now: float) -> None:
        """A newcomer has waited for so long at least."""
        past = self._histories.get((request.spec.tenant, request.level))
        if past is not None and request.queueing.predicted_dequeue_at is not None:
            wait = request.queueing.predicted_dequeue_at - request.submitted
            past.longer.learn((now - request.queueing.predicted_dequeue_at) / (wait + _ROUGHLY))
        request.queueing.predicted_dequeue_at = None

    def _until(self, now: float, *, waiting: bool) -> None:
        self.drain_rate.until(now, waiting=waiting)
        self._service.until(now, waiting=waiting)

    def _is_next(self, request: Request) -> bool:
        """Whether other tenants wait, no other request of its tenant does, and its tenant is not far ahead of its
        share."""
        if len(self._places) == 1 or request.spec.tenant in self._over_served_tenants():
            return False
        return (
            sum(len(line.requests) for line in self._tenant_queues.values() if line.tenant == request.spec.tenant) == 1
        )

    def _ahead(self, request: Request, mine: int) -> float:
        """`mine`: tokens of its own line."""
        until = self._fairness.counter(request.spec.tenant) + mine / self._weight(request.spec.tenant)
        ahead = 0.0
        for line in self._tenant_queues.values():
            same_level = line.newcomers and line.level == request.level
            if not line.newcomers or line.level < request.level or (same_level and line.tenant == request.spec.tenant):
                ahead += line.work
            elif same_level:
                turn = (until - self._fairness.counter(line.tenant)) * self._weight(line.tenant)
                ahead += min(line.work, max(0.0, turn))
        return ahead

    def _remembered(self, tenant: str, level: int, now: float) -> DrainHistory:
        """Of a line that begins anew. What it was like long ago says nothing."""
        history = self._histories.get((tenant, level))
        if history is None or history.drain_rate.idle(now) > _MEMORY:
            history = self._histories[tenant, level] = DrainHistory()
            if len(self._histories) > 2 * len(self._tenant_queues) + 64:
                self._histories = {
                    key: past for key, past in self._histories.items() if past.drain_rate.idle(now) <= _MEMORY
                }
        return history

    def validate(self) -> None:
        waiting = [request for line in self._tenant_queues.values() for request in line.requests]
        assert sorted(request.name for request in waiting) == sorted(self._places)
        assert self.tokens == sum(request.known for request in waiting)
        for key, line in self._tenant_queues.items():
            assert line.requests, f"line {key} is empty"
            assert line.work == sum(self._places[request.name][1] for request in line.requests)
            assert line.requests == sorted(line.requests, key=_arrival)


class DrainHistory:
    """What was seen of a line: how fast it was drained, and by which part of it, and of `_ROUGHLY`, waits were longer
    than their forecast."""

    def __init__(self) -> None:
        self.drain_rate = DrainRate()
        self.longer = Spread()


class DrainRate:
    """How fast work leaves the queue while there is some: tokens per second, those long ago forgotten exponentially."""

    def __init__(self) -> None:
        self.seconds = 0.0  # seen, at most `_HORIZON`
        self._tokens = 0.0
        self._at = inf

    @property
    def rate(self) -> float:
        """0: too little has been seen."""
        return self._tokens / self.seconds if self.seconds >= _ENOUGH else 0.0

    def rate_for(self, expected: float) -> float:
        """The same where something else is expected until enough has been seen."""
        return (self._tokens + _TRUST * expected) / (self.seconds + _TRUST)

    def idle(self, now: float) -> float:
        """Seconds since anything was told of it."""
        return now - self._at

    def until(self, now: float, *, waiting: bool) -> None:
        """Time has passed, with or without waiting requests."""
        passed = max(0.0, now - self._at)
        self._at = now
        if waiting and passed:
            fade = exp(-passed / _HORIZON)
            self.seconds = self.seconds * fade + _HORIZON * (1 - fade)
            self._tokens *= fade

    def took(self, tokens: float) -> None:
        """So many left the queue for a worker."""
        self._tokens += tokens
