"""A decode worker under any order of requests of any priority, cancellations, preemptions and pages that come or don't.

Its pool is too small for its requests. `tests/simulator/test_hand_off.py` checks whole clusters. These tests add the
order in which sequences are preempted, resumed and admitted. No sequence is resumed only to be preempted at once, and
every sequence ends.
"""

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from baton.clock import Tick
from baton.config import DecodeConfig, PrefillConfig
from baton.messages import Cancel, Decode, FetchIncomplete, Prefill, SamplingParams, Tokens
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence as DecodeSequence
from decode_worker.sequence import SequencePhase
from kvstore.client.transfer import StoreUp
from kvstore.keys import cacheable_pages, pack_tokens
from tests.decode_worker.load import OnePageEach
from tests.decode_worker.test_speculation import FREE_ROWS, Guesses
from tests.support.thorough import automaton
from tests.support.workers_and_stores import PAGE, PAGE_BYTES, ROOT, Rig, RigMachine, RigWorker, reference

AGEING = 1.0  # seconds
SHARED = list(range(1, 25))
PROMPTS = st.builds(
    lambda shared, own: SHARED[:shared] + own,
    st.sampled_from([0, 8, 16, 24]),
    st.lists(st.integers(0, 3), min_size=1, max_size=10),
)


class DecodeMachine(RigMachine):
    windows: Sequence[int | None] = [None]  # of the model; tokens
    longer = 1  # times as long are outputs
    speculates = False

    @initialize(
        pages=st.integers(12, 24), tokens=st.integers(1, 24), copies=st.integers(1, 8), slots=st.integers(4, 24),
        share=st.sampled_from([0.01, 1.0]), greedy=st.booleans(), grain=st.sampled_from([PAGE, PAGE - 1]),
        again=st.sampled_from([0.0, 0.5]), data=st.data(),
    )  # fmt: skip
    def start(
        self, pages: int, tokens: int, copies: int, slots: int, share: float, greedy: bool, grain: int,
        again: float, data: st.DataObject,
    ) -> None:  # fmt: skip
        self.rig = Rig(slots, hold=5.0)
        config = DecodeConfig(
            max_num_batched_tokens=tokens, copies_per_step=copies, copy_share=share, fetch_timeout_ms=2_000,
            first_step_ms=50, ageing_ms=int(AGEING * 1_000),
        )  # fmt: skip
        window = data.draw(st.sampled_from(self.windows), "window")
        self.worker: RigWorker = self.rig.worker("decode", pages, config, window=window, recompute_share=again)
        if greedy:
            self.worker.state = DecodeScheduler(config, PAGE, pages, growth_reserve=OnePageEach(), window=window)
            self.worker.handle(StoreUp(slots, PAGE_BYTES))
        if self.speculates:
            share, rng = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]), "share"), data.draw(st.randoms(), "guesses")
            self.worker.state = DecodeScheduler(
                config, PAGE, pages, window=window, recompute_share=again, calibration=FREE_ROWS,
                proposer=lambda: Guesses(rng, share),
            )  # fmt: skip
            self.worker.handle(StoreUp(slots, PAGE_BYTES))
        self.worker.state._planner._alignment = grain  # less than a page, as where pages are large
        self.prefill = self.rig.worker(
            "prefill", 24, PrefillConfig(max_num_batched_tokens=8, max_num_seqs=8, store_timeout_ms=2_000)
        )
        self.got: dict[str, list[int]] = {}
        self.resumed: set[str] = set()  # by the last prepare, with no admission since
        self.steps = 0

    @property
    def sequences(self) -> dict[str, DecodeSequence]:
        return self.worker.state._sequences

    def phases(self) -> dict[str, SequencePhase]:
        return {request: sequence.phase for request, sequence in self.sequences.items()}

    @rule(
        prompt=PROMPTS, count=st.integers(1, 20), priority=st.sampled_from([0, 0, 0, -1, 1, 3]),
        split=st.booleans(), awaited=st.booleans(), part=st.sampled_from(["nothing", "full pages", "all"]),
        times=st.integers(1, 3),
    )  # fmt: skip
    def order(
        self, prompt: list[int], count: int, priority: int, split: bool, awaited: bool, part: str, times: int
    ) -> None:
        """With `split` pages are to be fetched; some of them may never be made."""
        request = f"r{len(self.requests)}"
        if self.longer > 1:
            prompt, count = prompt * times, count * self.longer
        self.requests[request] = (prompt, count)
        full = cacheable_pages(len(prompt), PAGE) * PAGE
        before, known = self.phases(), {r: (s.rank, s.priority) for r, s in self.sequences.items()}
        self.worker.handle(
            Decode(
                request, 1, ROOT, pack_tokens(prompt), len(prompt), count, SamplingParams(temperature=0), (),
                -(-(len(prompt) - 1) // PAGE) if split else 0, awaited and split, (), priority,
            )
        )  # fmt: skip
        if split and part != "nothing" and full:
            tokens = prompt[:-1] if part == "all" else prompt[:full]
            self.prefill.handle(Prefill(request, 1, ROOT, pack_tokens(tokens)))
        if request not in self.sequences:
            assert self.phases() == before, "somebody was preempted for one that was refused"
            return
        rank = self.sequences[request].rank
        self.resumed.clear()
        for name, phase in before.items():
            if phase is SequencePhase.PREEMPTED:
                assert rank < known[name][0], "a newcomer went before one that waits to be resumed"
            elif self.sequences[name].phase is SequencePhase.PREEMPTED:
                assert rank < known[name][0]
                assert priority < known[name][1], "somebody as urgent was displaced"

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.02]))
    def step(self, seconds: float) -> None:
        before = self.phases()
        first = min((s for s in self.sequences.values() if s.pages), key=lambda s: s.rank, default=None)
        name = first.name.request if first else ""
        preempted = self.worker.state.stats().preemptions
        resumed, self.resumed = self.resumed, set()
        ran = self.worker.step()
        self.steps += ran
        now = self.phases()
        if first and before[name] in (SequencePhase.RUNNING, SequencePhase.WAITING_FOR_REMOTE_KVS):
            assert now[name] is not SequencePhase.PREEMPTED, "the first in rank was preempted"
        for each in resumed & set(now):
            assert now[each] is not SequencePhase.PREEMPTED, "resumed only to be preempted at once"
        back = {
            r
            for r, phase in before.items()
            if phase is SequencePhase.PREEMPTED and now[r] is not SequencePhase.PREEMPTED
        }
        waiting = [s.rank for s in self.sequences.values() if s.phase is SequencePhase.PREEMPTED]
        if back and self.worker.state.stats().preemptions == preempted:
            assert all(self.sequences[each].rank < rank for each in back for rank in waiting), "resumed out of turn"
            self.resumed = back
        self.rig.now += seconds

    @rule(tokens=st.sampled_from([4 * PAGE, 20, 1_000]))
    def memory_is_short(self, tokens: int) -> None:
        """Steps of more tokens run out of it. The smallest one has two pages of prompts and as many rows."""
        self.worker.most_tokens = tokens

    @rule()
    def hear(self) -> None:
        self.worker.hear()

    @rule(seconds=st.sampled_from([0.0, 0.0001, 0.01]))
    def copy(self, seconds: float) -> None:
        self.worker.handle(Tick())
        self.rig.now += seconds
        self.worker.copy()

    @rule(turns=st.integers(1, 5))
    def prefills_go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.prefill.turn()

    @rule(which=st.integers(0, 40))
    def cancel(self, which: int) -> None:
        self.worker.handle(Cancel(f"r{which}", 1))
        self.prefill.handle(Cancel(f"r{which}", 1))

    @rule(seconds=st.sampled_from([0.01, 0.6, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.tick(seconds)
        self.worker.handle(Tick())
        self.prefill.handle(Tick())

    @rule()
    def the_store_restarts(self) -> None:
        self.rig.restart_store()
        self.worker.attach()
        self.prefill.attach()

    @rule(turns=st.integers(5, 40))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.worker.hear()
            self.copy(0.0)
            self.worker.hear()
            self.step(0.01)

    @invariant()
    def every_token_is_the_reference(self) -> None:
        for message in self.worker.messages:
            match message:
                case Tokens(deltas=deltas):
                    for delta in deltas:
                        prompt, count = self.requests[delta.request]
                        got = self.got.setdefault(delta.request, [])
                        assert delta.position == len(prompt) + len(got)
                        got += delta.tokens
                        assert got == reference(prompt, count)[: len(got)]
                        assert (delta.finish is not None) == (len(got) == count)
                case FetchIncomplete(request=request) if request in self.sequences:
                    # As the router does: a new attempt that needs no prefill worker, or none.
                    self.worker.state.handle(Cancel(request, 1), self.rig.now)
                case _:
                    pass
        self.worker.messages.clear()

    def go_to_the_end(self) -> None:
        """All that was admitted ends, in a number of steps that what is left to compute bounds."""
        for _ in range(2_000):
            self.go_on(1)
            self.prefill.turn()
            self.every_token_is_the_reference()
            if all(s.phase is SequencePhase.ENDED for s in self.sequences.values()) and not self.worker.state.busy:
                break
            self.rig.tick(0.05)
            self.worker.handle(Tick())
        else:
            raise AssertionError(f"somebody waits for ever: {self.phases()}")


TestDecodeMachine = DecodeMachine.TestCase
TestDecodeMachine.settings = automaton(count=150, steps=50)


class WindowMachine(DecodeMachine):
    """A model whose layers all have a window. Most contexts are larger than the pool. The device notices a page that
    was given back too early."""

    windows: Sequence[int | None] = [2, 9, 17, 30]
    longer = 6


class SpeculationMachine(DecodeMachine):
    """Every step verifies guesses, of which some are right. The tokens are those without."""

    speculates = True
    windows: Sequence[int | None] = [None, None, 9, 30]
    longer = 2


TestSpeculationMachine = SpeculationMachine.TestCase
TestSpeculationMachine.settings = automaton(count=150, steps=50)
TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = automaton(count=150, steps=50)
