"""Placement: the lowest predicted time to first token that keeps every objective, loads where they pay, and a split
where it can work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from baton import config as configuration
from baton.messages import AttemptName, Hello, Load, ModelCard, Namespace, Peer, Source, TierRun, TierSpeed
from kvstore.cost import DEFAULT_PREFILL_RATE
from kvstore.prefix_map import Match
from router.costs import PrefillCost, StepCost
from router.peers import Member, Members, Prompt, Work
from router.placement import Ask, Choice, LowestTtft, Reject, Wait, plan_for
from router.plan import Plan
from router.prices import Prices
from router.reach import Prefix
from router.view import View

PREFIX = Prefix(pages=8, page_size=10, page_bytes=1_000)
TAIL = 4  # tokens after the prefix
RATE = 100.0  # tokens per second: a page is computed in 0.1 s
PAGE = 0.1
STEP = 0.01
QUICK = TierSpeed("disk", latency=0.01, bytes_per_second=1e6)  # a page is loaded in 1 ms
SLOW = TierSpeed("disk", latency=0.01, bytes_per_second=1e3)  # a page is loaded in 1 s
NEAR = TierSpeed("remote", latency=0.02, bytes_per_second=1e6)
FAR = TierSpeed("remote", latency=0.02, bytes_per_second=1e3)
CONFIG = configuration.Config(
    pages=configuration.PagesConfig(page_size=10), prefill=configuration.PrefillConfig(max_prompts=2)
)
NAMESPACE = Namespace(model=b"m" * 16, numerics=1, kv_dtype="float32", page_size=10, layout=1)


@dataclass
class Cluster:
    """Live members and what they cost; time stands still unless a test moves it."""

    members: Members = field(default_factory=lambda: Members(10))
    placer: LowestTtft = field(default_factory=LowestTtft)
    held: dict[str, Match] = field(default_factory=dict[str, Match])
    prefills: dict[str, PrefillCost] = field(default_factory=dict[str, PrefillCost])
    steps: dict[str, StepCost] = field(default_factory=dict[str, StepCost])
    now: float = 100.0
    given: int = 0

    def __post_init__(self) -> None:
        self.view = View(CONFIG, self.members, self)

    def prefill(self, incarnation: str) -> PrefillCost:
        return self.prefills.get(incarnation, PrefillCost(0.0, 1 / RATE, 0.0))

    def step(self, incarnation: str) -> StepCost:
        return self.steps.get(incarnation, StepCost(STEP, 0.0, 0.0))

    def join(self, role: Any, name: str, node: str, pool: int = 1_000, **more: Any) -> Member:
        card = None if role == "store" else ModelCard(NAMESPACE, 1_000, 100, 10_000, pool)
        member = self.members.join(Hello(Peer(role, name, node, name, 1), model=card, **more), self.now)
        if role != "store":
            member.reports(Load(prefill_rate=RATE), 0, Load(), self.now)
        return member

    def decoder(self, name: str = "d0", node: str = "a", device: int = 0, busy: int = 0, pool: int = 1_000) -> Member:
        """`busy`: pages of prompts that it has to compute."""
        return self._worker(self.join("decode", name, node, pool), device, busy)

    def prefiller(self, name: str = "p0", node: str = "a", device: int = 0, busy: int = 0, slots: int = 1) -> Member:
        member = self._worker(self.join("prefill", name, node), device, busy)
        for taken in range(len(member.slots), 2 - slots):
            member.promise(AttemptName(f"slot {taken}", 1), Prompt(0), self.now)
        return member

    def _worker(self, member: Member, device: int, busy: int) -> Member:
        if device:
            self.held[member.incarnation] = Match(device, {"GPU": device})
        if busy:
            member.promise(AttemptName("busy", 1), Prompt(busy * 10), self.now)
        return member

    def store(
        self,
        node: str = "a",
        host: int = 0,
        disk: int = 0,
        *,
        serves: bool = True,
        speeds: tuple[TierSpeed, ...] = (QUICK, NEAR),
    ) -> Member:
        member = self.join("store", f"s-{node}", node, data=f"tcp://{node}" if serves else "")
        member.reports(Load(tiers=speeds), 0, Load(), self.now)
        if host + disk:
            self.held[member.incarnation] = Match(host + disk, {"CPU": host, "DISK": disk} if disk else {"CPU": host})
        return member

    def runs(self, member: Member, count: int, tpot: float | None = None, pages: int = 0, context: int = 100) -> None:
        """Give a decode worker sequences."""
        for _ in range(count):
            self.given += 1
            work = Work(self.given, 1, context=context, taken=pages, tpot=tpot)
            member.give(AttemptName(f"running {self.given}", 1), work)

    def ask(self, **more: Any) -> Ask:
        prefix: Prefix = more.pop("prefix", PREFIX)
        tokens = prefix.pages * prefix.page_size + TAIL
        held = {incarnation: match for incarnation, match in self.held.items() if self.members.get(incarnation)}
        return Ask("r", prefix, (), more.pop("held", held), tokens, more.pop("max_tokens", 10), tokens, **more)

    def choose(self, **more: Any) -> Choice:
        self.view.begin(self.now)
        return self.placer.place(self.ask(**more), self.view)

    def queued(self) -> float:
        """Seconds that a prompt would wait for those before it on the first decode worker."""
        self.choose()
        assert self.view.weighed is not None
        return float(self.view.weighed.queue[0])

    def plan(self, **more: Any) -> Plan:
        choice = self.choose(**more)
        assert isinstance(choice, Plan), choice
        return choice

    def begin(self, plan: Plan, name: str = "") -> AttemptName:
        """Count a plan as the router does when it sends it."""
        self.given += 1
        attempt = AttemptName(name or f"r{self.given}", 1)
        new, known = (PREFIX.pages - plan.cached) * 10, plan.cached * 10
        if plan.prefill is not None:
            self.members.live(plan.prefill).promise(attempt, Prompt(new, known), self.now)
        else:
            self.members.live(plan.decode).promise(attempt, Prompt(new + TAIL, known), self.now)
        self.members.live(plan.decode).give(attempt, Work(self.given, 9, context=100.0))
        return attempt


def source(node: str, pages: int) -> Source:
    return Source(f"s-{node}", f"tcp://{node}", pages)


def one_node(**store: Any) -> Cluster:
    """A decode worker, a prefill worker and a store."""
    cluster = Cluster()
    cluster.decoder()
    cluster.prefiller()
    cluster.store(**store)
    return cluster


# --- one node ---


def test_missing_pages_are_prefilled_elsewhere() -> None:
    plan = one_node(host=3).plan()
    assert plan == Plan("d0", "p0", fetch=8, cached=3, store="s-a")
    assert plan.awaited
    assert plan.predicted.compute == pytest.approx(5 * PAGE)
    assert plan.predicted.step == pytest.approx(STEP + TAIL / RATE)
    assert plan.predicted.total == pytest.approx(5 * PAGE + STEP + TAIL / RATE)
    assert plan.tpot == pytest.approx(STEP)


def test_nothing_missing_nothing_split() -> None:
    assert one_node().plan(prefix=Prefix(0, 10, 1_000)) == Plan("d0")
    assert one_node(host=8).plan() == Plan("d0", fetch=8, cached=8, store="s-a")
    cluster = one_node(host=2)
    cluster.held["d0"] = Match(8)
    assert cluster.plan() == Plan("d0", cached=8)


def test_a_split_needs_a_prefill_worker_and_a_store_on_both_nodes() -> None:
    for has_prefill, stores, decode_node in [(True, "a", "b"), (True, "b", "b"), (True, "", "a"), (False, "a", "a")]:
        cluster = Cluster()
        cluster.decoder(node=decode_node)
        for node in stores:
            cluster.store(node)
        if has_prefill:
            cluster.prefiller()
        assert cluster.plan() == Plan("d0")


def test_nobody_is_placed_where_nobody_lives() -> None:
    cluster = Cluster()
    cluster.prefiller()
    cluster.store()
    assert isinstance(cluster.choose(), Wait)
    cluster.decoder(pool=5)
    assert isinstance(cluster.choose(), Wait)
    cluster.decoder("d1")
    assert cluster.plan().decode == "d1"
    cluster.members.live("d1").drain(draining=True)
    assert isinstance(cluster.choose(), Wait)


def test_the_longest_prefix_wins_until_it_costs_more_than_it_saves() -> None:
    cluster = Cluster()
    cluster.decoder("d0")
    cluster.decoder("d1", device=6)
    assert cluster.plan() == Plan("d1", cached=6)
    cluster.members.live("d1").promise(AttemptName("busy", 1), Prompt(70), cluster.now)
    assert cluster.plan() == Plan("d0")
    cluster.now += 0.2  # by then it has computed some of that
    assert cluster.plan() == Plan("d1", cached=6)


def test_the_prefill_worker_that_is_done_first_is_chosen() -> None:
    cluster = one_node()
    cluster.prefiller("p1", busy=5, device=3)
    cluster.prefiller("p2", busy=5)
    assert cluster.plan().prefill == "p0"
    cluster.members.live("p0").promise(AttemptName("busy", 1), Prompt(40), cluster.now)
    assert cluster.plan() == Plan("d0", "p1", fetch=8, cached=3, store="s-a")
    cluster.prefiller("p3", busy=20)
    cluster.prefills["p3"] = PrefillCost(0.0, 1 / RATE / 10, 0.0)
    assert cluster.plan().prefill == "p3"


def test_long_contexts_make_computing_dearer() -> None:
    cluster = one_node(host=4)
    cluster.prefills = dict.fromkeys(("p0", "d0"), PrefillCost(0.5, 0.01, 0.001))
    assert cluster.plan().predicted.compute == pytest.approx(0.5 + 40 * 0.01 + (40 * 40 + 40 * 41 / 2) * 0.001)


def test_a_local_plan_needs_nobody() -> None:
    cluster = one_node(host=8)
    cluster.store("b", host=8)
    cluster.decoder("d1", device=2)
    assert cluster.plan(local=True) == Plan("d1", cached=2)


# --- waiting ---


def test_a_full_prefill_worker_is_waited_for_where_that_is_quicker() -> None:
    cluster = one_node()
    prefill = cluster.members.live("p0")
    cluster.runs(cluster.members.live("d0"), 4)  # a prompt here would make four wait for their next tokens
    for slot in range(2):
        prefill.promise(AttemptName(f"slot {slot}", 1), Prompt(80), cluster.now)
    choice = cluster.choose()
    assert isinstance(choice, Wait)
    assert "p0" in choice.why
    assert choice.predicted == pytest.approx(24 * PAGE + STEP + TAIL / RATE)
    other = cluster.prefiller("p1", busy=10)
    assert cluster.plan().prefill == "p1"
    other.promise(AttemptName("more", 1), Prompt(200), cluster.now)
    assert isinstance(cluster.choose(), Wait)
    prefill.computed(AttemptName("slot 0", 1))
    assert cluster.plan().prefill == "p0"


def test_a_decode_worker_that_is_always_busy_still_has_all_its_prompts_before_it() -> None:
    """Beside those who decode a prompt takes longer than it would alone; so what is left counts from its end."""
    cluster = Cluster()
    decode = cluster.decoder()
    names = [AttemptName(f"prompt {number}", 1) for number in range(3)]
    for name in names:
        decode.promise(name, Prompt(200), cluster.now)
    queues = [cluster.queued()]
    for name in names[:2]:
        cluster.now += 3 * queues[0]
        decode.computed(name, cluster.now)
        queues.append(cluster.queued())
    assert queues == pytest.approx([queues[0], queues[0] * 2 / 3, queues[0] / 3])


def test_those_who_wait_count_for_those_behind_them() -> None:
    cluster = one_node()
    cluster.runs(cluster.members.live("d0"), 40)
    for name, pages in (("p0", 4), ("p1", 19)):
        worker = cluster.members.live("p0") if name == "p0" else cluster.prefiller("p1")
        for slot in range(2):
            worker.promise(AttemptName(f"{name} {slot}", 1), Prompt(pages * 10), cluster.now)
    cluster.view.begin(cluster.now)
    waits = [cluster.placer.place(cluster.ask(), cluster.view) for _ in range(6)]
    assert all(isinstance(wait, Wait) for wait in waits)
    predicted = [wait.predicted for wait in waits if isinstance(wait, Wait) and wait.predicted]
    assert predicted == sorted(predicted)
    named = Counter(wait.why.split()[0] for wait in waits if isinstance(wait, Wait))
    assert named == {"p0": 5, "p1": 1}


def test_a_decode_worker_computes_what_would_wait_longer_elsewhere() -> None:
    cluster = one_node()
    cluster.prefiller("p1", busy=20)
    cluster.members.live("p0").promise(AttemptName("busy", 1), Prompt(200), cluster.now)
    assert cluster.plan() == Plan("d0")
    cluster.runs(cluster.members.live("d0"), 10)
    assert cluster.plan().prefill is not None, "ten streams would wait for it"


def test_an_operator_may_want_every_prompt_split() -> None:
    cluster = one_node()
    cluster.prefiller("p1", busy=20)
    cluster.members.live("p0").promise(AttemptName("busy", 1), Prompt(200), cluster.now)
    assert cluster.plan().prefill is None
    cluster.view.config = msgspec.structs.replace(CONFIG, router=configuration.RouterConfig(split="always"))
    assert cluster.plan().prefill is not None
    assert cluster.plan(local=True).prefill is None, "a last attempt"
    assert cluster.plan(avoid=["p0", "p1"]).prefill is None, "there is nobody else"
    cluster.held["d0"] = Match(PREFIX.pages, {"GPU": PREFIX.pages})
    assert cluster.plan().prefill is None, "nothing is missing"


# --- objectives ---


def test_a_decode_worker_takes_no_more_than_its_objectives_allow() -> None:
    cluster = Cluster()
    one, other = cluster.decoder("d0"), cluster.decoder("d1", busy=2)
    cluster.steps = dict.fromkeys(("d0", "d1"), StepCost(0.01, 0.001, 0.0))
    cluster.runs(one, 9)
    assert cluster.plan(tpot=0.03, max_tokens=1_000).decode == "d0", "it has no prompts to compute"
    assert cluster.plan(tpot=0.0195, max_tokens=1_000).decode == "d1", "with ten sequences a step takes 20 ms"
    cluster.runs(one, 1, tpot=0.0205)
    assert cluster.plan(tpot=0.03, max_tokens=1_000).decode == "d1", "one of the others was promised less"
    cluster.runs(other, 9, tpot=0.0195)
    choice = cluster.choose()
    assert isinstance(choice, Wait)
    assert choice.predicted is not None
    assert isinstance(cluster.choose(tpot=0.005), Reject)


def test_prompts_to_be_computed_slow_everybodys_tokens() -> None:
    cluster = Cluster()
    one = cluster.decoder("d0")
    cluster.runs(one, 1, tpot=0.05)
    assert isinstance(cluster.choose(max_tokens=10), Wait), "0.8 s of prompt in the course of ten tokens"
    assert cluster.plan(max_tokens=100).decode == "d0"


def test_a_pool_that_is_full_is_waited_for() -> None:
    cluster = Cluster()
    one = cluster.decoder("d0", pool=40)
    cluster.runs(one, 3, pages=11)
    assert isinstance(cluster.choose(), Wait)
    one.drop(AttemptName("running 1", 1))
    assert cluster.plan().decode == "d0"
    one.reports(Load(pages_free=3, pages_total=40), cluster.given, Load(), cluster.now)
    assert isinstance(cluster.choose(), Wait), "whatever we thought, it has no more"


def test_what_other_routers_gave_a_worker_counts_when_it_is_told() -> None:
    cluster = one_node()
    cluster.prefiller("p1", busy=5)
    cluster.runs(cluster.members.live("d0"), 4)
    cluster.runs(cluster.decoder("d1"), 6)
    assert (cluster.plan().prefill, cluster.plan().decode) == ("p0", "d0")
    others = Load(2, 1, tokens_queued=100)
    cluster.members.live("p0").reports(others, 0, others, cluster.now)
    assert cluster.plan().prefill == "p1"
    cluster.members.live("d0").reports(
        Load(9, 0, context=500, prefill_rate=RATE), 0, Load(5, 0, context=300), cluster.now
    )
    assert cluster.plan().decode == "d1"


def test_an_objective_that_nobody_meets_is_told_at_once() -> None:
    cluster = one_node()
    choice = cluster.choose(ttft=0.5)
    assert isinstance(choice, Reject)
    assert choice.retry_after == pytest.approx(0.8 + STEP + TAIL / RATE - 0.5)
    assert cluster.plan(ttft=1.0).prefill == "p0"


# --- everybody's turn ---


def test_equals_are_used_in_turn() -> None:
    cluster = Cluster()
    for index in range(5):
        cluster.decoder(f"d{index}")
        cluster.prefiller(f"p{index}")
    cluster.store()
    plans = [cluster.plan() for _ in range(50)]
    assert set(Counter(plan.prefill for plan in plans).values()) == {10}
    assert set(Counter(plan.decode for plan in plans).values()) == {10}


def test_a_fresh_worker_is_no_magnet() -> None:
    """It is given work until its queue is as long as the others', counted from the moment of dispatch."""
    cluster = Cluster()
    for index in range(4):
        cluster.decoder(f"d{index}", busy=40)
    cluster.decoder("fresh")
    chosen: list[str] = []
    for _ in range(24):
        plan = cluster.plan()
        cluster.begin(plan)
        chosen.append(plan.decode)
    assert chosen[:4] == ["fresh"] * 4
    assert Counter(chosen)["fresh"] in (8, 9), "the 4 others have 4 s of work each, and take 4 more each"


