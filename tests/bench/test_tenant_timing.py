"""The rank test of the tenants' timing: against a count of all pairs, and on times that differ or do not."""

from __future__ import annotations

import random

import pytest

from bench.tenant_timing import ALIKE, DIFFERENT, Answer, Pairs, mann_whitney, results


def test_the_share_is_that_of_all_pairs() -> None:
    rng = random.Random(3)
    left, right = ([rng.randrange(12) for _ in range(size)] for size in (30, 40))
    pairs = [(a < b) + (a == b) / 2 for a in left for b in right]
    p, sooner = mann_whitney(left, right)
    assert sooner == pytest.approx(sum(pairs) / len(pairs))
    assert 0 < p <= 1


def test_an_example_by_hand() -> None:
    """Of 36 pairs the left is smaller in 25. The variance is 6 * 6 * 13 / 12 = 39, so z is 7 / sqrt(39) = 1.12."""
    p, sooner = mann_whitney([2, 3, 4, 5, 6, 12], [1, 7, 8, 9, 10, 11])
    assert sooner == pytest.approx(25 / 36)
    assert p == pytest.approx(0.2623, abs=1e-4)


def test_equal_times_are_alike_and_shifted_ones_are_not() -> None:
    rng = random.Random(5)
    base = [rng.lognormvariate(0, 0.2) for _ in range(200)]
    again = [rng.lognormvariate(0, 0.2) for _ in range(200)]
    assert mann_whitney(base, again)[0] > ALIKE
    assert mann_whitney([value * 0.8 for value in again], base)[0] < DIFFERENT
    assert mann_whitney([1.0] * 30, [1.0] * 30) == (1.0, 0.5)


def test_a_leak_and_a_blind_control_are_both_told() -> None:
    rng = random.Random(7)

    def answers(mean: float) -> list[Answer]:
        return [Answer(rng.gauss(mean, 1), 0) for _ in range(200)]

    def verdicts(foreign: float, own: float) -> list[bool | None]:
        told = results(Pairs(answers(foreign), answers(10), answers(own)))
        return [result.ok for result in told if result.ok is not None]

    assert verdicts(10, 5) == [True, True]
    assert verdicts(5, 5) == [False, True]
    assert verdicts(10, 10) == [True, False]
