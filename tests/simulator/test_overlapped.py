"""The hand-off machine with workers whose steps and copies run on while they hear, decide and copy.

No page and no slot is given new contents while a launched step or copy may touch it, in any order of operations. Nor
does a step that is launched ahead. A mistake planted in the epochs, in what waits for the end of a copy, or
in what a step ahead counts for, is noticed.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from baton.clock import Tick
from baton.config import DecodeConfig, PrefillConfig
from baton.messages import AttemptFailed, Cancel, Decode, Grammar, LogitsRules, Prefill, SamplingParams, Tokens
from baton.store_protocol import EndLease
from decode_worker import scheduler
from decode_worker.sequence import Sequence as DecodeSequence
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.client.transfer import CallStore, CopyQueue
from kvstore.keys import pack_tokens
from kvstore.window_groups import NO_GROUPS, WindowGroups
from tests.simulator.test_hand_off import SHARED, HandOff
from tests.support.overlapped_workers import (
    EVEN,
    FAILS,
    FORCED,
    MISLEADS,
    ODD_ENDS,
    OverlappedRig,
    OverlappedWorker,
    forced,
)
from tests.support.thorough import automaton, run_machine
from tests.support.workers_and_stores import PAGE, ROOT, VOCAB, RigMachine, RigWorker, next_token
from worker import turn

pytestmark = pytest.mark.slow

DELAYS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, MISLEADS]), min_size=1, max_size=6)
STOPS = tuple(range(0, VOCAB, 6))


class Overlapped(HandOff):
    @initialize(
        slots=st.integers(4, 24), pages=st.integers(10, 20), chunk=st.integers(PAGE, 12), copies=st.integers(1, 8),
        admit_after=st.integers(1, 2), share=st.sampled_from([0.25, 1.0]), delays=DELAYS, fails=st.integers(0, 30),
    )  # fmt: skip
    def start(
        self, slots: int, pages: int, chunk: int, copies: int, admit_after: int, share: float,
        delays: Sequence[int] = (1,), fails: int = 0,
    ) -> None:  # fmt: skip
        """`fails`: the operation of each worker that raises, if it is a step; 0 for none."""
        self.make_rig = partial(OverlappedRig, [*delays * (1 + fails // len(delays)), *[FAILS] * bool(fails)])
        HandOff.start(self, slots, pages, chunk, copies, admit_after, share)


TestOverlapped = Overlapped.TestCase
TestOverlapped.settings = automaton(count=100, steps=60)


def outputs(prompt: Sequence[int], count: int, grammar: Grammar | None = None) -> list[int]:
    """The tokens that a request must get, unless its grammar fails."""
    if grammar is not None:
        return [*forced(prompt, count)]
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Crowded(RigMachine):
    """One node, and pools and an arena that a few requests fill: what is given back is taken again at once."""

    window: int | None = None  # of the model; tokens
    groups = NO_GROUPS  # of its layers
    longer = 1  # times as long are outputs

    @initialize(
        slots=st.integers(6, 16), pages=st.integers(6, 10), chunk=st.integers(PAGE, 12), copies=st.integers(1, 8),
        delays=DELAYS, slow_copies=st.sampled_from([1, 6]), again=st.sampled_from([0.0, 0.5]),
    )  # fmt: skip
    def start(
        self,
        slots: int,
        pages: int,
        chunk: int,
        copies: int,
        delays: Sequence[int],
        slow_copies: int,
        again: float = 0.0,
    ) -> None:
        self.rig = OverlappedRig(delays, slots, slow_copies=slow_copies, hold=5.0)
        self.rig.groups = self.groups
        pages *= 1 + self.groups.count
        again *= not self.groups.count  # with groups there is only vLLM's runner, which computes nothing again
        prefill = PrefillConfig(
            max_num_batched_tokens=chunk, copies_per_step=copies, max_num_seqs=3, store_timeout_ms=2_000
        )
        decode = DecodeConfig(max_num_batched_tokens=chunk, copies_per_step=copies, fetch_timeout_ms=2_000)
        self.prefill = self.rig.worker("prefill", pages, prefill, recompute_share=again)
        self.decode = self.rig.worker("decode", pages, decode, window=self.window, recompute_share=again)
        self.stops: dict[str, tuple[int, ...]] = {}
        self.grammars: dict[str, Grammar | None] = {}

    @rule(shared=st.sampled_from([0, 4, 8, 12]), own=st.lists(st.integers(30, 33), min_size=1, max_size=9),
          count=st.integers(1, 9), priority=st.sampled_from([0, 0, 3]), remote=st.booleans(),
          stops=st.sampled_from([(), STOPS]), ruled=st.sampled_from([False, False, False, True]))  # fmt: skip
    def order(
        self, shared: int, own: list[int], count: int, priority: int, remote: bool, stops: tuple[int, ...] = (),
        ruled: bool = False, grammar: Grammar | None = None,
    ) -> None:  # fmt: skip
        """`ruled`: with rules that need every token before the next is drawn."""
        prompt = SHARED[:shared] + own
        request = f"r{len(self.requests)}"
        count *= self.longer
        self.requests[request], self.stops[request], self.grammars[request] = (prompt, count), stops, grammar
        remote = remote and len(prompt) > PAGE
        fetch = -(-(len(prompt) - 1) // PAGE) if remote else 0
        rules = LogitsRules(presence_penalty=1.0) if ruled else None
        greedy = SamplingParams(temperature=0, rules=rules, grammar=grammar)
        tokens = pack_tokens(prompt)
        self.decode.handle(
            Decode(request, 1, ROOT, tokens, len(prompt), count, greedy, stops, fetch, remote, (), priority)
        )
        if remote:
            self.prefill.handle(Prefill(request, 1, ROOT, pack_tokens(prompt[:-1]), priority=-priority))

    @rule(age=st.integers(1, 3), again=st.integers(1, 6), turns=st.integers(0, 2), remote=st.booleans())
    def replace(self, age: int, again: int, turns: int, remote: bool) -> None:
        """A request goes and a prompt of before comes again, which the store may have."""
        self.cancel(age, True, remote)
        if (prompt := self.requests.get(f"r{len(self.requests) - again}")) is not None:
            self.order(0, prompt[0], 4, 0, remote)
        self.one_decodes(turns)

    @rule(turns=st.integers(1, 6))
    def both(self, turns: int) -> None:
        for _ in range(turns):
            self.prefill.turn()
            self.decode.turn()

    @rule(turns=st.integers(1, 3))
    def one_decodes(self, turns: int) -> None:
        for _ in range(turns):
            self.decode.turn()

    @rule(turns=st.integers(1, 3))
    def one_prefills(self, turns: int) -> None:
        for _ in range(turns):
            self.prefill.turn()

    @rule(age=st.integers(1, 4), decode=st.booleans(), prefill=st.booleans())
    def cancel(self, age: int, decode: bool, prefill: bool) -> None:
        request = f"r{len(self.requests) - age}"
        for worker, does in ((self.decode, decode), (self.prefill, prefill)):
            if does:
                worker.handle(Cancel(request, 1))

    @rule(seconds=st.sampled_from([0.1, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.tick(seconds)
        for worker in (self.prefill, self.decode):
            worker.handle(Tick())

    @rule(tokens=st.sampled_from([4 * PAGE, 1_000]))
    def memory_is_short(self, tokens: int) -> None:
        """Decode steps of more tokens can't be launched."""
        self.decode.most_tokens = tokens

    @precondition(lambda self: len(self.requests) > 2)
    @rule()
    def restart_store(self) -> None:
        self.rig.restart_store()
        for worker in (self.prefill, self.decode):
            worker.attach()

    def output(self, request: str) -> list[int]:
        output, stops = outputs(*self.requests[request], self.grammars[request]), self.stops[request]
        return output[: next((at for at, token in enumerate(output, 1) if token in stops), len(output))]

    def go_to_the_end(self) -> None:
        for _ in range(6):
            self.rig.settle()
            self.rig.tick(0.5)