def test_a_hot_prefix_spreads_as_its_rate_rises() -> None:
    """One worker has it; elsewhere it must be computed, once. No threshold says when that pays."""
    spread = [users_of_a_hot_prefix(per_second) for per_second in (2, 20, 40, 90)]
    assert spread == sorted(spread)
    assert (spread[0], spread[-1]) == (1, 4)


def users_of_a_hot_prefix(per_second: float) -> int:
    """How many of four workers have a share of its requests in the end."""
    cluster = Cluster()
    for index in range(4):
        cluster.decoder(f"d{index}")
    cluster.held["d0"] = Match(8)
    done: list[tuple[float, str, AttemptName]] = []
    used: Counter[str] = Counter()
    for turn in range(200):
        cluster.now = 100 + turn / per_second
        for when, name, attempt in [each for each in done if each[0] <= cluster.now]:
            cluster.members.live(name).drop(attempt)
            done.remove((when, name, attempt))
        plan = cluster.plan()
        cluster.held[plan.decode] = Match(8)
        done.append((cluster.now + plan.predicted.total, plan.decode, cluster.begin(plan)))
        used[plan.decode] += turn >= 100
    return sum(count > 5 for count in used.values())


# --- affinity ---


def test_a_key_stays_with_its_worker_while_that_lives() -> None:
    cluster = Cluster()
    for index in range(8):
        cluster.decoder(f"d{index}")
    homes = {key: cluster.plan(affinity=key).decode for key in map(str, range(64))}
    assert len(set(homes.values())) == 8
    assert all(cluster.plan(affinity=key).decode == home for key, home in homes.items())
    cluster.members.leave(cluster.members.live("d3"), "dead")
    moved = {key for key, home in homes.items() if cluster.plan(affinity=key).decode != home}
    assert moved == {key for key, home in homes.items() if home == "d3"}
    busy = cluster.members.live(homes["0"] if homes["0"] != "d3" else homes["1"])
    key = next(key for key, home in homes.items() if home == busy.incarnation)
    cluster.runs(busy, 1)
    busy.refuses(AttemptName("running 1", 1))
    assert isinstance(cluster.choose(affinity=key), Wait), "a key is hard: it waits for its worker"


