"""Several prefill workers on one prompt: how many placement wants, what they are told, and what their ends mean."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import messages as msg
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.events import DrainWorker
from router.members import MemberRecord, PendingPrefill
from router.placement.cached_prefix import CacheablePrefix
from router.placement.ring import FIRST_LAYER, _with
from router.placement.step_costs import PrefillCost
from router.placement.types import Placement
from tests.router.lab import Lab, held
from tests.router.model import EOS, PAGE, card
from tests.router.placing import HANDED, Cluster
from tests.support.thorough import examples

RINGS = msgspec.structs.replace(card(), rings=True)
PROMPTS = {2: 30, 3: 769}  # tokens of a prompt, by the workers that are worth it


def prefillers(cluster: Cluster, *nodes: str, **more: Any) -> list[MemberRecord]:
    """Idle prefill workers that can."""
    workers = [cluster.prefiller(f"p{number}", node, slots=2, **more) for number, node in enumerate(nodes)]
    for worker in workers:
        assert worker.hello.model is not None
        worker.hello = msgspec.structs.replace(
            worker.hello, model=msgspec.structs.replace(worker.hello.model, rings=True)
        )
        worker.mark_changed()
    return workers


def place(cluster: Cluster, **more: Any) -> Placement:
    cluster.decoder(busy=100)
    return cluster.plan(**more)


def test_an_idle_worker_of_the_node_helps_where_that_is_sooner() -> None:
    cluster = Cluster()
    cluster.store()
    prefillers(cluster, "a", "a")
    plan = place(cluster)
    assert {plan.prefill, *plan.helpers} == {"p0", "p1"}
    alone, together = plan.ring_seconds
    assert alone == pytest.approx(0.83)
    assert alone / 2 < together < 0.7 * alone
    assert plan.predicted.compute == together
    assert plan.chunk_pages == -(-HANDED // 2)


LONG = CacheablePrefix(pages=400, page_size=10, page_bytes=1_000)  # a page in 0.01 s


@pytest.mark.parametrize(
    ("idle", "pages", "helpers"), [(1, 400, 0), (3, 400, 2), (9, 400, 5), (9, 900, 7), (9, 80, 3), (9, 40, 1)]
)
def test_as_many_help_as_each_save_time(idle: int, pages: int, helpers: int) -> None:
    cluster = Cluster()
    cluster.store()
    cluster.prefills = {f"p{number}": PrefillCost(0.0, 1e-3, 0.0) for number in range(idle)}
    prefillers(cluster, *"a" * idle)
    plan = place(cluster, prefix=msgspec.structs.replace(LONG, pages=pages))
    assert len({plan.prefill, *plan.helpers}) == 1 + helpers
    ways = [seconds + 0.05 * others for others, seconds in enumerate(plan.ring_seconds)]
    assert not ways if not helpers else min(ways) == ways[helpers]


def test_the_slowest_of_several_sets_the_pace() -> None:
    cluster = Cluster()
    cluster.store()
    cluster.prefills = {f"p{number}": PrefillCost(0.0, 1e-3, 0.0) for number in range(4)}
    prefillers(cluster, *"aaaa")
    quick = place(cluster, prefix=LONG)
    assert len(quick.helpers) == 3
    cluster.prefills["p1"] = PrefillCost(0.0, 1e-2, 0.0)
    cluster.members.require_live("p1").mark_changed()
    plan = cluster.plan(prefix=LONG)
    assert {plan.prefill, *plan.helpers} == {"p0", "p2", "p3"}
    assert plan.ring_seconds[3] == pytest.approx(10 * quick.ring_seconds[3], rel=0.1)


@examples(60)
@given(
    workers=st.integers(2, 8), pages=st.integers(2, 900), alone=st.floats(0.01, 100), bent=st.floats(0, 1),
    most=st.integers(1, 200),
)  # fmt: skip
def test_a_prompt_takes_what_is_predicted_or_up_to_two_chunks_less(
    workers: int, pages: int, alone: float, bent: float, most: int
) -> None:
    """`bent`: part of the time that is due to pairs."""
    tokens, size = pages * 16, 16
    pair = bent * alone / (tokens * tokens / 2)
    seconds, chunk = _with(workers, alone, pair, pages, size, most, 0.05)
    if not chunk:
        return
    assert chunk <= most
    edges = [min(pages, number * chunk) / pages for number in range(-(-pages // chunk) + 1)]
    costs = [alone * ((1 - bent) * (b - a) + bent * (b * b - a * a)) for a, b in pairwise(edges)]
    begins, ends = list[float](), list[float]()
    for number, cost in enumerate(costs):
        free = ends[number - workers] if number >= workers else 0.0
        begin = max(free, begins[-1] + FIRST_LAYER * costs[number - 1]) if number else free
        begins.append(begin)
        ends.append(max(begin + cost, ends[-1] + FIRST_LAYER * cost if number else 0.0))
    assert ends[-1] <= 1.000001 * seconds <= ends[-1] + 1.6 * alone * chunk / pages


@pytest.mark.parametrize("why", ["elsewhere", "busy", "its device has more", "only devices have it", "lowest", "short"])
def test_no_other_worker_helps(why: str) -> None:
    cluster = Cluster()
    cluster.store()
    cluster.store("b")
    more: dict[str, Any] = {}
    workers = prefillers(cluster, "a", "b" if why == "elsewhere" else "a", device=4 * (why == "only devices have it"))
    match why:
        case "busy":
            workers[1].assign_prefill(msg.AttemptName("other", 1), PendingPrefill(10), cluster.now)
        case "its device has more":
            cluster.held["s-a"], cluster.held["p1"] = PrefixMatch(2, {"CPU": 2}), PrefixMatch(4, {"GPU": 4})
            workers[1].delay = 1.0
            workers[1].mark_changed()
        case "lowest":
            more["priority"] = msg.LOWEST_CLASS
        case "short":
            cluster.prefills = dict.fromkeys(("p0", "p1"), PrefillCost(0.0, 1e-3, 0.0))
        case _:
            pass
    assert not place(cluster, **more).helpers


def test_help_that_gains_nothing_is_not_asked_for_until_a_worker_comes() -> None:
    cluster = Cluster()
    cluster.store()
    prefillers(cluster, "a", "a")
    plan = place(cluster)
    for _ in range(20):
        cluster.view.table.ring_took(2, plan.ring_seconds[0], cluster.plan().predicted.compute)
    assert not cluster.plan().helpers
    cluster.decoder("d1", busy=100)
    assert cluster.plan().helpers


def test_what_some_workers_have_taken_is_known_of_more_and_of_fewer() -> None:
    cluster = Cluster()
    cluster.store()
    prefillers(cluster, "a", "a")
    place(cluster)
    table = cluster.view.table
    for _ in range(20):
        table.ring_took(4, 2.0, table.ring_ratio(4))
    assert table.ring_ratio(4) == pytest.approx(2.0, rel=0.01)
    assert [round(table.ring_ratio(workers), 1) for workers in (2, 3, 8)] == [1.0, 1.5, 2.0]


class Ring:
    """A request that several prefill workers were ordered to compute."""

    def __init__(self, lab: Lab, workers: int) -> None:
        self.lab, self.prompt = lab, PROMPTS[workers]
        self.decode = lab.join("decode", "decode-0", model=card(pool_pages=512))
        self.store = lab.join("store", "store-0")
        names = [lab.join("prefill", f"prefill-{number}", model=RINGS) for number in range(workers)]
        for worker in names:
            lab.report(worker, msg.LoadReport(prefill_rate=20.0))
        lab.report(self.decode, msg.LoadReport(prefill_rate=2.0))
        lab.submit(prompt=self.prompt)
        assert not lab.sent(msg.Prefill)
        lab.say(self.decode, msg.Accepted("r", 1))
        parts = {
            order.ring.place: (order.ring, name)
            for name in names
            for order in lab.sent(msg.Prefill, name)
            if order.ring
        }
        self.parts = [parts[place][0] for place in range(workers)]
        self.main, *self.helpers = (parts[place][1] for place in range(workers))

    def end(self, attempts: int = 1) -> None:
        lab, pages = self.lab, -(-(self.prompt - 1) // PAGE)
        lab.say(self.main, msg.Prefilled("r", attempts, self.prompt - 1, hit=0, stored=pages, compute_ms=60_000))
        lab.say(self.decode, msg.Started("r", attempts, device_pages=0, fetched_pages=pages))
        lab.tokens(self.decode, "r", attempts, self.prompt, EOS, finish="stop", computed=1)
        served = lab.end().summary.served
        assert (served.attempts, f"{served.prefill_worker}.1") == (attempts, self.main)
        assert lab.end().summary.usage.cached == 0


@pytest.fixture(params=PROMPTS)
def ring(lab: Lab, request: pytest.FixtureRequest) -> Ring:
    return Ring(lab, request.param)


def test_all_are_told_their_parts(ring: Ring) -> None:
    lab, first = ring.lab, ring.parts[0]
    workers = len(ring.parts)
    assert ring.parts == [msg.RingPart(first.first, first.pages, place, workers) for place in range(workers)]
    for helper in ring.helpers:
        lab.say(helper, msg.Prefilled("r", 1, computed=(ring.prompt - 1) // workers, hit=0, stored=0))
        assert lab.cancelled(helper) == [1]
    assert not lab.cancelled(ring.main)
    (note,) = lab.state.explain("r").attempts[0].notes
    names = [name.removesuffix(".1") for name in (ring.main, *ring.helpers)]
    assert note.startswith(f"{names[0]} and {', '.join(names[1:])} compute chunks of {first.pages} pages in turn. ")
    assert f"1: {(ring.prompt - 1) / 20:.2f} s, 2: " in note
    ring.end()
    assert lab.state._manager.view.table.ring_ratio(workers) > 1.1, "it took longer than was predicted"


@pytest.mark.parametrize("how", ["refuses", "fails", "leaves", "forgets", "drains", "says nothing"])
@pytest.mark.parametrize("which", [0, -1])
def test_the_prompt_needs_no_helper(ring: Ring, how: str, which: int) -> None:
    lab, helper = ring.lab, ring.helpers[which]
    match how:
        case "refuses":
            lab.say(helper, msg.Refused("r", 1, "busy"))
        case "fails":
            lab.say(helper, msg.AttemptFailed("r", 1, "internal", "a fault"))
        case "leaves":
            lab.leaves(helper)
        case "forgets":
            lab.beat(helper, held("r", 1, 8))
            for _ in range(2):
                lab.beat(helper)
        case "drains":
            lab.tell(DrainWorker(helper.removesuffix(".1")))
        case _:
            pass
    others = [other for other in ring.helpers if other != helper]
    ended = how in ("refuses", "fails", "leaves", "forgets")
    assert [lab.cancelled(other) for other in others] == [[1] * ended for _ in others]
    name = helper.removesuffix(".1")
    notes = lab.state.explain("r").attempts[0].notes[1:]
    assert [note.startswith(name) and note.endswith("goes on alone") for note in notes] == [True] * ended
    ring.end()
    assert how not in ("drains", "says nothing") or lab.cancelled(helper) == [1]
    assert lab.state._manager.view.table.ring_ratio(len(ring.parts)) == 1.0, "it was not computed together to the end"


def test_the_death_of_the_prefill_worker_ends_the_attempt_of_all(ring: Ring) -> None:
    lab = ring.lab
    lab.leaves(ring.main)
    assert [lab.cancelled(helper) for helper in ring.helpers] == [[1] for _ in ring.helpers]
    lab.say(ring.decode, msg.Accepted("r", 2))
    last = lab.sent(msg.Prefill)[-1]
    ring.main = lab.to(last)
    assert (last.ring.workers if last.ring else 1) == len(ring.helpers)
    ring.end(attempts=2)


def test_a_newcomer_goes_to_no_worker_of_a_ring_while_another_one_is_idle(ring: Ring) -> None:
    lab = ring.lab
    third = lab.join("prefill", "prefill-9", model=RINGS)
    lab.report(third, msg.LoadReport(prefill_rate=20.0))
    lab.submit("s", prompt=30)
    lab.say(ring.decode, msg.Accepted("s", 1))
    (order,) = [order for order in lab.sent(msg.Prefill) if order.request == "s"]
    assert order in lab.sent(msg.Prefill, third)
    assert order.ring is None