TestCrowded = Crowded.TestCase
TestCrowded.settings = automaton(count=300, steps=50)


def test_a_fetch_that_ends_while_its_copies_are_under_way():
    """The store is silent for too long, and the prompt is computed: not before the pages are written no more."""
    machine = Crowded()
    machine.start(slots=6, pages=6, chunk=4, copies=1, delays=[1], slow_copies=1)
    machine.both(1)
    machine.order(count=1, own=[30] * 6, priority=0, remote=True, shared=4)
    for turns in (1, 5, 6):
        machine.both(turns)
    machine.time_passes(3.0)
    machine.both(1)
    machine.every_token_is_the_reference()
    machine.teardown()


class WindowedCrowd(Crowded):
    """The same of a model whose layers all have a window: pages are given back in the middle of outputs, too."""

    window = 9
    longer = 4


TestWindowedCrowd = WindowedCrowd.TestCase
TestWindowedCrowd.settings = automaton(count=150, steps=50)


class GroupsCrowd(Crowded):
    groups = WindowGroups(2, 7, PAGE)


TestGroupsCrowd = GroupsCrowd.TestCase
TestGroupsCrowd.settings = automaton(count=100, steps=50)


class GroupsOverlapped(Overlapped):
    groups = WindowGroups(1, 5, PAGE)