# --- tiers below the arena ---


@pytest.mark.parametrize(
    ("here", "others", "expected"),
    [
        pytest.param({"host": 2, "disk": 4}, [], (6, [TierRun(QUICK, 4)], []), id="disk where that is quicker"),
        pytest.param(
            {"host": 2, "disk": 4, "speeds": (SLOW, NEAR)}, [], (2, [], []), id="no disk where that is slower"
        ),
        pytest.param(
            {"host": 2},
            [{"host": 7}],
            (7, [TierRun(NEAR, 5)], [source("b", 7)]),
            id="another node where that is quicker",
        ),
        pytest.param(
            {"host": 2, "speeds": (QUICK, FAR)}, [{"host": 7}], (2, [], []), id="no other node if that is slower"
        ),
        pytest.param(
            {"host": 2, "disk": 2},
            [{"host": 3, "disk": 4}],
            (7, [TierRun(QUICK, 2), TierRun(NEAR, 3)], [source("b", 7)]),
            id="the disk, and the rest from another node",
        ),
        pytest.param(
            {"host": 2, "disk": 2, "speeds": (QUICK, FAR)},
            [{"host": 7}],
            (4, [TierRun(QUICK, 2)], []),
            id="the disk, and no further",
        ),
        pytest.param(
            {"host": 1, "disk": 1, "speeds": (SLOW, NEAR)}, [{"host": 8}], (1, [], []), id="not past a slow run"
        ),
        pytest.param(
            {"host": 2},
            [{"host": 7}, {"host": 5}, {"host": 8, "serves": False}, {"host": 2}],
            (7, [TierRun(NEAR, 5)], [source("b", 7), source("c", 5)]),
            id="all that have more, the longest first",
        ),
    ],
)
def test_loads_are_taken_where_they_pay(
    here: dict[str, Any], others: list[dict[str, Any]], expected: tuple[int, list[TierRun], list[Source]]
) -> None:
    cached, loads, sources = expected
    cluster = Cluster()
    cluster.decoder()
    cluster.store(**here)
    for node, other in zip("bcdef", others, strict=False):
        cluster.store(node, **other)
    plan = cluster.plan()
    assert (plan.fetch, plan.cached) == (cached, cached)
    assert (list(plan.loads), list(plan.sources)) == (loads, sources)
    assert plan.predicted.compute == pytest.approx((8 - cached) * PAGE)


