"""Prefill and decode workers and their store under any order of steps, deaths, cancellations and restarts.

No router here: requests are ordered at random, with hints that may be wrong. Whatever happens, a device never reads a
wrong page, no token differs from the reference, and when everything is cancelled nothing is left held or reserved."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.clock import Tick
from baton.config import DecodeConfig, PrefillConfig
from baton.messages import Cancel, Decode, Prefill, Refused, Resend, Sampling, Tokens
from kvstore.keys import pack_tokens, shippable_pages
from tests.rig import PAGE, ROOT, Rig, RigWorker, reference

BIT = st.integers(0, 1)
PROMPTS = st.builds(
    lambda shared, own: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12][:shared] + own,
    st.integers(0, 12),
    st.lists(st.integers(0, 3), min_size=1, max_size=10),
)


class HandOff(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(4, 24), pages=st.integers(10, 20), chunk=st.integers(PAGE, 12), copies=st.integers(1, 8)
    )
    def start(self, slots: int, pages: int, chunk: int, copies: int) -> None:
        self.rig = Rig(slots, hold=5.0)
        self.pages = pages
        self.prefill_config = PrefillConfig(chunk_tokens=chunk, max_prompts=3, store_ms=2_000)
        self.decode_config = DecodeConfig(step_tokens=chunk, copies_per_step=copies, fetch_ms=2_000)
        self.workers: list[RigWorker] = []
        for _ in range(2):
            self.workers.append(self.rig.worker("prefill", pages, self.prefill_config))
            self.workers.append(self.rig.worker("decode", pages, self.decode_config))
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.orders: list[tuple[str, int]] = []  # (request, worker)

    def pick(self, number: int, kind: str) -> RigWorker:
        of_kind = [w for w in self.workers if w.peer.role == kind]
        return of_kind[number % len(of_kind)]

    @rule(prompt=PROMPTS, count=st.integers(1, 12), to=BIT, fetch=st.integers(0, 6), awaited=st.booleans(),
          known=st.integers(0, 5), prefill=st.integers(0, 2))  # fmt: skip
    def order(
        self, prompt: list[int], count: int, to: int, fetch: int, awaited: bool, known: int, prefill: int
    ) -> None:
        request = f"r{len(self.requests)}"
        self.requests[request] = (prompt, count)
        tokens = prompt + reference(prompt, min(known, count - 1))
        decode = self.pick(to, "decode")
        decode.handle(
            Decode(
                request, 1, ROOT, pack_tokens(tokens), len(prompt), count, Sampling(temperature=0), (), fetch, awaited
            )
        )
        full = shippable_pages(len(tokens), PAGE) * PAGE
        if prefill and full:
            self.pick(prefill, "prefill").handle(Prefill(request, 1, ROOT, pack_tokens(tokens[:full])))

    @rule(number=st.integers(0, 3))
    def hear(self, number: int) -> None:
        self.workers[number].hear()

    @rule(number=st.integers(0, 3))
    def hear_one(self, number: int) -> None:
        if self.workers[number].inbox:
            self.workers[number].handle(self.workers[number].inbox.popleft())

    @rule(number=st.integers(0, 3))
    def copy(self, number: int) -> None:
        self.workers[number].copy()

    @rule(number=st.integers(0, 3))
    def step(self, number: int) -> None:
        self.workers[number].step()

    @rule(number=st.integers(0, 3))
    def turn(self, number: int) -> None:
        self.workers[number].turn()

    @rule(which=st.integers(0, 30), number=st.integers(0, 3))
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
        """Nobody renews a hold meanwhile."""
        self.rig.now += seconds

    @rule(number=st.integers(0, 3))
    def kill(self, number: int) -> None:
        worker = self.workers[number]
        self.rig.kill(worker)
        config = self.prefill_config if worker.peer.role == "prefill" else self.decode_config
        self.workers[number] = self.rig.worker(worker.peer.role, self.pages, config)

    @precondition(lambda self: len(self.requests) > 2)
    @rule()
    def restart_store(self) -> None:
        self.rig.restart_store()
        for worker in self.workers:
            worker.attach()

    @invariant()
    def every_token_is_the_reference(self) -> None:
        for worker in getattr(self, "workers", ()):
            for message in worker.said:
                for delta in message.deltas if isinstance(message, Tokens) else ():
                    prompt, count = self.requests[delta.request]
                    first = delta.position - len(prompt)
                    expected = reference(prompt, count)
                    assert list(delta.tokens) == expected[first : first + len(delta.tokens)]
                    assert (delta.finish is not None) == (first + len(delta.tokens) == count)
            worker.said = [m for m in worker.said if isinstance(m, Refused)]

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
        for worker in self.workers:
            for request in self.requests:
                worker.handle(Cancel(request, 1))
        for _ in range(3):
            self.rig.settle()
            self.rig.tick(10.0)
        for worker in self.workers:
            assert worker.state.cache.available == worker.num_pages
            assert worker.state.tickets == ()
        stats = self.rig.store.stats(0.0)
        assert (stats.reserved, stats.held, stats.waits) == (0, 0, 0)


TestHandOff = HandOff.TestCase
TestHandOff.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
