"""Whole stores in any order of events: see `tests.kvstore.world` for what they are up against."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.messages import PageSource
from tests.kvstore.world import HEARTBEAT, HOLD, SILENCE, WORDS, Node, Worker, World, waits_of_world
from tests.support.thorough import automaton
from tests.wait_for import assert_no_cycle

pytestmark = pytest.mark.slow

WHO = st.integers(0, 5)
PICK = st.integers(0, 12)
WORD = st.sampled_from(WORDS)
START = st.sampled_from([0, 0, 0, 1, 2])
OFTEN = st.sampled_from([True, True, False])
LONG = st.sampled_from(["abcd", "abxy", "cde"])
SELDOM = st.sampled_from([False] * 7 + [True])
ASKED = st.one_of(st.none(), st.none(), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=2))
"""Stores to ask, the last of them long gone, and how many pages they are believed to have; or just all the others."""


class TiersMachine(RuleBasedStateMachine):
    """Every rule is one thing that may happen. `prompt`: then all that it leads to happens at once, undisturbed."""

    @initialize(
        nodes=st.sampled_from([2, 2, 3]),
        admit_after=st.sampled_from([1, 1, 2, 1_000]),
        room=st.sampled_from([3, 50]),
        there=st.lists(st.tuples(WHO, WORD), min_size=3, max_size=6),
    )
    def begin(self, nodes: int, admit_after: int, room: int, there: list[tuple[int, str]]) -> None:
        self.world = World(nodes, admit_after, room)
        for node in self.world.nodes:
            for worker in node.workers:
                self.world.attach(worker)
        for who, word in there:
            self.world.write(self.who(who), word, hold=False)
            self.world.flow()

    def who(self, number: int) -> Worker:
        return self.where(number).workers[number // len(self.world.nodes) % 2]

    def where(self, number: int) -> Node:
        return self.world.nodes[number % len(self.world.nodes)]

    def sources(self, worker: Worker, asked: list[tuple[int, int]] | None) -> tuple[PageSource, ...]:
        names = [node.incarnation for node in self.world.nodes]
        if asked is None:
            return tuple(PageSource(name, "inproc", 5) for name in names if name != worker.node.incarnation)
        return tuple(PageSource(names[n] if n < len(names) else "gone", "inproc", pages) for n, pages in asked)

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

    @rule(who=WHO, word=WORD, start=START, asked=ASKED, until=st.integers(0, 5), prompt=OFTEN, promptly=OFTEN)
    def load(
        self, who: int, word: str, start: int, asked: list[tuple[int, int]] | None, until: int, prompt: bool,
        promptly: bool,
    ) -> None:  # fmt: skip
        """A cached prefix, from wherever it is; often it is somewhere, and not here."""
        worker = self.who(who)
        if promptly and (elsewhere := self.world.elsewhere(worker.node)):
            word = elsewhere[until * len(word) % len(elsewhere)]
        number = self.world.acquire(worker, word, start, False, self.sources(worker, asked))
        self.go_on(worker, prompt)
        if until:
            self.world.promote(worker, number, until)
            self.go_on(worker, promptly)

    @rule(who=WHO, word=WORD, start=START, asked=ASKED, maker=st.one_of(st.none(), WHO), prompt=OFTEN)
    def hand_off(
        self, who: int, word: str, start: int, asked: list[tuple[int, int]] | None, maker: int | None, prompt: bool
    ) -> None:
        """Acquire pages that a worker may be writing."""
        if maker is not None:
            self.world.reserve(self.who(maker), word, 0)
            self.go_on(self.who(maker), prompt)
        self.world.acquire(self.who(who), word, start, True, self.sources(self.who(who), asked))
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
                self.world.tell_of_deaths(worker.node)
            case _:
                self.world.close_orphans(worker.node)

    # --- threads and wires ------------------------------------------------------------------------------------------

    @rule(who=WHO, pick=PICK, times=st.integers(1, 4),
          what=st.sampled_from(["transport", "loop", "loop", "disk", "fails", "calls", "replies"]))  # fmt: skip
    def a_little(self, who: int, pick: int, times: int, what: str) -> None:
        """One node or worker does a few pending steps of its work, late."""
        node = self.where(who)
        for _ in range(times):
            match what:
                case "transport":
                    node.carry_out()
                case "loop":
                    node.hear()
                case "disk" | "fails":
                    node.work_on_disk(pick, ok=what == "disk")
                case "calls":
                    self.world.travel(self.who(who), 1, 0)
                case _:
                    self.world.travel(self.who(who), 0, 1)

    @rule(pick=PICK, mishap=st.sampled_from(["", "damaged", "twice", "later", "cut", "cut", "haunt"]),
          times=st.integers(1, 8), prompt=OFTEN)  # fmt: skip
    def wire(self, pick: int, mishap: str, times: int, prompt: bool) -> None:
        """Some of what is on the wires arrives; `prompt`: what that leads to goes out at once. Then something fails."""
        for turn in range(times):
            if prompt:
                self.world.hear()
            self.world.deliver(pick, mishap if turn == times - 1 else "")
        if mishap == "cut":
            self.world.wires.cut(pick)
        elif mishap == "haunt":
            self.world.wires.haunt()

    def begin_load(self, who: int, word: str, wait: bool, times: int, slept: bool = False) -> tuple[Worker, Node]:
        """A chain is loaded from another store, as far as `times` parcels go; perhaps by one that has slept."""
        worker, source = self.who(who), self.where(who + 1)
        self.world.write(source.workers[0], word, hold=False)
        asked = [((who + 1) % len(self.world.nodes), 4)]
        number = self.world.acquire(worker, word, 0, wait, self.sources(worker, asked))
        self.world.travel(worker)
        if slept:
            self.world.pass_time(HOLD + HEARTBEAT)
        self.world.promote(worker, number, 5)
        self.world.travel(worker)
        for _ in range(times):
            self.world.hear()
            self.world.deliver(0)
        self.world.hear()
        return worker, source

    @rule(who=WHO, word=LONG, wait=st.booleans(), times=st.integers(0, 4), prompt=OFTEN)
    def cut_off(self, who: int, word: str, wait: bool, times: int, prompt: bool) -> None:
        """The connection breaks while pages come from another store."""
        self.begin_load(who, word, wait, times)
        self.world.wires.cut(0)
        if prompt:
            self.world.settle()

    @rule(who=WHO, pick=PICK, word=LONG, wait=st.booleans(), times=st.integers(0, 4), slept=SELDOM, prompt=OFTEN,
          then=st.sampled_from(["", "damaged", "spoil", "time", "pressure", "restart"]))  # fmt: skip
    def interrupted(
        self, who: int, pick: int, word: str, wait: bool, times: int, slept: bool, prompt: bool, then: str
    ) -> None:
        """Something else happens while pages come from another store."""
        worker, source = self.begin_load(who, word, wait, times, slept)
        match then:
            case "damaged":
                self.world.deliver(0, "damaged")
            case "spoil":
                source.spoil(pick)
            case "pressure":
                for node in (worker.node, source):
                    self.world.write(node.workers[1], WORDS[pick % len(WORDS)], hold=False)
            case "time":
                self.world.pass_time(SILENCE + HEARTBEAT, asleep=pick % 2)
            case "restart" if pick == 0:
                self.restart(source)
            case _:
                pass
        if prompt:
            self.world.settle()

    @rule(who=WHO, pick=PICK, word=LONG, wait=SELDOM, prompt=OFTEN, anew=SELDOM,
          then=st.sampled_from(["", "fails", "spoil", "pressure"]))  # fmt: skip
    def from_disk(self, who: int, pick: int, word: str, wait: bool, prompt: bool, anew: bool, then: str) -> None:
        """A chain is loaded from the disk, perhaps by a store that has just been started anew."""
        node = self.where(who)
        self.world.write(node.workers[0], word, hold=False)
        self.world.write(node.workers[0], word, hold=False)
        if anew:
            self.world.flow()
            self.restart(node)
        else:
            for other in ("g", "ab" if word == "cde" else "cd"):
                self.world.write(node.workers[1], other, hold=False)
        number = self.world.acquire(self.who(who), word, 0, wait, ())
        self.world.travel(self.who(who))
        self.world.promote(self.who(who), number, 5)
        self.world.travel(self.who(who))
        match then:
            case "fails":
                node.work_on_disk(pick, ok=False)
            case "spoil":
                node.spoil_disk(pick)
            case "pressure":
                self.world.write(node.workers[1], WORDS[pick % len(WORDS)], hold=False)
            case _:
                pass
        if prompt:
            self.world.flow()

    @rule(who=WHO, word=LONG, on_disk=st.booleans(), handed=st.integers(1, 2), first=st.booleans(), prompt=OFTEN)
    def crossing(self, who: int, word: str, on_disk: bool, handed: int, first: bool, prompt: bool) -> None:
        """Two stores want the same pages of each other, one of them or both (`handed`) for a hand-off. A prefill worker
        wants them as well, and was told, perhaps wrongly, that another store has them cached."""
        nodes = (self.where(who), self.where(who + 1))
        if on_disk:
            for other in (word, word, "g", "ab" if word == "cde" else "cd"):
                self.world.write(nodes[0].workers[1], other, hold=False)
            self.world.flow()

        def hand_offs() -> None:
            for node, other in list(zip(nodes, reversed(nodes), strict=True))[:handed]:
                sources = (PageSource(other.incarnation, "inproc", 5),)
                self.world.acquire(node.workers[0], word, 0, True, sources)
                self.world.travel(node.workers[0])
            if prompt:
                self.world.flow()

        if first:
            hand_offs()
        for node, other in list(zip(nodes, reversed(nodes), strict=True))[2 - handed :]:
            sources = (PageSource(other.incarnation if handed == 1 else "gone", "inproc", 5),)
            number = self.world.acquire(node.workers[1], word, 0, False, sources)
            self.world.travel(node.workers[1])
            self.world.promote(node.workers[1], number, 5)
            self.world.travel(node.workers[1])
        if not first:
            hand_offs()
        self.world.flow()

    def restart(self, node: Node) -> None:
        node.restart()
        for worker in node.workers:
            self.world.attach(worker)

    @rule(prompt=OFTEN)
    def flow(self, prompt: bool) -> None:
        self.world.flow()
        if prompt:
            self.world.settle()

    @rule(pick=PICK, what=st.sampled_from(["arena", "arena", "disk", "evict", "full"]))
    def damage(self, pick: int, what: str) -> None:
        node = self.where(pick)
        match what:
            case "arena":
                node.spoil(pick)
            case "disk":
                node.spoil_disk(pick)
            case "evict":
                node.evict_from_disk(pick)
            case _:
                node.disk.working = not node.disk.working

    @rule(who=WHO, what=st.sampled_from(["restart", "same", "other"]), sure=SELDOM)
    def upheaval(self, who: int, what: str, sure: bool) -> None:
        """A store is started anew, or all workers of a machine are."""
        node = self.where(who)
        if what == "restart" and sure:
            self.restart(node)
        elif sure:
            self.world.flow()
            self.world.move_in(node, what == "other")

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
            assert_no_cycle(waits_of_world(self.world))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.everybody_goes()


TestTiers = TiersMachine.TestCase
TestTiers.settings = automaton(count=500, steps=60)