def test_only_what_follows_the_workers_own_pages_is_loaded() -> None:
    cluster = Cluster()
    cluster.decoder(device=4)
    cluster.store(host=2, disk=4)
    cluster.store("b", host=8)
    plan = cluster.plan()
    runs = (TierRun(QUICK, 2), TierRun(NEAR, 2))
    assert plan == Plan("d0", fetch=8, cached=8, store="s-a", sources=(source("b", 8),), loads=runs)
    assert plan.predicted.load == pytest.approx(0.01 + 0.002 + 0.02 + 0.002)


def test_a_prefill_worker_loads_what_pays_for_it() -> None:
    cluster = one_node(host=1)
    cluster.store("b", host=6)
    plan = cluster.plan()
    assert (plan.prefill, plan.cached) == ("p0", 6)
    assert (plan.sources, plan.prefill_sources) == ((), (source("b", 6),))
    cluster.held["p0"] = Match(6)
    has_them = cluster.plan()
    assert (has_them.cached, has_them.prefill_sources) == (6, ())
    cluster = one_node(host=1, speeds=(QUICK, FAR))
    cluster.store("b", host=6)
    slow_link = cluster.plan()
    assert (slow_link.cached, slow_link.prefill_sources) == (1, ())


def test_before_anything_is_measured_the_rates_that_workers_tell_count() -> None:
    cluster = Cluster()
    cluster.view = View(CONFIG, cluster.members)
    worker = cluster.decoder()
    assert cluster.plan().predicted.total == pytest.approx(84 / RATE)
    worker.reports(Load(), 0, Load(), cluster.now)
    assert cluster.plan().predicted.total == pytest.approx(84 / DEFAULT_PREFILL_RATE)


