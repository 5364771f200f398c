"""Steps with draws that wait for a grammar's mask, as they lie in a GPU's streams, run on a CPU. Tests hold masks."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.trace import Tracer
from engine.cuda.draws import _MaskedDraws
from engine.cuda.launcher import StepLauncher
from engine.cuda.steps import LaunchedStep
from engine.cuda.streams import Event
from engine.engine import Engine
from engine.sampling.device_sampler import DeviceSampler, LaunchedDraws
from engine.sampling.mask_threads import MasksUnderWay, MaskThreads
from engine.step.batch import Batch, Bits, Chunk, ComputedMask, Sampled, TokenDraw
from engine.step.block_table import BlockTable
from tests.support import checkpoints
from tests.support.thorough import examples
from tests.support.threaded_device import Ended

PAGE, PAGES = 16, 64
COUNT = 5  # tokens of each output
DRAWS = [
    TokenDraw(temperature=0.0),
    TokenDraw(temperature=1.0, seed=9, logprobs=3),
    TokenDraw(temperature=0.9, top_p=0.95, seed=7, logprobs=2),
    TokenDraw(temperature=1.2, top_k=20, seed=11),
    TokenDraw(temperature=0.0, logprobs=0),
    TokenDraw(temperature=1.5, seed=4),
]
MASKED = (1, 2, 4)  # the sequences whose draws have a mask
PLAIN = (0, 3, 5)
FAILS = (4, 2)  # the sequence whose grammar fails, and after so many tokens
LATE = "late"
MOMENTS = ["before the launch", "after the launch", "after the step ahead", "while it is collected", LATE]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = checkpoints.make("llama", tmp_path_factory.mktemp("llama"))
    return Engine.load(path, "float32", "cpu", PAGES, PAGE, True, 1, native=False)


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, checkpoints.VOCAB) for _ in range(4 + 5 * number)]


def allowed(tokens: Sequence[int]) -> Bits:
    """A third of the tokens. Which third depends on all tokens before."""
    return np.arange(checkpoints.VOCAB) % 3 == sum(tokens) % 3


def failure(sequence: int, drawn: int) -> str:
    return "the grammar is exhausted" if (sequence, drawn) == FAILS else ""


class HeldMask:
    """A mask that is there when the test says so. It can't be read before."""

    slow, ends = False, ()

    def __init__(self, tokens: Sequence[int], failure: str = "") -> None:
        self.ready = False
        self._results = (None if failure else allowed(tokens), failure)

    def _read(self, place: int) -> Any:
        assert self.ready, "a mask is used before it is there"
        return self._results[place]

    @property
    def allowed(self) -> Bits | None:
        return self._read(0)

    @property
    def failure(self) -> str:
        return self._read(1)

    @property
    def may_end(self) -> bool:
        assert self.ready
        return False

    def begin(self) -> bool:
        return False

    def compute(self) -> None: ...


class HeldThreads(MaskThreads):
    """Masks come while a step waits for them, or not. Within a launch nothing may wait."""

    def __init__(self) -> None:
        self.coming: list[HeldMask] = []
        self.waited: list[bool] = []  # whether for slow ones
        self.launching = False

    def start(self, masks: Sequence[Any]) -> MasksUnderWay:
        return MasksUnderWay((), (), 0.0)

    def wait(self, under_way: MasksUnderWay, *, slow: bool = True) -> None:
        assert not self.launching, "a launch waits for masks"
        self.waited.append(slow)
        for mask in self.coming:
            mask.ready = True
        self.coming.clear()


class Streams:
    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self._here = "steps"

    def mark(self) -> Ended:
        return Ended()

    @contextlib.contextmanager
    def beside(self, event: Event) -> Iterator[None]:
        self._here = "beside"
        try:
            yield
        finally:
            self._here = "steps"

    def note(self, what: str) -> None:
        self.log.append((self._here, what))