TestGroupsOverlapped = GroupsOverlapped.TestCase
TestGroupsOverlapped.settings = automaton(count=60, steps=60)


class MaskedCrowd(Crowded):
    """The same with grammars, whose masks come early or late."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        others=st.sampled_from([0, 1, 8]), masks=st.lists(st.sampled_from([0, 0, 1, 3, 9]), min_size=1, max_size=5)
    )
    def hold_masks(self, others: int, masks: Sequence[int]) -> None:
        """`others`: so many times as many others go ahead of those that wait for their tokens."""
        self.patch.setattr(scheduler, "OTHERS_AHEAD", others)
        self.masks = masks

    @rule(own=st.lists(st.integers(30, 33), min_size=1, max_size=9), count=st.integers(1, 9),
          stops=st.sampled_from([(), STOPS]), grammar=st.sampled_from([EVEN, FORCED, ODD_ENDS]))  # fmt: skip
    def order_with_grammar(self, own: list[int], count: int, stops: tuple[int, ...], grammar: Grammar) -> None:
        self.rig.mask_delays = itertools.cycle(self.masks)
        self.order(0, own, count, 0, remote=False, stops=stops, grammar=grammar)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.undo()


TestMaskedCrowd = MaskedCrowd.TestCase
TestMaskedCrowd.settings = automaton(count=200, steps=50)


class MaskedStates(MaskedCrowd):
    """A late mask leaves a recurrent state as it was before the token that comes again."""

    groups = WindowGroups(2, 2, PAGE, states=True)


TestMaskedStates = MaskedStates.TestCase
TestMaskedStates.settings = automaton(count=60, steps=50)


def cancelled_with_a_step_ahead() -> None:
    """A sequence goes while two steps run. Pages that the store has ready are fetched into all of its pages."""
    machine = Crowded()
    machine.start(slots=16, pages=6, chunk=12, copies=8, delays=[4], slow_copies=1)
    prompt = [30] * 18
    machine.prefill.handle(Prefill("r1", 1, ROOT, pack_tokens(prompt[:-1])))
    machine.one_prefills(80)
    machine.order(shared=0, own=[31] * 9, count=12, priority=0, remote=False)
    while machine.decode.ahead < 2 or len(machine.decode.under_way) < 2:
        machine.one_decodes(1)
    machine.cancel(1, decode=True, prefill=False)
    machine.order(shared=0, own=prompt, count=3, priority=0, remote=True)
    assert machine.decode.under_way
    machine.both(40)
    machine.every_token_is_the_reference()
    machine.teardown()


def test_a_page_is_not_fetched_into_while_a_step_ahead_may_write_to_it(monkeypatch: pytest.MonkeyPatch):
    cancelled_with_a_step_ahead()
    a_page_is_lent_while_the_step_ahead_may_write_to_it(monkeypatch)
    with pytest.raises(AssertionError, match="touched by two"):
        cancelled_with_a_step_ahead()


def test_a_step_is_launched_ahead_and_one_that_needs_tokens_first_keeps_it_from_that():
    counts: dict[bool, int] = {}
    for ruled in (False, True):
        rig = OverlappedRig([3], 8)
        worker = rig.worker("decode", 32, DecodeConfig())
        assert isinstance(worker, OverlappedWorker)
        for number in range(3):
            rules = LogitsRules(presence_penalty=1.0) if ruled and number == 1 else None
            sampling = SamplingParams(temperature=0, rules=rules)
            prompt = [30 + number]
            worker.handle(Decode(f"r{number}", 1, ROOT, pack_tokens(prompt), 1, 9 + number, sampling))
        rig.settle()
        for number in range(3):
            assert tokens_of(worker, f"r{number}") == outputs([30 + number], 9 + number)
        counts[ruled] = worker.ahead
    # Without rules, all but the first token of each output are drawn from one that was not known yet.
    assert counts == {False: 8 + 9 + 10, True: 1}


def tokens_of(worker: RigWorker, request: str) -> list[int]:
    return [
        token for message in worker.messages if isinstance(message, Tokens)
        for delta in message.deltas if delta.request == request for token in delta.tokens
    ]  # fmt: skip


def served(
    others: int, masks: Sequence[int], grammar: Grammar = EVEN, groups: WindowGroups = NO_GROUPS
) -> OverlappedWorker:
    """One request with a grammar and so many without."""
    rig = OverlappedRig([3], 8, mask_delays=masks)
    rig.groups = groups
    worker = rig.worker("decode", 64, DecodeConfig())
    assert isinstance(worker, OverlappedWorker)
    for number in range(others + 1):
        sampling = SamplingParams(temperature=0, grammar=None if number else grammar)
        worker.handle(Decode(f"r{number}", 1, ROOT, pack_tokens([30 + number]), 1, 12, sampling))
    rig.settle()
    for number in range(1, others + 1):
        assert tokens_of(worker, f"r{number}") == outputs([30 + number], 12)
    return worker


def test_many_go_ahead_of_one_that_follows_a_grammar_and_few_wait_for_it():
    few, many = served(7, [0]), served(8, [0])
    for worker in (few, many):
        assert tokens_of(worker, "r0") == outputs([30], 12, EVEN)
        assert worker.late == 0
    assert few.ahead == 0
    # Every other step of the eight is ahead, and all of them once the one has ended... or they have.
    assert many.ahead >= 8 * 5


def test_tokens_without_a_choice_take_no_step():
    steps: list[int] = []
    for grammar in (EVEN, FORCED):
        worker = served(0, [0], grammar)
        assert tokens_of(worker, "r0") == outputs([30], 12, EVEN)
        steps.append(sum(isinstance(message, Tokens) for message in worker.messages))
    assert steps == [12, 9]


@pytest.mark.parametrize("groups", [NO_GROUPS, WindowGroups(2, 2, PAGE, states=True)])
def test_a_late_mask_costs_its_sequence_steps_and_others_nothing(groups: WindowGroups):
    """The first mask takes long. So the next one is waited for by none: even two others go ahead."""
    worker = served(2, [9], groups=groups)
    assert tokens_of(worker, "r0") == outputs([30], 12, EVEN)
    assert worker.late >= 12
    assert worker.ahead >= 10


def test_a_grammar_that_fails_ends_its_own_request():
    worker = served(9, [1], ODD_ENDS)
    output = outputs([30], 12, EVEN)
    tokens = tokens_of(worker, "r0")
    assert tokens == output[: len(tokens)]
    assert len(tokens) < 12
    (failed,) = [message for message in worker.messages if isinstance(message, AttemptFailed)]
    assert (failed.request, failed.reason) == ("r0", "invalid_grammar")


# --- mistakes, planted ------------------------------------------------------------------------------------------------


def what_is_freed_is_not_in_limbo(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceBlockManager, "in_limbo", lambda self, pages: [])


def only_the_newest_operation_counts(patch: pytest.MonkeyPatch) -> None:
    begin, end = DeviceBlockManager.begin, DeviceBlockManager.end

    def one(self: DeviceBlockManager) -> int:
        for epoch in list(self._under_way):
            end(self, epoch)
        return begin(self)

    patch.setattr(DeviceBlockManager, "begin", one)
    patch.setattr(DeviceBlockManager, "end", lambda self, epoch: end(self, epoch) if epoch in self._under_way else None)


def a_lease_ends_while_a_copy_is_under_way(patch: pytest.MonkeyPatch) -> None:
    end = CopyQueue.end_lease

    def hasty(self: CopyQueue, lease: int) -> list[CallStore]:
        return end(self, lease) or [CallStore(EndLease(lease))]

    patch.setattr(CopyQueue, "end_lease", hasty)


def a_lease_that_is_to_end_is_not_listed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CopyQueue, "ending", ())


def a_step_counts_for_a_sequence_that_lost_its_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeSequence, "counts", lambda self, chunk: chunk.start == self.computed)


def a_step_ahead_counts_whatever_became_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeSequence, "counts", lambda self, chunk: chunk.pages is self.pages)


def a_page_is_lent_while_the_step_ahead_may_write_to_it(patch: pytest.MonkeyPatch) -> None:
    collect = turn._collect

    def hasty(driver: turn.TurnDriver) -> Generator[turn.Effect, Any, None]:
        for ahead in list(driver.under_way)[1:]:
            driver.blocks.end(ahead.epoch)
        yield from collect(driver)
        for ahead in driver.under_way:
            ahead.epoch = driver.blocks.begin()

    patch.setattr(turn, "_collect", hasty)


def what_needs_its_token_goes_ahead_without_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeSequence, "needs_its_token", False)


@pytest.mark.parametrize(
    ("mutation", "machine"),
    [
        (what_is_freed_is_not_in_limbo, Crowded),
        (only_the_newest_operation_counts, Crowded),
        (a_lease_ends_while_a_copy_is_under_way, Crowded),
        (a_lease_that_is_to_end_is_not_listed, Crowded),
        (a_step_counts_for_a_sequence_that_lost_its_pages, Crowded),
        (a_step_ahead_counts_whatever_became_of_the_one_before, Crowded),
        (what_needs_its_token_goes_ahead_without_it, Crowded),
        (what_needs_its_token_goes_ahead_without_it, MaskedCrowd),
    ],
)
def test_it_notices(
    mutation: Callable[[pytest.MonkeyPatch], None], machine: type[Crowded], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        run_machine(machine, 1_000, 50)