# --- two nodes ---


def two_nodes(a: dict[str, Any] | None = None, b: dict[str, Any] | None = None) -> Cluster:
    """A prefill worker on a, a decode worker on b, and a store on each."""
    cluster = Cluster()
    cluster.prefiller(node="a")
    cluster.decoder(node="b")
    if a is not None:
        cluster.store("a", **a)
    if b is not None:
        cluster.store("b", **b)
    return cluster


def test_a_pair_of_two_nodes_hands_pages_over_from_store_to_store() -> None:
    plan = two_nodes({"host": 3}, {}).plan()
    assert plan == Plan("d0", "p0", fetch=8, cached=3, store="s-b", sources=(source("a", 8),))
    assert plan.predicted.transfer == pytest.approx(NEAR.latency)
    slow = two_nodes({"host": 3}, {"speeds": (QUICK, FAR)})
    slow.runs(slow.members.live("d0"), 20)
    assert slow.plan().predicted.transfer == pytest.approx(8.02 - 5 * PAGE), "the link is slower than the making"


def test_the_prefill_worker_gets_what_the_decode_workers_node_has() -> None:
    plan = two_nodes({}, {"host": 5}).plan()
    assert (plan.sources, plan.prefill_sources) == ((source("a", 8),), (source("b", 5),))


