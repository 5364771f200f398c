"""Prompts that begin alike on one prefill worker, under any order of steps, copies, cancellations, failures, silences
and store restarts: with a real store state, and a device that notices a wrong page.

Whatever happens, a page is computed by one prompt at a time, a prompt waits only for one that goes on, the device pages
are shared and come back, and every prompt ends.
"""

from collections.abc import Callable, Collection, Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from baton.clock import Tick
from baton.config import PrefillConfig
from baton.messages import AttemptFailed, AttemptName, Cancel, Prefill, Prefilled, Refused, RouterHeartbeat
from engine.step.outcome import StepFailed
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.keys import pack_tokens, page_keys, split_keys
from prefill_worker import shared_prefix
from prefill_worker.prefill_request import PrefillPhase, PrefillRequest
from prefill_worker.scheduler import PrefillScheduler
from tests.support.thorough import automaton, run_machine
from tests.support.wait_graph import WaitCycle
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigMachine

SHARED = list(range(1, 41))
PROMPTS = st.builds(
    lambda shared, fork, own, rest: SHARED[: shared * PAGE] + [fork] * (own * PAGE + rest),
    st.integers(1, 10),
    st.integers(41, 42),
    st.integers(0, 4),
    st.integers(0, PAGE - 1),
)


class PrefillMachine(RigMachine):
    @initialize(
        slots=st.integers(16, 60), pages=st.integers(14, 40), chunk=st.integers(PAGE, 6 * PAGE),
        copies=st.integers(1, 8), attentive=st.booleans(), window=st.sampled_from([1_024, 4, 2]),
        again=st.sampled_from([0.0, 0.5]),
    )  # fmt: skip
    def start(
        self, slots: int, pages: int, chunk: int, copies: int, attentive: bool, window: int, again: float
    ) -> None:
        self.rig = Rig(slots, hold=5.0, admit_after=1, load_share=0.5)
        config = PrefillConfig(
            max_num_batched_tokens=chunk, copies_per_step=copies, max_num_seqs=6, store_timeout_ms=2_000
        )
        self.worker = self.rig.worker("prefill", pages, config, recompute_share=again)
        self.state = self.worker.state
        self.state._window = window
        self.quiet = attentive  # nothing but orders and turns: then no page is computed twice
        self.ordered: set[bytes] = set()  # prompts' full pages
        self.partial = 0  # tokens of partial pages, which no cache keeps

    @rule(prompt=PROMPTS, priority=st.integers(-2, 9))
    def order(self, prompt: list[int], priority: int) -> None:
        request = f"r{len(self.requests)}"
        self.requests[request] = prompt, 0
        self.worker.handle(Prefill(request, 1, ROOT, pack_tokens(prompt), priority=priority))
        if request in self.state._requests:
            self.ordered.update(split_keys(page_keys(ROOT, pack_tokens(prompt), PAGE)))
            self.partial += len(prompt) % PAGE

    @rule(prompt=PROMPTS, count=st.integers(2, 4), turns=st.integers(0, 4))
    def order_alike(self, prompt: list[int], count: int, turns: int) -> None:
        for _ in range(count):
            self.order(prompt, 0)
        for _ in range(turns):
            self.turn()

    @rule()
    def hear_one(self) -> None:
        if self.worker.inbox:
            self.worker.handle(self.worker.inbox.popleft())

    @rule()
    def copy(self) -> None:
        self.worker.copy()

    @rule()
    def turn(self) -> None:
        self.worker.turn()

    @rule(ok=st.sampled_from([True, True, False]), times=st.integers(1, 4))
    def disk(self, ok: bool, times: int) -> None:
        for _ in range(times):
            self.rig.stores["n0"].work(ok)

    @precondition(lambda self: not self.quiet)
    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        self.worker.handle(Cancel(f"r{which}", 1))

    @precondition(lambda self: not self.quiet)
    @rule(numbers=st.sets(st.integers(0, 20)))
    def the_router_lists(self, numbers: set[int]) -> None:
        self.worker.handle(RouterHeartbeat(attempts=tuple(AttemptName(f"r{number}", 1) for number in numbers)))

    @rule(pages=st.sampled_from([1, 2, 1_000]))
    def memory_is_short(self, pages: int) -> None:
        """Steps of more pages run out of it."""
        self.worker.most_tokens = pages * PAGE

    @precondition(lambda self: not self.quiet)
    @rule()
    def a_step_fails(self) -> None:
        if plan := self.state.schedule(self.rig.now):
            self.worker.handle(StepFailed(plan, "boom"))

    @precondition(lambda self: not self.quiet)
    @rule(seconds=st.sampled_from([0.02, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.tick(seconds)
        self.worker.handle(Tick())

    @precondition(lambda self: not self.quiet)
    @rule()
    def restart_store(self) -> None:
        self.rig.restart_store()
        self.worker.attach()

    @precondition(lambda self: not self.quiet)
    @rule(prompt=PROMPTS, count=st.integers(1, 3), restart=st.booleans(), hear=st.integers(0, 6))
    def the_device_is_empty(self, prompt: list[int], count: int, restart: bool, hear: int) -> None:
        """What is asked for then is at most in the arena, or (after a restart) on the disk."""
        self.order(prompt, 0)
        self.rig.settle()
        if restart:
            self.restart_store()
        self.state.blocks.clear()
        self.order_alike(prompt + [43] * PAGE, count, 0)
        for _ in range(hear):
            self.hear_one()

    def go_to_the_end(self) -> None:
        for _ in range(12):
            self.rig.settle()
            self.rig.tick(0.5)
            self.worker.handle(Tick())
        self.rig.settle()
        assert all(job.phase is PrefillPhase.DONE for job in self.state._requests.values())
        done = [message.request for message in self.worker.messages if isinstance(message, Prefilled)]
        assert len(done) == len(set(done))
        ended = [m.request for m in self.worker.messages if isinstance(m, Prefilled | AttemptFailed | Refused)]
        if self.quiet:
            assert len(ended) == len(self.requests)
            if self.state.blocks.stats().evictions == 0 and self.rig.store.stats(0.0).evictions == 0:
                assert self.state.stats().tokens_computed <= len(self.ordered) * PAGE + self.partial, "computed twice"


TestPrefill = PrefillMachine.TestCase
TestPrefill.settings = automaton(count=200, steps=50)


def _nobody_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_prefix, "computing_request", lambda job, at_hand: None)


def _who_waits_is_never_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillScheduler, "_wake", lambda self, now: [])


def _others_are_not_told_of_complete_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_prefix, "mark_complete", lambda job, at_hand: None)