class NotedModel:
    def __init__(self, engine: Engine, streams: Streams) -> None:
        self._model, self._streams = engine._model, streams
        self.logits = self._model.logits

    def forward(self, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor | None:
        self._streams.note("layers")
        return self._model.forward(batch, tokens)


class NotedSampler(DeviceSampler):
    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device)
        self._streams = streams
        self.full = False  # the device has no memory for masked draws

    def launch(self, logits: torch.Tensor, draws: Sequence[TokenDraw], positions: Sequence[int]) -> LaunchedDraws:
        self._streams.note(f"{len(draws)} draws")
        if self.full and any(draw.mask is not None for draw in draws):
            raise torch.OutOfMemoryError("the device is full")
        return super().launch(logits, draws, positions)


class Device:
    """A launcher over an engine on a CPU."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.streams, self.threads = Streams(), HeldThreads()
        device = engine.pool.device
        self.sampler = NotedSampler(device, self.streams)
        model: Any = NotedModel(engine, self.streams)
        self._launcher = StepLauncher(model, self.sampler, self.threads, device, self.streams, Tracer())

    def launch(self, *chunks: Chunk) -> LaunchedStep:
        masked = any(chunk.sample is not None and chunk.sample.mask is not None for chunk in chunks)
        self.threads.launching = True
        try:
            masks = self.threads.start(()) if masked else None
            return self._launcher.launch(chunks, self._engine._flatten(chunks), masks)[0]
        finally:
            self.threads.launching = False


@dataclass
class Output:
    """One sequence, its pages, and what was drawn for it."""

    number: int
    known: list[int] = field(init=False)
    table: BlockTable = field(init=False)
    computed: int = 0
    drawn: list[Sampled] = field(default_factory=list)
    mask: HeldMask | None = None  # of the next token

    def __post_init__(self) -> None:
        self.known = prompt(self.number)
        self.table = BlockTable(range(8 * self.number, 8 * self.number + 8))

    @property
    def ended(self) -> bool:
        return len(self.drawn) >= COUNT or any(one.failure for one in self.drawn)

    def chunk(self) -> Chunk:
        """The next chunk, all of whose tokens are known."""
        draw = DRAWS[self.number]
        if self.number in MASKED:
            self.mask = self.mask or HeldMask(self.known, failure(self.number, len(self.drawn)))
            draw = replace(draw, mask=self.mask)
        return Chunk(self.known[self.computed :], self.computed, self.table, draw)

    def ahead(self, number: int) -> Chunk:
        return Chunk([0], len(self.known), self.table, DRAWS[self.number], follows=number)

    def take(self, one: Sampled | None) -> None:
        if one is None:  # the last token is computed once more
            self.computed = len(self.known) - 1
            return
        self.computed, self.mask = len(self.known), None
        self.drawn.append(one)
        self.known.append(one.token)


@pytest.fixture(scope="module")
def oracle(engine: Engine) -> dict[int, list[Sampled]]:
    """What a CPU draws, where every step waits for its masks."""
    draws: dict[int, list[Sampled]] = {}
    for number in (*PLAIN, *MASKED):
        one = Output(number)
        while not one.ended:
            chunk = one.chunk()
            if (held := one.mask) is not None:
                held.ready = True
                mask = ComputedMask(held.allowed, failure=held.failure)
                chunk = Chunk(one.known, 0, one.table, replace(DRAWS[number], mask=mask))
            one.take(engine.step([chunk])[0])
        draws[number] = one.drawn
    return draws


def assert_equal(outputs: Sequence[Output], oracle: dict[int, list[Sampled]]) -> None:
    for one in outputs:
        for ours, theirs in zip(one.drawn, oracle[one.number], strict=True):
            assert (ours.finite, ours.failure) == (theirs.finite, theirs.failure)
            if theirs.finite:
                assert ours.token == theirs.token
                assert ours.logprob == (None if theirs.logprob is None else pytest.approx(theirs.logprob, abs=1e-4))
                assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_what_a_cpu_draws_is_masked(oracle: dict[int, list[Sampled]]) -> None:
    for number in MASKED:
        known = prompt(number)
        for one in oracle[number]:
            assert one.failure or allowed(known)[one.token]
            known.append(one.token)
    assert oracle[FAILS[0]][-1].failure


@examples(150)
@given(data=st.data())
def test_the_tokens_are_those_of_a_cpu_whenever_masks_come(
    data: st.DataObject, engine: Engine, oracle: dict[int, list[Sampled]]
) -> None:
    """Every other step has all sequences and the step ahead of it those whose draws have no mask."""
    run(engine, oracle, data.draw(st.lists(st.sampled_from(MOMENTS), min_size=1, max_size=7)), data.draw(st.booleans()))


def run(engine: Engine, oracle: dict[int, list[Sampled]], moments: Sequence[str], polls: bool) -> None:
    """`moments`: when the masks come, in turns. `polls`: the worker asks whether a step has ended."""
    device, outputs = Device(engine), [Output(number) for number in range(len(DRAWS))]
    turn = 0
    while any(not one.ended for one in outputs):
        members = [one for one in outputs if not one.ended]
        chunks = [one.chunk() for one in members]
        held: dict[str, list[HeldMask]] = {moment: [] for moment in MOMENTS}
        for one in members:
            if one.mask is not None:
                late_again = moments[turn % len(moments)] == LATE and turn > 40
                held[MOMENTS[0] if late_again else moments[turn % len(moments)]].append(one.mask)
                turn += 1

        def come(moment: str, held: dict[str, list[HeldMask]] = held) -> None:
            for mask in held[moment]:
                mask.ready = True

        def poll(step: LaunchedStep) -> None:
            if polls:
                step.done()

        come("before the launch")
        first = device.launch(*chunks)
        come("after the launch")
        poll(first)
        follow = [
            (one, number) for number, one in enumerate(members) if one.mask is None and len(one.drawn) < COUNT - 1
        ]
        second = device.launch(*[one.ahead(number) for one, number in follow]) if follow else None
        come("after the step ahead")
        poll(first)
        device.threads.coming = held["while it is collected"]
        late = {id(mask) for mask in held[LATE]}
        for one, sampled in zip(members, first.wait().sampled, strict=True):
            if id(one.mask) in late:
                assert sampled is None, "a token was drawn without its mask"
            else:
                assert sampled is not None
            one.take(sampled)
        if second is not None:
            for (one, _), sampled in zip(follow, second.wait().sampled, strict=True):
                assert sampled is not None
                one.take(sampled)
    assert_equal(outputs, oracle)


def test_a_launch_returns_while_a_mask_is_held_back(engine: Engine, oracle: dict[int, list[Sampled]]) -> None:
    device, outputs = Device(engine), [Output(number) for number in (0, 1, 3)]
    plain, masked, other = outputs
    first = device.launch(*[one.chunk() for one in outputs])
    second = device.launch(plain.ahead(0), other.ahead(2))
    assert first.done()
    assert second.done()
    mask = masked.mask
    assert (mask.ready, device.threads.waited) == (False, [])
    assert device.streams.log == [("steps", "layers"), ("steps", "2 draws")] * 2
    mask.ready = True
    assert first.done()
    assert device.streams.log[4:] == [("beside", "1 draws")], "it would wait for the step ahead"
    for one, sampled in zip(outputs, first.wait().sampled, strict=True):
        one.take(sampled)
    for one, sampled in zip((plain, other), second.wait().sampled, strict=True):
        one.take(sampled)
    assert_equal(outputs, {one.number: oracle[one.number][: len(one.drawn)] for one in outputs})
    assert [len(one.drawn) for one in outputs] == [2, 1, 2]


def test_masks_that_are_there_in_time_lie_in_the_stream_of_the_step(engine: Engine) -> None:
    for come in ("before", "after", "with the step ahead"):
        device, plain, masked = Device(engine), Output(0), Output(1)
        chunks = plain.chunk(), masked.chunk()
        mask = masked.mask
        mask.ready = come == "before"
        step = device.launch(*chunks)
        mask.ready = True
        if come == "after":
            step.done()
        device.launch(plain.ahead(0))
        lie = [("steps", "layers"), ("steps", "1 draws"), ("steps", "1 draws")]
        assert device.streams.log[:3] == lie, come
        assert all(one is not None for one in step.wait().sampled)
        assert device.threads.waited == []


def test_a_late_mask_leaves_its_row_without_a_token_and_the_next_step_draws_it(
    engine: Engine, oracle: dict[int, list[Sampled]]
) -> None:
    device, plain, masked = Device(engine), Output(0), Output(2)
    first = device.launch(plain.chunk(), masked.chunk())
    second = device.launch(plain.ahead(0))
    sampled = first.wait().sampled
    assert device.threads.waited == [False], "the step ahead has others to wait for than slow masks"
    assert sampled[1] is None
    plain.take(sampled[0])
    masked.take(None)
    plain.take(second.wait().sampled[0])
    again = masked.chunk()
    assert list(again.tokens) == masked.known[-1:]
    third = device.launch(plain.chunk(), again)
    mask = masked.mask
    assert mask is not None
    device.threads.coming = [mask]
    for one, drawn in zip((plain, masked), third.wait().sampled, strict=True):
        one.take(drawn)
    assert device.threads.waited == [False, True]
    assert_equal([plain, masked], {0: oracle[0][:3], 2: oracle[2][:1]})


@pytest.mark.parametrize("ahead", [False, True])
def test_the_time_of_late_draws_counts_if_the_device_has_nothing_else_to_do(
    ahead: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, plain, masked = Device(engine), Output(0), Output(1)
    step = device.launch(plain.chunk(), masked.chunk())
    if ahead:
        device.launch(plain.ahead(0))
    device.threads.coming = [mask for mask in (masked.mask,) if mask is not None]
    with monkeypatch.context() as patch:
        patch.setattr("engine.cuda.steps.time.perf_counter", lambda: 10.0 * len(device.threads.waited))
        finished = step.wait()
    assert finished.sampled[1] is not None
    assert finished.seconds == (0.0 if ahead else 10.0)


def test_nothing_follows_a_draw_with_a_mask(engine: Engine) -> None:
    device, plain, masked = Device(engine), Output(0), Output(1)
    device.launch(plain.chunk(), masked.chunk())
    launched = list(device.streams.log)
    with pytest.raises(ValueError, match="chunk 1 follows a draw with a mask"):
        device.launch(plain.ahead(0), masked.ahead(1))
    assert device.streams.log == launched, "nothing may have been computed"


@pytest.mark.parametrize("launched_by", ["launch", "step ahead", "done", "wait"])
def test_masked_draws_that_do_not_fit_fail_their_own_step(launched_by: str, engine: Engine) -> None:
    device, plain, masked = Device(engine), Output(0), Output(1)
    device.sampler.full = True
    chunks = plain.chunk(), masked.chunk()
    mask = masked.mask
    mask.ready = launched_by == "launch"
    first = device.launch(*chunks)
    mask.ready = launched_by in ("launch", "step ahead")
    second = device.launch(plain.ahead(0))
    mask.ready = launched_by != "wait"
    assert first.done()
    device.threads.coming = [mask]
    with pytest.raises(torch.OutOfMemoryError):
        first.wait()
    assert second.wait().sampled == [None], "it has gone on from a token that was not told"


def the_masks_count_as_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_MaskedDraws, "_unready", lambda self: [])


def a_launch_collects_masks(patch: pytest.MonkeyPatch) -> None:
    ready = _MaskedDraws.launch_if_ready

    def waits(self: _MaskedDraws) -> None:
        self._device.threads.wait(self._masks)
        ready(self)

    patch.setattr(_MaskedDraws, "launch_if_ready", waits)


def a_late_row_keeps_what_it_draws(patch: pytest.MonkeyPatch) -> None:
    launch = _MaskedDraws._launch

    def forgets(self: _MaskedDraws) -> None:
        launch(self)
        self._late = ()

    patch.setattr(_MaskedDraws, "_launch", forgets)


def rows_of_masked_draws_are_the_first(patch: pytest.MonkeyPatch) -> None:
    from engine.cuda import draws

    patch.setattr(draws._Rows, "logits", lambda self, of_step: of_step[: len(self.rows)])


@pytest.mark.parametrize(
    "mutation",
    [
        the_masks_count_as_ready,
        a_launch_collects_masks,
        a_late_row_keeps_what_it_draws,
        rows_of_masked_draws_are_the_first,
    ],
)
def test_mistakes_are_noticed(
    mutation: Callable[[pytest.MonkeyPatch], None],
    engine: Engine,
    oracle: dict[int, list[Sampled]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(engine, oracle, MOMENTS, polls=True)
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        run(engine, oracle, MOMENTS, polls=True)