def test_a_pair_of_one_node_is_preferred_while_it_costs_no_more() -> None:
    cluster = two_nodes({}, {})
    cluster.decoder("d1", "a")
    assert cluster.plan().decode == "d1"
    cluster.prefiller("p1", "b")
    assert cluster.plan().sources == ()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param({"serves": False}, {}, id="the prefill worker's store serves nobody"),
        pytest.param(None, {}, id="the prefill worker's store is gone"),
        pytest.param({}, None, id="the decode worker's store is gone"),
    ],
)
def test_a_pair_of_two_nodes_needs_both_stores(a: dict[str, Any] | None, b: dict[str, Any] | None) -> None:
    assert two_nodes(a, b).plan() == Plan("d0")


def test_a_store_that_serves_nobody_may_be_served() -> None:
    assert two_nodes({}, {"serves": False}).plan().sources == (source("a", 8),)


def test_who_has_failed_a_request_is_not_asked_again() -> None:
    cluster = two_nodes({"host": 8}, {})
    assert cluster.plan().sources == (source("a", 8),)
    assert cluster.plan(avoid={"s-a"}) == Plan("d0")
    assert cluster.plan(avoid={"p0"}).prefill is None
    assert cluster.plan(avoid={"d0"}).decode == "d0", "there is no other"
    cluster.decoder("d1", "b")
    assert cluster.plan(avoid={"d0"}).decode == "d1"