def _each_takes_pages_of_its_own(patch: pytest.MonkeyPatch) -> None:
    take = shared_prefix.allocate_shared
    patch.setattr(shared_prefix, "allocate_shared", lambda cache, keys, at_hand: take(cache, keys, ()))


def _a_shared_page_counts_as_complete(patch: pytest.MonkeyPatch) -> None:
    take = shared_prefix.allocate_shared

    def hasty(
        cache: DeviceBlockManager, keys: Sequence[bytes], at_hand: Collection[PrefillRequest]
    ) -> tuple[list[int], int] | None:
        allocation = take(cache, keys, at_hand)
        common = max((job.in_common(keys) for job in at_hand), default=0)
        return allocation and (allocation[0], max(allocation[1], common))

    patch.setattr(shared_prefix, "allocate_shared", hasty)


def _who_is_behind_keeps_its_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillScheduler, "_give_back", lambda self, job: [])


def test_it_notices_a_circle_of_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    _who_is_behind_keeps_its_leases(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        run_machine(PrefillMachine, 400, 50)
    error: BaseException | None = caught.value  # the end of the test may find prompts that are not done, too
    while error is not None and not isinstance(error, WaitCycle):
        error = error.__context__
    assert error is not None, "no circle was noticed"


@pytest.mark.parametrize(
    "mutation",
    [
        _nobody_waits,
        _who_waits_is_never_woken,
        _others_are_not_told_of_complete_pages,
        _each_takes_pages_of_its_own,
        _a_shared_page_counts_as_complete,
    ],
)
def test_it_notices(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        run_machine(PrefillMachine, 200, 50)
