"""Workers and stores of two nodes under any order of steps, losses, deaths, cancellations and restarts.

There is no router: requests are ordered at random, with hints and sources that may be wrong. A device never reads a
wrong page, no token differs from the reference, and no request waits beyond its deadline. When everything is cancelled,
nothing is left held or reserved.
"""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from baton.clock import Tick
from baton.config import DecodeConfig, PrefillConfig
from baton.messages import Cancel, Decode, PageSource, Prefill, Resend, SamplingParams
from decode_worker.sequence import SequencePhase
from kvstore.keys import cacheable_pages, pack_tokens
from kvstore.window_groups import NO_GROUPS, WindowGroups
from prefill_worker.scheduler import PrefillScheduler
from tests.support.thorough import automaton
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigMachine, RigStore, RigWorker, reference

pytestmark = pytest.mark.slow

NODES = ("a", "b")
SELDOM = st.sampled_from([False, False, False, True])
BIT = st.integers(0, 1)
WHO = st.integers(0, 3)
SOURCES = st.one_of(
    st.just([(0, 9), (1, 9)]), st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 9])), max_size=3)
)
"""Stores to ask (the last is long gone) and how many pages they are believed to have. A node's own is among them."""
SHARED = list(range(1, 25))
PROMPTS = st.builds(
    lambda shared, own: SHARED[:shared] + own,
    st.sampled_from([0, 3, 12, 16, 24]),
    st.lists(st.integers(0, 3), min_size=1, max_size=10),
)