# --- whatever there is ---


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    cluster = Cluster()
    nodes, pages, busy = st.sampled_from("abc"), st.integers(0, 8), st.integers(0, 20)
    for node in draw(st.lists(nodes, unique=True, max_size=3)):
        speeds = draw(st.tuples(st.sampled_from([QUICK, SLOW]), st.sampled_from([NEAR, FAR])))
        host, disk, serves = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.booleans())
        cluster.store(node, host, disk, serves=serves, speeds=speeds)
    for index in range(draw(st.integers(0, 4))):
        pool = draw(st.sampled_from([5, 40, 1_000]))
        member = cluster.decoder(f"d{index}", draw(nodes), draw(pages), draw(busy), pool)
        cluster.runs(member, draw(st.integers(0, 12)), draw(st.sampled_from([None, 0.02, 0.2])), pages=3)
        cluster.steps[f"d{index}"] = draw(st.sampled_from([StepCost(0.01, 0.0, 0.0), StepCost(0.005, 0.002, 1e-5)]))
        if draw(st.booleans()) and member.work:
            member.refuses(next(iter(member.work)))
    for index in range(draw(st.integers(0, 4))):
        cluster.prefiller(f"p{index}", draw(nodes), draw(pages), draw(busy), draw(st.integers(0, 2)))
        cluster.prefills[f"p{index}"] = draw(
            st.sampled_from([PrefillCost(0.0, 0.01, 0.0), PrefillCost(0.1, 0.001, 1e-5)])
        )
    return cluster


ASKS = st.fixed_dictionaries(
    {"local": st.booleans(), "tpot": st.sampled_from([None, 0.015, 0.1]), "max_tokens": st.sampled_from([1, 50])}
)


@given(cluster=clusters(), ask=ASKS)
def test_every_plan_can_be_carried_out(cluster: Cluster, ask: dict[str, Any]) -> None:
    choice = cluster.choose(**ask)
    if not isinstance(choice, Plan):
        return
    chosen = cluster.members.live(choice.decode)
    stores = {store.incarnation: store for store in cluster.members.of("store")}
    own = cluster.members.store_of(chosen.peer.node)
    assert chosen.busy_since is None, "full"
    assert chosen.hello.model is not None
    assert chosen.hello.model.pool_pages >= cluster.ask(**ask).needs
    assert choice.store == (own.incarnation if own and choice.fetch else "")
    predicted = choice.predicted
    assert min(predicted.queue, predicted.load, predicted.compute, predicted.transfer, predicted.step) >= 0
    assert predicted.wait == 0
    for each in (*choice.sources, *choice.prefill_sources):
        assert each.endpoint == stores[each.store].hello.data != ""
    assert all(stores[each.store].peer.node != chosen.peer.node for each in choice.sources)
    if ask["local"] or own is None:
        assert (choice.fetch, choice.prefill, choice.loads) == (0, None, ())
    elif choice.prefill is not None:
        maker = cluster.members.live(choice.prefill)
        assert len(maker.slots) < 2
        assert choice.fetch == PREFIX.pages > 0
        theirs = cluster.members.store_of(maker.peer.node)
        assert theirs is not None
        named = () if maker.peer.node == chosen.peer.node else (theirs.incarnation,)
        assert tuple(each.store for each in choice.sources) == named
        assert all(stores[each.store].peer.node != maker.peer.node for each in choice.prefill_sources)


@given(cluster=clusters(), ask=ASKS)
def test_arrays_say_what_one_way_at_a_time_says(cluster: Cluster, ask: dict[str, Any]) -> None:
    """Every pair and every decode worker alone, priced one by one in plain Python."""
    wanted = cluster.ask(**ask)
    choice = cluster.choose(**ask)
    prices = cluster.view.weighed
    if prices is None or not prices.decoders:
        return
    ways: dict[tuple[str | None, str], float] = {}
    for way in every_way(cluster, prices):
        seconds = by_hand(cluster, wanted, *way)
        maker = None if way[0] is None else prices.workers[way[0]].incarnation
        if seconds < inf:
            ways[maker, prices.workers[way[1]].incarnation] = seconds
            assert prices.predict(*way).total == pytest.approx(seconds)
    dear = {
        (maker, taker): seconds + (float(prices.nuisance[cluster.view.table.index[taker]]) if maker is None else 0.0)
        for (maker, taker), seconds in ways.items()
    }
    assert prices.lowest == pytest.approx(min(dear.values(), default=inf))
    if isinstance(choice, Plan):
        best = prices.lowest
        assert dear[choice.prefill, choice.decode] <= best + max(0.001, 0.02 * best) + 1e-9
        reach = prices.cached[cluster.view.table.index[choice.prefill or choice.decode]]
        assert choice.cached == reach, "arrays and the one function agree on what is loaded"


def every_way(cluster: Cluster, prices: Prices) -> Sequence[tuple[int | None, int]]:
    takers = range(prices.decoders)
    makers = range(prices.decoders, len(prices.workers))
    return [(None, taker) for taker in takers] + [(maker, taker) for maker in makers for taker in takers]


