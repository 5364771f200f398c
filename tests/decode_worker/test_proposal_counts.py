"""How many proposals are verified comes near to the best fixed number, whatever rows cost."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.step_cost_model import StepCoefficients
from decode_worker.proposal_counts import Guesser, ProposalChooser
from decode_worker.row_curve import RowCurve

MOST, STEPS = 16, 2_000
BELIEVED = [StepCoefficients(fixed=1.0), StepCoefficients(fixed=0.5, row=0.1), StepCoefficients(fixed=0.5, row=0.5)]


def piecewise(slopes: list[float]) -> Callable[[int], float]:
    """Seconds by rows: 1 for one, and more by these slopes up to 3, 5, 9 and 17."""
    ends = (1, 3, 5, 9, 17)
    return lambda rows: (
        1
        + sum(slope * max(0, min(rows, end) - start) for slope, start, end in zip(slopes, ends, ends[1:], strict=False))
    )


def speed(right: float, seconds: float, count: int) -> float:
    return sum(right**place for place in range(count + 1)) / seconds


def share_of_the_best(rng: random.Random) -> float:
    """Tokens a second beside those of the best fixed number, for some costs and some that are believed at first. Steps
    vary by a tenth, and grow to twice as long in the meantime."""
    true = piecewise([rng.choice([0.0, rng.uniform(0, 0.3), rng.uniform(0, 1.2)]) for _ in range(4)])
    right, draft = rng.uniform(0.05, 0.95), rng.choice([0.0, 0.1, 0.5])
    curve = RowCurve(rng.choice(BELIEVED))
    chooser = ProposalChooser(curve)
    tokens = took = 0.0
    for step in range(STEPS):
        slower = 1 + step / STEPS
        guesser = Guesser(right, MOST, drafted=draft > 0)
        chosen = chooser.choose([guesser], 1, slower, 0.0, lambda steps, slower=slower: draft * steps * slower)
        rows = 1 + chosen.counts[0]
        curve.observe(1, rows, true(rows) * slower * rng.lognormvariate(0, 0.1))
        if step >= STEPS // 2:
            tokens += sum(right**place for place in range(rows))
            took += true(rows) + draft * (rows - 1)
    return tokens / took / max(speed(right, true(1 + count) + draft * count, count) for count in range(MOST + 1))


def test_a_rule_that_measures_comes_near_to_the_best_fixed_number() -> None:
    shares = sorted(share_of_the_best(random.Random(seed)) for seed in range(40))
    assert shares[2] > 0.88
    assert shares[0] > 0.7
    assert shares[20] > 0.99


def test_what_was_thought_too_dear_is_tried_again_and_what_is_learned_stays() -> None:
    curve = RowCurve(StepCoefficients(row=1.0))
    chooser = ProposalChooser(curve)
    verified: list[int] = []
    for _ in range(400):
        count = chooser.choose([Guesser(0.8, 4)], 1, 0.01, 0.0, lambda steps: 0.0).counts[0]
        curve.observe(1, 1 + count, 0.01)
        verified.append(count)
    assert verified[:16] == [0] * 16
    assert verified[-100:].count(4) > 90
    assert 0 in verified[-100:], "the price of rows is no longer compared with that of a step without"


def test_trials_in_vain_become_rare() -> None:
    curve = RowCurve(StepCoefficients(fixed=0.1, row=0.9))
    chooser = ProposalChooser(curve)
    tried: list[int] = []
    for step in range(4_000):
        rows = 1 + chooser.choose([Guesser(0.8, 4)], 1, 0.01, 0.0, lambda steps: 0.0).counts[0]
        curve.observe(1, rows, 0.01 * rows)
        tried += [step] if rows > 1 else []
    assert 1 <= len(tried) <= 12


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 600), st.floats(1e-6, 10.0)), max_size=60))
def test_more_rows_never_take_less(steps: list[tuple[int, int, float]]) -> None:
    curve = RowCurve(StepCoefficients(fixed=1.0, row=0.2))
    for sequences, rows, seconds in steps:
        curve.observe(sequences, rows, seconds)
    lengths = [curve.times(rows, 1) for rows in range(1, 700)]
    assert all(math.isfinite(length) for length in lengths)
    assert lengths == sorted(lengths)
    for rows, times in curve.longer(5, 300):
        assert times == pytest.approx(lengths[rows - 1] / lengths[4])


def test_a_pair_moves_the_price_between_its_rows_only() -> None:
    curve = RowCurve(StepCoefficients(fixed=1.0, row=0.2))
    before, beyond = curve.times(3, 1), curve.times(64, 16)
    for _ in range(50):
        curve.observe(2, 4, 1.0)
        curve.observe(2, 16, 1.5)
    assert curve.times(16, 4) == pytest.approx(1.5, rel=0.02)
    assert (curve.times(3, 1), curve.times(64, 16)) == pytest.approx((before, beyond))
    curve.observe(3, 4, 9.0)  # of another batch
    curve.interrupt()
    curve.observe(3, 16, 1.0)
    assert curve.times(16, 4) == pytest.approx(1.5, rel=0.02)


def test_the_likeliest_proposals_of_all_sequences_are_chosen() -> None:
    chooser = ProposalChooser(RowCurve(StepCoefficients(fixed=1.0, row=0.3)))
    guessers = [Guesser(0.9, 16), Guesser(0.1, 16), Guesser(0.9, 2)]
    counts = chooser.choose(guessers, 3, 1.0, 0.0, lambda steps: 0.0).counts
    assert counts[0] >= counts[2] > counts[1] == 0
    drafted = [Guesser(0.9, 16, drafted=True), Guesser(0.9, 3)]
    for seconds, most in ((0.0, 16), (0.3, 3), (5.0, 0)):
        counts = chooser.choose(drafted, 2, 1.0, 0.0, lambda steps, each=seconds: each * steps).counts
        assert counts[0] <= most
        assert counts[1] == 3


def test_deciding_takes_a_small_share_of_short_steps_and_every_long_step_is_decided() -> None:
    def decided(seconds: float, sequences: int = 32) -> int:
        chooser = ProposalChooser(RowCurve(StepCoefficients(row=1.0)))
        count = 0
        for _ in range(400):
            if chooser.is_due(seconds):
                chooser.choose([Guesser(0.1, 4)] * sequences, sequences, seconds, 0.0, lambda steps: 0.0)
                count += 1
        return count

    assert decided(0.1) == 400
    assert 10 <= decided(0.003) <= 20
    assert 10 <= decided(0.0004, 1) <= 20


def test_while_proposals_are_verified_each_step_is_decided() -> None:
    chooser = ProposalChooser(RowCurve(StepCoefficients(fixed=0.003)))
    for _ in range(100):
        assert chooser.is_due(0.003)
        chooser.choose([Guesser(0.9, 4)] * 32, 32, 0.003, 0.0, lambda steps: 0.0)


def test_deciding_is_a_part_of_the_price() -> None:
    for seconds, most in ((1e-3, 4), (1e-5, 0)):
        chooser = ProposalChooser(RowCurve(StepCoefficients(fixed=seconds)))
        counts = chooser.choose([Guesser(0.5, 4)], 1, seconds, 0.0, lambda steps: 0.0).counts
        assert counts == (most,)


@given(st.integers(1, 40), st.floats(1e-4, 1.0), st.lists(st.floats(1e-5, 10.0), min_size=20, max_size=40))
def test_trials_take_few_proposals_and_a_share_of_all_seconds(
    sequences: int, seconds: float, costs: list[float]
) -> None:
    chooser = ProposalChooser(RowCurve(StepCoefficients(row=1.0)))
    paid = 0.0
    for step, cost in enumerate(costs, 1):
        if chooser.is_due(seconds):
            chosen = chooser.choose([Guesser(0.5, 16)] * sequences, sequences, seconds, 0.0, lambda steps: 0.0)
            assert sum(chosen.counts) <= 16 if chosen.trial else not any(chosen.counts)
        paid += cost if chooser.pay(cost) else 0.0
        assert paid <= 0.02 * step * seconds * (1 + 1e-9)
