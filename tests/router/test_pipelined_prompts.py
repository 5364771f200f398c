"""Two prefill workers on one prompt: when placement wants it, what they are told, and what their ends mean."""

from typing import Any

import msgspec
import pytest

from baton import messages as msg
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.events import DrainWorker
from router.members import MemberRecord, PendingPrefill
from router.placement.step_costs import PrefillCost
from router.placement.types import Placement
from tests.router.lab import Lab, held
from tests.router.model import EOS, card
from tests.router.placing import HANDED, Cluster

RINGS = msgspec.structs.replace(card(), rings=True)


def prefillers(cluster: Cluster, *nodes: str, **more: Any) -> list[MemberRecord]:
    """Two idle prefill workers that can, and what a prompt needs beside them."""
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
    assert {plan.prefill, plan.helper} == {"p0", "p1"}
    assert plan.alone == pytest.approx(0.83)
    assert plan.alone / 2 < plan.predicted.compute < 0.7 * plan.alone
    assert plan.chunk_pages == -(-HANDED // 2)


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
    assert place(cluster, **more).helper is None


def test_help_that_gains_nothing_is_not_asked_for_until_a_worker_comes() -> None:
    cluster = Cluster()
    cluster.store()
    prefillers(cluster, "a", "a")
    plan = place(cluster)
    for _ in range(20):
        cluster.view.table.ring_took(plan.alone, cluster.plan().predicted.compute)
    assert cluster.plan().helper is None
    cluster.decoder("d1", busy=100)
    assert cluster.plan().helper is not None


class Pair:
    """A request that two prefill workers were ordered to compute."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.decode, self.store = lab.join("decode", "decode-0"), lab.join("store", "store-0")
        for number in range(2):
            worker = lab.join("prefill", f"prefill-{number}", model=RINGS)
            lab.report(worker, msg.LoadReport(prefill_rate=20.0))
        lab.report(self.decode, msg.LoadReport(prefill_rate=2.0))
        lab.submit(prompt=30)
        assert not lab.sent(msg.Prefill)
        lab.say(self.decode, msg.Accepted("r", 1))
        orders = {order.ring.place: order for order in lab.sent(msg.Prefill) if order.ring}
        assert len(orders) == 2
        self.parts = [orders[place].ring for place in (0, 1)]
        self.main, self.helper = (next(w for w in WORKERS if orders[p] in lab.sent(msg.Prefill, w)) for p in (0, 1))

    def end(self, attempts: int = 1) -> None:
        lab = self.lab
        lab.say(self.main, msg.Prefilled("r", attempts, computed=29, hit=0, stored=8))
        lab.say(self.decode, msg.Started("r", attempts, device_pages=0, fetched_pages=8))
        lab.tokens(self.decode, "r", attempts, 30, EOS, finish="stop", computed=1)
        served = lab.end().summary.served
        assert (served.attempts, f"{served.prefill_worker}.1") == (attempts, self.main)
        assert lab.end().summary.usage.cached == 0


WORKERS = ("prefill-0.1", "prefill-1.1")


@pytest.fixture
def pair(lab: Lab) -> Pair:
    return Pair(lab)


def test_both_are_told_their_parts(pair: Pair) -> None:
    first, second = pair.parts
    assert first is not None
    assert second == msg.RingPart(first.first, first.pages, 1, 2)
    pair.lab.say(pair.helper, msg.Prefilled("r", 1, computed=16, hit=0, stored=0))
    (note,) = pair.lab.state.explain("r", None).attempts[0].notes
    assert f"{pair.helper.removesuffix('.1')} computes every second chunk" in note
    pair.end()


@pytest.mark.parametrize("how", ["refuses", "fails", "leaves", "forgets", "drains", "says nothing"])
def test_the_prompt_needs_no_helper(pair: Pair, how: str) -> None:
    lab = pair.lab
    match how:
        case "refuses":
            lab.say(pair.helper, msg.Refused("r", 1, "busy"))
        case "fails":
            lab.say(pair.helper, msg.AttemptFailed("r", 1, "internal", "a fault"))
        case "leaves":
            lab.leaves(pair.helper)
        case "forgets":
            lab.beat(pair.helper, held("r", 1, 8))
            for _ in range(2):
                lab.beat(pair.helper)
        case "drains":
            lab.tell(DrainWorker(pair.helper.removesuffix(".1")))
        case _:
            pass
    pair.end()
    assert how not in ("drains", "says nothing") or lab.cancelled(pair.helper) == [1]


def test_the_death_of_the_prefill_worker_ends_the_attempt_of_both(pair: Pair) -> None:
    lab = pair.lab
    lab.leaves(pair.main)
    assert lab.cancelled(pair.helper) == [1]
    lab.say(pair.decode, msg.Accepted("r", 2))
    pair.main = pair.helper
    assert lab.sent(msg.Prefill)[-1].ring is None
    pair.end(attempts=2)


def test_a_newcomer_goes_to_no_worker_of_the_two_while_a_third_is_idle(pair: Pair) -> None:
    lab = pair.lab
    third = lab.join("prefill", "prefill-2", model=RINGS)
    lab.report(third, msg.LoadReport(prefill_rate=20.0))
    lab.submit("s", prompt=30)
    lab.say(pair.decode, msg.Accepted("s", 1))
    (order,) = [order for order in lab.sent(msg.Prefill) if order.request == "s"]
    assert order in lab.sent(msg.Prefill, third)
    assert order.ring is None
