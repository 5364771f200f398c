"""The queue: order of service, the requests that a full queue rejects, and predicted waits."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.messages import LOWEST_CLASS
from router.queueing.fairness import TenantFairness
from router.queueing.waiting_queue import WaitingQueue
from router.request import Request
from tests.router.model import submit
from tests.support.thorough import automaton

AGEING = 10.0
PATIENCE = 4.0
WEIGHTS = {"a": 1.0, "b": 1.0, "heavy": 4.0}


class Line:
    """A queue and the requests that went through it."""

    def __init__(self) -> None:
        self.fairness = TenantFairness(lambda tenant: WEIGHTS.get(tenant, 1.0))
        self.warm: dict[str, float] = {}  # the cached share of requests; of others 0
        self.queue = WaitingQueue(self.fairness, AGEING, lambda request: self.warm.get(request.name, 0.0), PATIENCE)
        self.requests: dict[str, Request] = {}
        self.arrivals = 0
        self.now = 0.0

    def comes(self, name: str, tenant: str = "", priority: int = 0, prompt: int = 100, begun: bool = False) -> Request:
        order = submit(name, prompt, tenant=tenant, priority=priority)
        self.arrivals += 1
        request = self.requests[name] = Request(order, self.arrivals, self.now)
        request.history.ever_accepted = begun
        self.queue.add(request, self.now)
        return request

    def yields(self, request: Request) -> None:
        """A request that runs gives its place to others, as `RequestManager.give_way` has it."""
        self.arrivals += 1
        request.history.ever_accepted = True
        request.arrival, request.queueing.yielded = self.arrivals, self.now
        self.queue.add(request, self.now)

    def serve(self) -> str:
        """Serve the next request and charge its tenant for the prompt."""
        request = next(iter(self.queue.in_order(self.now)))
        self.queue.remove(request, self.now, placed=True)
        self.charge(request.spec.tenant, request.prompt)
        self.queue.validate()
        return request.name

    def charge(self, tenant: str, cost: float) -> None:
        self.fairness.charge(tenant, cost)
        self.queue.served(cost)

    def serve_all(self) -> list[str]:
        return [self.serve() for _ in range(len(self.queue))]

    def order(self) -> list[str]:
        return [request.name for request in self.queue.in_order(self.now)]


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.mark.technique("Warm requests first, within a bound of age")
def test_the_warmest_goes_first_until_an_older_one_has_waited_long_enough(line: Line) -> None:
    line.warm = {"half": 0.5, "hot": 0.9, "other level": 1.0}
    for name in ("old", "half", "hot"):
        line.comes(name)
    line.comes("other level", priority=1)
    assert line.order() == ["hot", "half", "old", "other level"]
    line.now = PATIENCE
    assert line.order() == ["old", "half", "hot", "other level"]


def test_what_is_warm_is_looked_up_again(line: Line) -> None:
    for name in "abc":
        line.comes(name)
    assert line.order() == ["a", "b", "c"]
    line.warm["b"] = 1.0
    line.now = 1.0
    assert line.order() == ["b", "a", "c"]


def test_one_that_has_yielded_waits_behind_equal_ones_and_is_never_shed(line: Line) -> None:
    long = line.comes("long")
    assert line.serve() == "long"
    line.comes("second")
    line.comes("later", priority=1)
    line.yields(long)
    line.comes("third")
    assert line.order() == ["second", "long", "third", "later"]
    for _ in range(3):
        last = line.queue.last(line.now)
        assert last is not None
        assert last is not long
        line.queue.remove(last, line.now)
    assert line.queue.last(line.now) is None
    assert line.queue.turn_comes_before(long, line.now) is long


def test_the_lowest_class_comes_after_every_tenants_requests(line: Line) -> None:
    line.comes("batch", "a", priority=LOWEST_CLASS)
    line.now = 100 * AGEING
    line.charge("b", 10**6)
    line.comes("low", "b", priority=LOWEST_CLASS - 1)
    assert line.order() == ["low", "batch"]
    assert not line.queue.only_lowest
    last = line.queue.last(line.now)
    assert last is not None
    assert last.name == "batch"
    assert line.serve() == "low"
    assert line.queue.only_lowest


def test_waiting_makes_urgent(line: Line) -> None:
    line.comes("old", priority=1)
    line.now = 2 * AGEING - 0.1
    line.comes("new", priority=0)
    assert line.order() == ["old", "new"]  # of the same level by now, and worth two levels of waiting
    line.now += 1.0
    line.comes("urgent", priority=-3)
    assert line.order() == ["urgent", "old", "new"]


def test_urgent_requests_starve_no_other(line: Line) -> None:
    line.comes("patient", "a", priority=3)
    for turn in range(1_000):
        line.comes(f"urgent {turn}", "b", priority=0)
        if line.serve() == "patient":
            break
        line.now += 0.1
    assert line.now <= 3 * AGEING + 1


def test_urgency_does_not_put_a_tenant_far_ahead_of_its_share(line: Line) -> None:
    """Two tenants wait and 100 tokens are served a second: five seconds of that are 250 for each."""
    for i in range(20):
        line.comes(f"urgent {i}", "a", prompt=50, priority=-1)
        line.comes(f"patient {i}", "b", prompt=50)
    served: list[str] = []
    for _ in range(16):
        line.now += 0.5
        served.append(line.serve().split()[0])
    assert served[:4] == ["urgent"] * 4
    assert served.count("urgent") - served.count("patient") in (4, 5, 6)
    assert served[-4:].count("urgent") == 2
    last = line.queue.last(line.now)
    assert last is not None


def test_a_tenant_far_ahead_goes_first_when_the_queue_is_full(line: Line) -> None:
    line.comes("patient", "b", priority=5)
    for i in range(4):
        line.comes(f"urgent {i}", "a")
    line.now = 2.0
    line.charge("b", 1.0)
    assert line.queue.last(line.now) is line.requests["patient"]
    line.comes("another", "b", priority=5)
    line.charge("a", 2_000)
    line.now = 100.0
    line.comes("newest", "b", priority=5)
    last = line.queue.last(line.now)
    assert last.name == "urgent 3"


def test_requests_may_leave_while_the_order_is_read(line: Line) -> None:
    for i in range(6):
        line.comes(f"r{i}", "ab"[i % 2])
    seen: list[str] = []
    for request in line.queue.in_order(line.now):
        seen.append(request.name)
        if request.name in ("r0", "r3"):
            line.queue.remove(request, line.now)
            line.charge(request.spec.tenant, 1_000)
    assert sorted(seen) == [f"r{i}" for i in range(6)]
    assert len(line.queue) == 4


def test_the_least_urgent_is_turned_away_and_of_those_the_newest(line: Line) -> None:
    for name, priority in [("a", 0), ("b", 2), ("c", 2), ("d", 0)]:
        line.comes(name, priority=priority)
    last = line.queue.last(line.now)
    assert last.name == "c"


def test_a_flood_turns_itself_away(line: Line) -> None:
    for i in range(5):
        line.comes(f"flood {i}", "a")
    line.comes("newcomer", "b")
    last = line.queue.last(line.now)
    assert last.name == "flood 4"


def test_a_begun_request_is_never_turned_away(line: Line) -> None:
    line.comes("begun", priority=5, begun=True)
    assert line.queue.last(line.now) is None


def drained(line: Line, tokens: float) -> None:
    """The queue has been draining for a while at `tokens` a second."""
    line.comes("always", prompt=1, priority=8)
    for i in range(400):
        line.now += 0.1
        request = line.comes(f"drained {i}", prompt=int(tokens / 10))
        line.queue.remove(request, line.now, placed=True)


def test_the_wait_is_what_is_ahead_at_the_rate_of_late(line: Line) -> None:
    first = line.comes("first", prompt=1_000)
    assert line.queue.wait(first, line.now) == 0  # nothing has been seen yet
    drained(line, 500)
    assert line.queue.drain_rate.rate == pytest.approx(500, rel=0.05)
    second = line.comes("second", prompt=1_000)
    assert line.queue.wait(second, line.now) == pytest.approx(4, rel=0.05)
    line.queue.set_work(first, 200)  # most of it is cached
    assert line.queue.wait(second, line.now) == pytest.approx(2.4, rel=0.05)
    urgent = line.comes("urgent", prompt=1_000, priority=-1)
    assert line.queue.wait(urgent, line.now) == pytest.approx(2, rel=0.05)
    begun = line.comes("begun", prompt=500, priority=5, begun=True)
    assert line.queue.wait(urgent, line.now) == pytest.approx(3, rel=0.05)
    line.queue.remove(begun, line.now)


def test_a_queue_that_has_just_formed_says_nothing_of_half_a_minute(line: Line) -> None:
    for i in range(20):
        line.comes(f"r{i}", prompt=2_000)
    line.comes("short", prompt=50, priority=-1)
    line.now += 1.1
    assert line.serve() == "short"
    last = line.comes("last", prompt=2_000)
    assert line.queue.wait(last, line.now) == pytest.approx(11, rel=0.1), "not the 800 s that 50 tokens a second mean"
    line.now += 9
    assert line.queue.wait(last, line.now) > 30, "by now it is known that nobody else has left"


def test_a_tenant_does_not_wait_for_the_flood_of_another(line: Line) -> None:
    drained(line, 1_000)
    for i in range(20):
        line.comes(f"flood {i}", "a", prompt=1_000)
    newcomer = line.comes("newcomer", "b", prompt=1_000)
    assert line.queue.wait(newcomer, line.now) == 0, "it is next"
    second = line.comes("second", "b", prompt=1_000)
    assert line.queue.wait(second, line.now) == pytest.approx(4, rel=0.05)
    line.queue.remove(second, line.now)
    flood = line.comes("flood", "a", prompt=1_000)
    assert line.queue.wait(flood, line.now) == pytest.approx(22, rel=0.05)


def test_an_idle_queue_says_nothing_of_how_fast_it_drains(line: Line) -> None:
    for i in range(100):
        line.now += 1
        line.comes(f"r{i}")
        line.serve()
    assert line.queue.drain_rate.rate == 0


def test_the_margin_follows_how_wrong_forecasts_were(line: Line) -> None:
    """A request that waited 6 s instead of the predicted 4 s raises the margin of the requests behind it."""
    drained(line, 1_000)
    for i in range(60):
        request = line.comes(f"r{i}", "a", prompt=1_000)
        assert line.queue.safety_margin(request, 4.0, 10.0) <= 8.0, "a fifth of what it may wait is always enough"
        request.queueing.predicted_dequeue_at = line.now + 4.0
        line.now += 6.0
        line.queue.learn(request, line.now)
        line.queue.remove(request, line.now, placed=True)
    request = line.comes("next", "a", prompt=1_000)
    assert 2.0 <= line.queue.safety_margin(request, 4.0, 10.0) <= 6.0
    other = line.comes("other", "b", prompt=1_000)
    assert line.queue.safety_margin(other, 4.0, 10.0) == 0.0, "each line has its own"


def first(request: Request) -> bool:
    return request.history.ever_accepted and request.queueing.yielded is None and request.level < LOWEST_CLASS


class Queues(RuleBasedStateMachine):
    """Whatever comes and goes: sums add up, and the order is what the rule says, worked out by sorting."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()

    @rule(
        tenant=st.sampled_from(["a", "b", "heavy"]),
        priority=st.integers(-10, 10),
        prompt=st.integers(1, 50),
        begun=st.booleans(),
        warm=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    )
    def comes(self, tenant: str, priority: int, prompt: int, begun: bool, warm: float) -> None:
        name = f"r{len(self.line.requests)}"
        self.line.warm[name] = warm
        request = self.line.comes(name, tenant, priority, prompt, begun and prompt % 5 == 0)
        self.line.queue.set_work(request, prompt // 2)

    @rule(index=st.integers(0, 100))
    def leaves(self, index: int) -> None:
        requests = list(self.line.requests.values())
        if requests:
            self.line.queue.remove(requests[index % len(requests)], self.line.now)

    @rule(index=st.integers(0, 100))
    def comes_back(self, index: int) -> None:
        requests = [r for r in self.line.requests.values() if r not in self.line.queue]
        if requests:
            request = requests[index % len(requests)]
            request.history.ever_accepted = True
            self.line.queue.add(request, self.line.now)

    @rule(index=st.integers(0, 100))
    def yields(self, index: int) -> None:
        requests = [r for r in self.line.requests.values() if r not in self.line.queue]
        if requests:
            self.line.yields(requests[index % len(requests)])

    @rule()
    def is_served(self) -> None:
        if len(self.line.queue):
            self.line.serve()

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.line.now += seconds

    @invariant()
    def in_order(self) -> None:
        line = self.line
        line.queue.validate()
        line.fairness.validate()
        waiting = [request for request in line.requests.values() if request in line.queue]
        top = min((r.level for r in waiting if not first(r)), default=0)
        leaders = line.queue._over_served_tenants()

        def since(r: Request) -> float:
            return r.submitted if r.queueing.yielded is None else r.queueing.yielded

        def rank(r: Request) -> tuple[object, ...]:
            level = max(top, r.level - int((line.now - since(r)) / AGEING)) if r.level < LOWEST_CLASS else r.level
            return (
                not first(r),
                not first(r) and (r.level == LOWEST_CLASS or r.spec.tenant in leaders),
                0 if first(r) else level,
                line.fairness.counter(r.spec.tenant),
                since(r) + r.level * AGEING,
                r.arrival,
            )

        order = line.order()
        assert len(order) == len(line.queue) == sum(line.queue.levels().values())
        lines: dict[tuple[object, ...], list[Request]] = {}
        for request in sorted(waiting, key=lambda r: r.arrival):
            lines.setdefault((request.spec.tenant, request.level, first(request)), []).append(request)
        for requests in lines.values():
            if line.now - since(requests[0]) < PATIENCE:
                window = sorted(requests[:8], key=lambda r: -line.warm[r.name])
                requests[:8] = window
            names = {request.name for request in requests}
            assert [name for name in order if name in names] == [request.name for request in requests]
        if waiting:
            assert order[0] == min((requests[0] for requests in lines.values()), key=rank).name
        if (last := line.queue.last(line.now)) is not None:
            assert not last.history.ever_accepted
            assert line.queue.wait(last, line.now) >= 0


Queues.TestCase.settings = automaton(count=40, steps=40)
TestQueues = Queues.TestCase
