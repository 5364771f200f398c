"""The number of tokens that steps may have after some ran out of memory."""

from hypothesis import given
from hypothesis import strategies as st

from engine.step.batch import Chunk
from engine.step.limit import StepLimit


@given(st.integers(1, 10_000), st.integers(1, 100), st.integers(1, 200))
def test_it_halves_until_the_smallest_step(most: int, least: int, fits: int) -> None:
    limit = StepLimit(most, least)
    tries = 0
    while limit.tokens > fits:
        before = limit.tokens
        if not limit.out_of_memory([Chunk([1] * limit.tokens, 0, ())]):
            assert limit.tokens == min(most, least)
            return
        assert min(most, least) <= limit.tokens <= max(before // 2, min(most, least))
        tries += 1
    assert tries <= most.bit_length()


def test_a_small_step_that_ran_out_counts_as_what_it_was() -> None:
    limit = StepLimit(2_048, 16)
    assert limit.out_of_memory([Chunk([1] * 60, 0, ()), Chunk([1] * 40, 0, ())])
    assert limit.tokens == 50