def by_hand(cluster: Cluster, ask: Ask, maker: int | None, taker: int) -> float:
    """Seconds of one way; inf: it can't be."""
    prices = cluster.view.weighed
    assert prices is not None
    decoder = prices.workers[taker]
    assert decoder.hello.model is not None
    if decoder.hello.model.pool_pages < ask.needs:
        return inf
    step = prices.step[taker]
    if maker is None:
        begins = max(prices.queue[taker], prices.wait_alone[taker])
        return begins + prices.load[taker] + prices.compute[taker] + step
    worker = prices.workers[maker]
    own, theirs = cluster.members.store_of(decoder.peer.node), cluster.members.store_of(worker.peer.node)
    same = worker.peer.node == decoder.peer.node
    if ask.local or own is None or theirs is None or not (same or theirs.hello.data):
        return inf
    cost = cluster.prefill(worker.incarnation)
    cached = int(prices.cached[maker])
    making = cost.seconds((PREFIX.pages - cached) * 10, cached * 10, 2_048)
    load = prices.load[maker]
    left = sum(cost.seconds(prompt.new, 0, 2_048) for prompt in worker.slots.values())
    held = ask.held.get(own.incarnation, Match(0))
    here = max(ask.on_device(decoder.incarnation), held.pages - held.tiers.get("DISK", 0))
    transfer = 0.0
    if not same and here < PREFIX.pages:
        speed = own.load.tiers[1]
        link = speed.latency + (PREFIX.pages - here) * PREFIX.page_bytes / speed.bytes_per_second
        transfer = max(speed.latency, link - load - making)
    return max(left, prices.wait[taker]) + load + making + transfer + step


@given(cluster=clusters(), more=st.integers(1, 30))
def test_a_longer_queue_makes_nobody_more_likely_to_be_chosen(cluster: Cluster, more: int) -> None:
    before = cluster.choose()
    if not isinstance(before, Plan):
        return
    for member in cluster.members:
        worker = before.prefill or before.decode
        if member.incarnation not in (worker, before.decode) and member.peer.role != "store":
            member.promise(AttemptName("more", 1), Prompt(more * 10), cluster.now)
    after = cluster.choose()
    assert isinstance(after, Plan)
    assert after.prefill == before.prefill or before.prefill is None
    assert after.predicted.queue == pytest.approx(before.predicted.queue)


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_of_many_workers_the_best_are_found(random: Any) -> None:
    """With more workers than are paired, the choice is as good as the best of all pairs."""
    cluster = Cluster()
    for index in range(40):
        node = f"n{index % 10}"
        if index < 10:
            cluster.store(node, host=random.randrange(9))
        cluster.decoder(f"d{index}", node, random.randrange(9), random.randrange(5))
        cluster.prefiller(f"p{index}", node, random.randrange(9), random.randrange(30), random.randrange(3))
    choice = cluster.choose()
    prices = cluster.view.weighed
    assert prices is not None
    seconds = {way: by_hand(cluster, cluster.ask(), *way) for way in every_way(cluster, prices)}
    dear = {way: value + (float(prices.nuisance[way[1]]) if way[0] is None else 0) for way, value in seconds.items()}
    assert prices.lowest <= min(dear.values()) * 1.02 + 0.001
    assert isinstance(choice, Plan | Wait)


def test_a_plan_for_chosen_workers_is_that_of_the_rule() -> None:
    cluster = two_nodes({"host": 3}, {})
    cluster.decoder("d1", "b")
    assert plan_for(cluster.ask(), cluster.view, "d1", "p0") == replace(cluster.plan(), decode="d1")
    assert plan_for(cluster.ask(), cluster.view, "d1") == Plan(
        "d1", fetch=3, cached=3, store="s-b", sources=(source("a", 3),), loads=(TierRun(NEAR, 3),)
    )


def test_candidates_tell_what_was_weighed() -> None:
    cluster = one_node(host=3)
    cluster.prefiller("p1", slots=0)
    cluster.decoder("d1", pool=5)
    plan = cluster.plan()
    assert cluster.view.weighed is not None
    told = {(each.decode, each.prefill): each for each in cluster.view.weighed.candidates()}
    assert told["d0", "p0"].predicted == plan.predicted
    assert (told["d0", "p0"].cached, told["d0", "p0"].why_not) == (30, "")
    assert "p1" in told["d0", "p1"].why_not
    assert "d1" in told["d1", ""].why_not
    assert told["d0", ""].predicted.total == pytest.approx(5 * PAGE + STEP + TAIL / RATE)
