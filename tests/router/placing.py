"""Clusters to place requests in, as small as a case needs them."""

from dataclasses import dataclass, field
from typing import Any

from baton import config as configuration
from baton.messages import AttemptName, Hello, LoadReport, ModelCard, Namespace, PageSource, Peer, TierSpeed
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.members import AssignedAttempt, ClusterMembership, MemberRecord, PendingPrefill
from router.placement.cached_prefix import CacheablePrefix
from router.placement.cluster_view import ClusterView
from router.placement.cost_matrix import PlacementCosts
from router.placement.policy import LowestTtft, PlacementDecision
from router.placement.step_costs import DecodeCost, PrefillCost
from router.placement.types import Placement, PlacementChoice, PlacementRequest

PREFIX = CacheablePrefix(pages=8, page_size=10, page_bytes=1_000)
TAIL = 4  # tokens after the prefix
REST = TAIL - 1  # of these, those that a prefill worker makes a partial page of
HANDED = PREFIX.pages + 1  # pages of a hand-off
RATE = 100.0  # tokens per second: a page is computed in 0.1 s
PAGE = 0.1
STEP = 0.01
QUICK = TierSpeed("disk", latency=0.01, bytes_per_second=1e6, measured=True)  # a page is loaded in 1 ms
SLOW = TierSpeed("disk", latency=0.01, bytes_per_second=1e3, measured=True)  # a page is loaded in 1 s
NEAR = TierSpeed("remote", latency=0.02, bytes_per_second=1e6, measured=True)
FAR = TierSpeed("remote", latency=0.02, bytes_per_second=1e3, measured=True)
CONFIG = configuration.Config(
    pages=configuration.PagesConfig(page_size=10), prefill=configuration.PrefillConfig(max_num_seqs=2)
)
NAMESPACE = Namespace(
    model=b"m" * 16, numerics="test", kv_dtype="float32", page_size=10, layout=1, form="split", kv_heads=1
)