class HandOff(RigMachine):
    @initialize(
        slots=st.integers(4, 24), pages=st.integers(10, 20), chunk=st.integers(PAGE, 12), copies=st.integers(1, 8),
        admit_after=st.integers(1, 2), share=st.sampled_from([0.25, 1.0]),
    )  # fmt: skip
    def start(self, slots: int, pages: int, chunk: int, copies: int, admit_after: int, share: float) -> None:
        self.rig = self.make_rig(slots, hold=5.0, nodes=NODES, admit_after=admit_after, load_share=share)
        self.rig.groups = self.groups
        pages *= 1 + self.groups.count
        self.pages = pages
        self.prefill_config = PrefillConfig(max_num_batched_tokens=chunk, max_num_seqs=3, store_timeout_ms=2_000)
        self.decode_config = DecodeConfig(max_num_batched_tokens=chunk, copies_per_step=copies, fetch_timeout_ms=2_000)
        self.workers: list[RigWorker] = []
        for node in NODES:
            self.workers.append(self.rig.worker("prefill", pages, self.prefill_config, node))
            self.workers.append(self.rig.worker("decode", pages, self.decode_config, node))

    make_rig: Callable[..., Rig] = Rig
    groups = NO_GROUPS  # of the model's layers

    def store(self, number: int) -> RigStore:
        return self.rig.stores[NODES[number]]

    def sources(self, chosen: list[tuple[int, int]]) -> tuple[PageSource, ...]:
        return tuple(
            self.store(number).source(pages) if number < len(NODES) else PageSource("gone", "inproc", pages)
            for number, pages in chosen
        )

    def pick(self, number: int, kind: str) -> RigWorker:
        of_kind = [w for w in self.workers if w.peer.role == kind]
        return of_kind[number % len(of_kind)]

    @rule(prompt=PROMPTS, count=st.integers(1, 12), to=BIT, fetch=st.integers(0, 6), awaited=st.booleans(),
          known=st.integers(0, 5), prefill=st.integers(0, 2), chosen=SOURCES, cached=SOURCES,
          partial=st.booleans())  # fmt: skip
    def order(
        self, prompt: list[int], count: int, to: int, fetch: int, awaited: bool, known: int, prefill: int,
        chosen: list[tuple[int, int]], cached: list[tuple[int, int]], partial: bool = True,
    ) -> None:  # fmt: skip
        """Anything may be ordered, and the hints may all be wrong."""
        request = f"r{len(self.requests)}"
        self.requests[request] = (prompt, count)
        tokens = prompt + reference(prompt, min(known, count - 1))
        greedy = SamplingParams(temperature=0)
        self.pick(to, "decode").handle(
            Decode(request, 1, ROOT, pack_tokens(tokens), len(prompt), count, greedy, (), fetch, awaited,
                   self.sources(chosen))
        )  # fmt: skip
        full = cacheable_pages(len(tokens), PAGE) * PAGE
        if prefill and full:
            part = tokens[:-1] if partial else tokens[:full]
            order = Prefill(request, 1, ROOT, pack_tokens(part), self.sources(cached))
            self.pick(prefill, "prefill").handle(order)

    @rule(prompt=PROMPTS, to=BIT, prefill=st.integers(0, 2), turns=st.integers(0, 30), damage=SELDOM, fails=SELDOM)
    def sensible_order(
        self, prompt: list[int], to: int, prefill: int, turns: int, damage: bool, fails: bool
    ) -> None:  # fmt: skip
        """As a router orders: prefill on some node, or (0) nowhere, and the others are asked for what is cached. Then
        all goes on for a while, perhaps over a bad wire or with a bad disk."""
        others = [(1 - to, 9)]
        self.order(prompt, 4, to, 9, prefill > 0, 0, prefill, others, [(1 - prefill % 2, 9)])
        for _ in range(turns):
            for worker in self.workers:
                worker.turn()
            for store in self.rig.stores.values():
                store.deliver(damage)
                store.work(ok=not fails)

    @rule(number=WHO)
    def hear(self, number: int) -> None:
        self.workers[number].hear()

    @rule(number=WHO)
    def hear_one(self, number: int) -> None:
        if self.workers[number].inbox:
            self.workers[number].handle(self.workers[number].inbox.popleft())

    @rule(number=WHO)
    def copy(self, number: int) -> None:
        self.workers[number].copy()

    @rule(number=WHO)
    def step(self, number: int) -> None:
        self.workers[number].step()

    @rule(number=WHO)
    def turn(self, number: int) -> None:
        self.workers[number].turn()

    @rule(which=st.integers(0, 30), number=WHO)
    def cancel(self, which: int, number: int) -> None:
        self.workers[number].handle(Cancel(f"r{which}", 1))

    @rule(which=st.integers(0, 30), position=st.integers(0, 30), to=st.integers(0, 1))
    def resend(self, which: int, position: int, to: int) -> None:
        self.pick(to, "decode").handle(Resend(f"r{which}", 1, position))

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.tick(seconds)
        for worker in self.workers:
            worker.handle(Tick())

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def somebody_stands_still(self, seconds: float) -> None:
        """Let time pass without any lease heartbeat."""
        self.rig.now += seconds
        if self.groups.count:  # every prompt has several writes, and the head of the line asks again before it is lost
            for worker in self.workers:
                worker.handle(Tick())

    @rule(number=BIT, damage=SELDOM, times=st.integers(1, 4))
    def wires(self, number: int, damage: bool, times: int) -> None:
        for _ in range(times):
            self.store(number).deliver(damage)

    @rule(number=BIT, ok=st.sampled_from([True, True, True, False]), times=st.integers(1, 4))
    def threads(self, number: int, ok: bool, times: int) -> None:
        for _ in range(times):
            self.store(number).work(ok)

    @rule(number=BIT)
    def cut(self, number: int) -> None:
        """A connection breaks, and what is on its way from that store is lost."""
        self.store(number).lose()

    @rule()
    def settle(self) -> None:
        self.rig.settle()

    @rule(number=WHO)
    def kill(self, number: int) -> None:
        worker = self.workers[number]
        self.rig.kill(worker)
        config = self.prefill_config if worker.peer.role == "prefill" else self.decode_config
        self.workers[number] = self.rig.worker(worker.peer.role, self.pages, config, worker.node.name)

    @precondition(lambda self: len(self.requests) > 2)
    @rule(number=BIT)
    def restart_store(self, number: int) -> None:
        self.rig.restart_store(NODES[number])
        for worker in self.workers:
            if worker.node is self.store(number):
                worker.attach()

    def go_to_the_end(self) -> None:
        """Every fetch ends by itself, and every prefill is done or gives up."""
        for _ in range(12):
            self.rig.settle()
            self.rig.tick(0.5)
            for worker in self.workers:
                worker.handle(Tick())
        self.rig.settle()
        for worker in self.workers:
            if isinstance(worker.state, PrefillScheduler):
                assert worker.state.stats().running == 0, "a prompt is neither done nor given up"
            else:
                # A sequence in KV_LOAD_INCOMPLETE keeps its device pages until the router decides; others may wait for
                # them.
                phases = {sequence.phase for sequence in worker.state._sequences.values()}
                assert phases <= {SequencePhase.ENDED, SequencePhase.KV_LOAD_INCOMPLETE} | (
                    {SequencePhase.PREEMPTED} if SequencePhase.KV_LOAD_INCOMPLETE in phases else set()
                )


class WindowsHandOff(HandOff):
    groups = WindowGroups(2, 7, PAGE)


TestHandOff = HandOff.TestCase
TestHandOff.settings = automaton(count=300, steps=60)
TestWindowsHandOff = WindowsHandOff.TestCase
TestWindowsHandOff.settings = automaton(count=150, steps=60)
