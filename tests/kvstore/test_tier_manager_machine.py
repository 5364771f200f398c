"""Whole stores in any order of events: see `tests.kvstore.world` for what they are up against."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from baton.messages import PageSource
from tests.kvstore.test_state_machine import OFTEN, PICK, SELDOM, WHO, StoreMachine
from tests.kvstore.world import HEARTBEAT, HOLD, SILENCE, WORDS, Node, Worker
from tests.support.thorough import automaton

pytestmark = pytest.mark.slow

LONG = st.sampled_from(["abcd", "abxy", "cde"])


class TiersMachine(StoreMachine):
    """Several stores with disks, and the wires between them."""

    alone = False

    @rule(pick=PICK, mishap=st.sampled_from(["", "damaged", "twice", "later", "cut", "cut", "haunt"]),
          times=st.integers(1, 8), prompt=OFTEN)  # fmt: skip
    def wire(self, pick: int, mishap: str, times: int, prompt: bool) -> None:
        """Some of what is on the wires arrives; `prompt`: what that leads to goes out at once. Then something fails."""
        for turn in range(times):
            if prompt:
                self.world.hear()
            self.world.wires.deliver(pick, mishap if turn == times - 1 else "")
        if mishap == "cut":
            self.world.wires.cut(pick)
        elif mishap == "haunt":
            self.world.wires.haunt()

    def begin_load(self, who: int, word: str, wait: bool, times: int, slept: bool = False) -> tuple[Worker, Node]:
        """A chain is loaded from another store, as far as `times` parcels go; perhaps by one that has slept."""
        worker, source = self.who(who), self.where(who + 1)
        self.world.write(source.workers[0], word, hold=False)
        holders = [((who + 1) % len(self.world.nodes), 4)]
        number = self.world.acquire(worker, word, 0, wait, self.sources(worker, holders))
        self.world.travel(worker)
        if slept:
            self.world.pass_time(HOLD + HEARTBEAT)
        self.world.promote(worker, number, 5)
        self.world.travel(worker)
        for _ in range(times):
            self.world.hear()
            self.world.wires.deliver(0)
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
                self.world.wires.deliver(0, "damaged")
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
                node.work_on_some(pick, ok=False)
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


TestTiers = TiersMachine.TestCase
TestTiers.settings = automaton(count=500, steps=60)
