"""The steps that tell how fast a worker is before it has served anybody."""

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from baton.step_cost_model import StepCoefficients, StepCostModel
from engine.engine import Engine
from engine.step.batch import Chunk
from engine.step.timing import sample_of
from worker import calibration

MACHINE = StepCoefficients(fixed=0.001, token=2e-5, pair=2e-9, row=5e-5, context=1e-7)
PAGE = 16


class Clocked:
    """An engine that takes as long as the machine above, times `slower`, and twice that when a size is new to it. Its
    first step of each kind takes `first` seconds more."""

    def __init__(self, slower: float = 1.0, first: float = 0.0) -> None:
        self.now = 0.0
        self._slower = slower
        self._last: Sequence[Chunk] = ()
        self._first = dict.fromkeys((True, False), first)

    def step(self, chunks: Sequence[Chunk]) -> float:
        size = sample_of(chunks, 0.0)
        seconds = self._slower * MACHINE.of(size.tokens, size.pairs, size.rows, size.context)
        seconds = (seconds if chunks is self._last else 2 * seconds) + self._first.pop(size.rows > 0, 0.0)
        self.now += seconds
        self._last = chunks
        return seconds


@pytest.mark.parametrize("decodes", [False, True])
def test_what_it_tells_is_enough_to_predict_steps(decodes: bool) -> None:
    clocked, pace = Clocked(), StepCostModel()
    pace.calibrate(calibration.calibrate(clocked.step, lambda: clocked.now, PAGE, 10_000, 8_192, decodes=decodes))
    assert pace.seconds(200, 200 * 900) == pytest.approx(MACHINE.of(200, 200 * 900), rel=0.05)
    if decodes:
        assert pace.seconds(rows=20, context=6_000) == pytest.approx(MACHINE.of(rows=20, context=6_000), rel=0.05)


def test_sizes_that_do_not_fit_are_left_out_and_a_slow_machine_gets_no_further_than_its_time() -> None:
    clocked = Clocked()
    small = calibration.calibrate(clocked.step, lambda: clocked.now, PAGE, 32, 300, decodes=True)
    assert {(sample.rows, sample.tokens) for sample in small} == {(1, 0), (8, 0), (0, 16), (0, 64), (0, 128), (0, 256)}
    clocked = Clocked(slower=50.0)
    samples = calibration.calibrate(clocked.step, lambda: clocked.now, PAGE, 10_000, 8_192, decodes=True)
    assert 2 <= len(samples) <= 3


@pytest.mark.parametrize(("pages", "context"), [(64, 8_192), (10_000, 1_024)])
def test_no_token_is_drawn_beyond_the_context_or_the_pages(pages: int, context: int) -> None:
    """vLLM's runner fails such a step, and with it the worker."""
    clocked, ends = Clocked(), list[int]()

    def step(chunks: Sequence[Chunk]) -> float:
        ends.extend(chunk.end for chunk in chunks if chunk.sample is not None)
        return clocked.step(chunks)

    calibration.calibrate(step, lambda: clocked.now, PAGE, pages, context, decodes=True)
    assert 64 in ends
    assert max(ends) < min(pages * PAGE, context)


def test_it_ends_with_the_first_size_that_does_not_fit_into_memory() -> None:
    clocked = Clocked()

    def step(chunks: Sequence[Chunk]) -> float:
        if sum(len(chunk.tokens) for chunk in chunks) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return clocked.step(chunks)

    samples = calibration.calibrate(step, lambda: clocked.now, PAGE, 10_000, 8_192, decodes=False)
    assert [sample.tokens for sample in samples] == [16, 64, 32]


def test_samples_are_of_the_device_s_clock_not_of_the_host_s() -> None:
    """The host does more than wait for the device, and a step that was only launched has not been computed."""
    clocked, host = Clocked(), [0.0]

    def step(chunks: Sequence[Chunk]) -> float:
        host[0] += 0.001
        return clocked.step(chunks)

    samples = calibration.calibrate(step, lambda: host[0], PAGE, 10_000, 8_192, decodes=True)
    assert [each.seconds for each in samples] == pytest.approx(
        [MACHINE.of(each.tokens, each.pairs, each.rows, each.context) for each in samples]
    )


@pytest.mark.parametrize("decodes", [False, True])
def test_the_first_steps_of_a_process_are_not_measured(decodes: bool) -> None:
    """On a GPU they load kernels, for longer than the whole calibration may take."""
    quick, warmed = (Clocked(first=seconds) for seconds in (0.0, 1.0))
    expected, samples = (
        calibration.calibrate(each.step, lambda each=each: each.now, PAGE, 10_000, 8_192, decodes=decodes)
        for each in (quick, warmed)
    )
    assert [each.seconds for each in samples] == pytest.approx([each.seconds for each in expected])
    assert len(samples) == len(expected)


def test_an_engine_runs_them(engine: Callable[..., Engine]) -> None:
    for head in (True, False):
        loaded = engine("llama", head=head)
        pages, context = len(loaded.pool), loaded.config.max_positions
        samples = calibration.calibrate(
            lambda chunks, loaded=loaded: loaded.launch(chunks).wait().seconds,
            *(time.perf_counter, PAGE, pages, context),
            decodes=head,
        )
        assert {sample.rows > 0 for sample in samples} == {head, False}
        assert all(sample.seconds > 0 for sample in samples)
