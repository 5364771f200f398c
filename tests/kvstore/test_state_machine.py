"""A store under everything that its workers can do to it: they are as bad as real ones (`tests.kvstore.world`)."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.messages import PageSource
from tests.kvstore.world import WORDS, Node, Worker, World
from tests.support.thorough import automaton
from tests.support.wait_graph import assert_no_cycle

WHO = st.integers(0, 5)
PICK = st.integers(0, 12)
WORD = st.sampled_from(WORDS)
START = st.sampled_from([0, 0, 0, 1, 2])
OFTEN = st.sampled_from([True, True, False])
SELDOM = st.sampled_from([False] * 7 + [True])
HOLDERS = st.one_of(st.none(), st.none(), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=2))
"""Stores to ask, the last of them long gone, and how many pages they are believed to have; or just all the others."""


class StoreMachine(RuleBasedStateMachine):
    """Every rule is one thing that may happen. `prompt`: then all that it leads to happens at once, undisturbed.

    Here is one store with three workers and without a disk. In `test_tier_manager_machine.py` several have two."""

    alone = True

    @initialize(
        nodes=st.sampled_from([2, 2, 3]),
        admit_after=st.sampled_from([1, 1, 2, 1_000]),
        room=st.sampled_from([3, 50]),
        there=st.lists(st.tuples(WHO, WORD), min_size=3, max_size=6),
    )
    def begin(self, nodes: int, admit_after: int, room: int, there: list[tuple[int, str]]) -> None:
        self.world = World(1, 1_000, 0, workers=3) if self.alone else World(nodes, admit_after, room)
        for node in self.world.nodes:
            for worker in node.workers:
                self.world.attach(worker)
        for who, word in [] if self.alone else there:
            self.world.write(self.who(who), word, hold=False)
            self.world.flow()

    def who(self, number: int) -> Worker:
        return self.where(number).workers[number // len(self.world.nodes) % self.world.workers]

    def where(self, number: int) -> Node:
        return self.world.nodes[number % len(self.world.nodes)]

    def sources(self, worker: Worker, holders: list[tuple[int, int]] | None) -> tuple[PageSource, ...]:
        names = [node.incarnation for node in self.world.nodes]
        if holders is None:
            return tuple(PageSource(name, "inproc", 5) for name in names if name != worker.node.incarnation)
        return tuple(PageSource(names[n] if n < len(names) else "gone", "inproc", pages) for n, pages in holders)

    def go_on(self, worker: Worker, prompt: bool) -> None:
        if prompt:
            self.world.travel(worker)
            self.world.flow()

    # --- workers ----------------------------------------------------------------------------------------------------

    @rule(who=WHO, word=WORD, hold=SELDOM, prompt=OFTEN)
    def write(self, who: int, word: str, hold: bool, prompt: bool) -> None:
        self.world.write(self.who(who), word, hold)
        self.go_on(self.who(who), prompt)

    @rule(who=WHO, word=WORD, start=START, prompt=OFTEN, rival=SELDOM)
    def reserve(self, who: int, word: str, start: int, prompt: bool, rival: bool) -> None:
        for worker in self.where(who).workers if rival else [self.who(who)]:
            self.world.reserve(worker, word, start)
            self.go_on(worker, prompt)

    @rule(who=WHO, pick=PICK, skip=START, count=st.integers(1, 5), hold=st.booleans(), prompt=OFTEN)
    def seal(self, who: int, pick: int, skip: int, count: int, hold: bool, prompt: bool) -> None:
        for number in self.world.leases(self.who(who), pick, "writable"):
            self.world.seal(self.who(who), number, skip, count, hold)
        self.go_on(self.who(who), prompt)

    @rule(who=WHO, word=WORD, start=START, holders=HOLDERS, until=st.integers(0, 5), prompt=OFTEN, promptly=OFTEN)
    def load(
        self, who: int, word: str, start: int, holders: list[tuple[int, int]] | None, until: int, prompt: bool,
        promptly: bool,
    ) -> None:  # fmt: skip
        """A cached prefix, from wherever it is; often it is somewhere, and not here."""
        worker = self.who(who)
        if promptly and (elsewhere := self.world.elsewhere(worker.node)):
            word = elsewhere[until * len(word) % len(elsewhere)]
        number = self.world.acquire(worker, word, start, False, self.sources(worker, holders))
        self.go_on(worker, prompt)
        if until:
            self.world.promote(worker, number, until)
            self.go_on(worker, promptly)

    @rule(who=WHO, word=WORD, start=START, holders=HOLDERS, maker=st.one_of(st.none(), WHO), prompt=OFTEN)
    def hand_off(
        self, who: int, word: str, start: int, holders: list[tuple[int, int]] | None, maker: int | None, prompt: bool
    ) -> None:
        """Acquire pages that a worker may be writing."""
        if maker is not None:
            self.world.reserve(self.who(maker), word, 0)
            self.go_on(self.who(maker), prompt)
        self.world.acquire(self.who(who), word, start, True, self.sources(self.who(who), holders))
        self.go_on(self.who(who), prompt)

    @rule(who=WHO, accuse=SELDOM, prompt=OFTEN, forget=st.booleans())
    def read(self, who: int, accuse: bool, prompt: bool, forget: bool) -> None:
        worker = self.who(who)
        for number in [number for number, lease in worker.leases.items() if lease.arrived]:
            self.world.read(worker, number, accuse)
        self.go_on(worker, prompt)
        if forget:
            for number in [number for number, lease in worker.leases.items() if not lease.writable]:
                self.world.forget(worker, number)
            self.go_on(worker, prompt)

    @rule(who=WHO, pick=PICK, what=st.sampled_from(["promote", "promote", "forget", "beat", "scribble"]), until=PICK)
    def odds_and_ends(self, who: int, pick: int, what: str, until: int) -> None:
        worker = self.who(who)
        for number in self.world.leases(worker, pick, "below" if what == "promote" else ""):
            match what:
                case "promote":
                    self.world.promote(worker, number, until)
                case "forget":
                    self.world.forget(worker, number)
                case _:
                    self.world.beat(worker, number)
        if what == "scribble":
            self.world.scribble(worker, pick)

    @rule(who=WHO, kind=PICK, what=st.sampled_from(["attach", "lose", "die", "die", "misbehave", "tell", "close"]))
    def mishap(self, who: int, kind: int, what: str) -> None:
        worker = self.who(who)
        match what:
            case "attach":
                self.world.attach(worker)
            case "lose":
                self.world.lose_connection(worker)
            case "die":
                self.world.die(worker)
            case "misbehave":
                for number in self.world.leases(worker, kind, ""):
                    self.world.misbehave(worker, number, kind)
            case "tell":
                self.world.tell_of_death(worker.node)
            case _:
                self.world.close_orphan(worker.node, kind)

    @rule(who=WHO, pick=PICK, times=st.integers(1, 4),
          what=st.sampled_from(["transport", "loop", "loop", "disk", "fails", "calls", "replies"]))  # fmt: skip
    def a_little(self, who: int, pick: int, times: int, what: str) -> None:
        """One node or worker does a few pending steps of its work, late."""
        node = self.where(who)
        for _ in range(times):
            if what in ("calls", "replies"):
                self.world.go(what, self.who(who).pid)
            elif what == "fails":
                node.work_on_some(pick, ok=False)
            else:
                self.world.go(what, node.incarnation, pick=pick)

    @rule(who=WHO, what=st.sampled_from(["restart", "same", "other"]), sure=SELDOM)
    def upheaval(self, who: int, what: str, sure: bool) -> None:
        """A store is started anew, or all workers of a machine are."""
        node = self.where(who)
        if what == "restart" and sure:
            self.restart(node)
        elif sure:
            self.world.flow()
            self.world.move_in(node, what == "other")

    def restart(self, node: Node) -> None:
        node.restart()
        for worker in node.workers:
            self.world.attach(worker)

    @rule(prompt=OFTEN)
    def flow(self, prompt: bool) -> None:
        self.world.flow()
        if prompt:
            self.world.settle()

    # --- operators and time -----------------------------------------------------------------------------------------

    @rule(who=WHO, word=WORD, name=st.sampled_from("pq"), tenant=st.sampled_from("st"),
          ttl_ms=st.sampled_from([0, 300, 2_000]))  # fmt: skip
    def pin(self, who: int, word: str, name: str, tenant: str, ttl_ms: int) -> None:
        if ttl_ms:
            self.world.pin(self.where(who), name, tenant, word, ttl_ms)
        else:
            self.world.unpin(self.where(who), name)

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.3, 1.1, 3.5]), paused=SELDOM, asleep=st.integers(-3, 2))
    def time_passes(self, seconds: float, paused: bool, asleep: int) -> None:
        self.world.pass_time(seconds, paused, asleep)

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            for node in self.world.nodes:
                node.check()
            assert_no_cycle(self.world.waits())

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.everybody_goes()


TestStore = StoreMachine.TestCase
TestStore.settings = automaton(count=300, steps=60)