@dataclass
class Cluster:
    """Live members and what they cost; time stands still unless a test moves it."""

    members: ClusterMembership = field(default_factory=lambda: ClusterMembership(10))
    placer: LowestTtft = field(default_factory=LowestTtft)
    held: dict[str, PrefixMatch] = field(default_factory=dict[str, PrefixMatch])
    prefills: dict[str, PrefillCost] = field(default_factory=dict[str, PrefillCost])
    steps: dict[str, DecodeCost] = field(default_factory=dict[str, DecodeCost])
    now: float = 100.0
    attempts: int = 0

    def __post_init__(self) -> None:
        self.view = ClusterView(CONFIG, self.members, self)

    def prefill(self, incarnation: str) -> PrefillCost:
        return self.prefills.get(incarnation, PrefillCost(0.0, 1 / RATE, 0.0))

    def step(self, incarnation: str) -> DecodeCost:
        return self.steps.get(incarnation, DecodeCost(STEP, 0.0, 0.0))

    def join(self, role: Any, name: str, node: str, pool: int = 1_000, **more: Any) -> MemberRecord:
        card = None if role == "store" else ModelCard(NAMESPACE, 1_000, 100, 10_000, pool)
        member = self.members.join(Hello(Peer(role, name, node, name, 1), model=card, **more), self.now)
        if role != "store":
            member.update_load(LoadReport(prefill_rate=RATE), 0, LoadReport(), self.now)
        return member

    def decoder(
        self, name: str = "d0", node: str = "a", device: int = 0, busy: int = 0, pool: int = 1_000
    ) -> MemberRecord:
        """`busy`: pages of prompts that it has to compute."""
        return self._worker(self.join("decode", name, node, pool), device, busy)

    def prefiller(
        self, name: str = "p0", node: str = "a", device: int = 0, busy: int = 0, slots: int = 1
    ) -> MemberRecord:
        member = self._worker(self.join("prefill", name, node), device, busy)
        for number in range(len(member.pending_prefills), 2 - slots):
            member.assign_prefill(AttemptName(f"slot {number}", 1), PendingPrefill(0), self.now)
        return member

    def _worker(self, member: MemberRecord, device: int, busy: int) -> MemberRecord:
        if device:
            self.held[member.incarnation] = PrefixMatch(device, {"GPU": device})
        if busy:
            member.assign_prefill(AttemptName("busy", 1), PendingPrefill(busy * 10), self.now)
        return member

    def store(
        self,
        node: str = "a",
        host: int = 0,
        disk: int = 0,
        *,
        serves: bool = True,
        speeds: tuple[TierSpeed, ...] = (QUICK, NEAR),
    ) -> MemberRecord:
        member = self.join("store", f"s-{node}", node, data=f"tcp://{node}" if serves else "")
        member.update_load(LoadReport(tiers=speeds), 0, LoadReport(), self.now)
        if host + disk:
            self.held[member.incarnation] = PrefixMatch(
                host + disk, {"CPU": host, "DISK": disk} if disk else {"CPU": host}
            )
        return member

    def runs(
        self, member: MemberRecord, count: int, tpot: float | None = None, pages: int = 0, context: int = 100
    ) -> None:
        """Give a decode worker sequences."""
        for _ in range(count):
            self.attempts += 1
            work = AssignedAttempt(self.attempts, 1, context=context, new_pages=pages, tpot=tpot)
            member.assign(AttemptName(f"running {self.attempts}", 1), work)

    def ask(self, **more: Any) -> PlacementRequest:
        prefix: CacheablePrefix = more.pop("prefix", PREFIX)
        tokens = prefix.pages * prefix.page_size + TAIL
        held = {incarnation: match for incarnation, match in self.held.items() if self.members.get(incarnation)}
        return PlacementRequest(
            "r", prefix, (), more.pop("held", held), tokens, more.pop("max_tokens", 10), tokens, **more
        )

    def decide(self, **more: Any) -> PlacementDecision:
        """Place one request, and record the decision as the router does."""
        decision = self.placer.place(self.ask(**more), self.view)
        if decision.reservation is not None:
            self.view.reserve(decision.reservation)
        if isinstance(decision.choice, Placement):
            self.view.mark_used(decision.choice)
        return decision

    def costs(self, **more: Any) -> PlacementCosts:
        """What the first decision of a round is made from."""
        self.view.begin_scan(self.now)
        costs = self.decide(**more).considered
        assert costs is not None
        return costs

    def choose(self, **more: Any) -> PlacementChoice:
        self.view.begin_scan(self.now)
        return self.decide(**more).choice

    def queued(self) -> float:
        """Seconds that a prompt would wait for those before it on the first decode worker."""
        return float(self.costs().queue[0])

    def plan(self, **more: Any) -> Placement:
        choice = self.choose(**more)
        assert isinstance(choice, Placement), choice
        return choice

    def begin(self, plan: Placement, name: str = "") -> AttemptName:
        """Count a plan as the router does when it sends it."""
        self.attempts += 1
        attempt = AttemptName(name or f"r{self.attempts}", 1)
        new, known = (PREFIX.pages - plan.cached_pages) * 10, plan.cached_pages * 10
        if plan.prefill is not None:
            self.members.require_live(plan.prefill).assign_prefill(attempt, PendingPrefill(new, known), self.now)
        else:
            self.members.require_live(plan.decode).assign_prefill(attempt, PendingPrefill(new + TAIL, known), self.now)
        self.members.require_live(plan.decode).assign(attempt, AssignedAttempt(self.attempts, 9, context=100.0))
        return attempt


def source(node: str, pages: int) -> PageSource:
    return PageSource(f"s-{node}", f"tcp://{node}", pages)


def one_node(**store: Any) -> Cluster:
    """A decode worker, a prefill worker and a store."""
    cluster = Cluster()
    cluster.decoder()
    cluster.prefiller()
    cluster.store(**store)
    return cluster


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
