"""The search for a split, on clusters whose breaking points are a table; and what it says in the end."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import advice
from simulator.cluster import Layout

OBJECTIVES = advice.Objectives(ttft=2.0, tpot=0.05)


def served(
    rate: float = 1.0, late: float = 0.0, slow: float = 0.0, prefill: float = 0.5, tpot: float = 0.02
) -> advice.TrialResult:  # fmt: skip
    return advice.TrialResult(rate, late, slow, (0.5, 1.0), (tpot, tpot), 0.0, {"prefill": prefill, "decode": 0.9})


class Table:
    """Clusters that break above a given speed; it counts along."""

    def __init__(self, highest: Callable[[Layout], float]) -> None:
        self._highest = highest
        self.trials: list[advice.Trial] = []

    def __call__(self, trials: Sequence[advice.Trial]) -> list[advice.TrialResult]:
        self.trials.extend(trials)
        return [served(t.speed, late=0.0 if t.speed <= self._highest(t.layout) else 0.2) for t in trials]


def one_peak(best: int, workers: int, colocated: float = 1.0) -> Callable[[Layout], float]:
    def highest(layout: Layout) -> float:
        if not layout.prefill:
            return colocated
        return 3.0 * min(layout.prefill / best, layout.decode / (workers - best))

    return highest


def searched(workers: int, truth: Table, predict: Callable[[Layout], float]) -> tuple[advice.Break, list[advice.Break]]:
    result = advice.Search(workers, predict, 0.9, truth).run()
    assert len(truth.trials) == len(set(truth.trials)), "nothing is simulated twice"
    return result


@given(st.data(), st.integers(2, 24))
def test_the_top_is_found_whatever_was_predicted(data: st.DataObject, workers: int) -> None:
    """Or what is hardly lower: a difference of less than a rung between neighbours is not seen."""
    best, guess = (data.draw(st.integers(1, workers - 1)) for _ in range(2))
    truth = Table(one_peak(best, workers))
    colocated, splits = searched(workers, truth, one_peak(guess, workers, 0.3))
    top = one_peak(best, workers)(splits[0].layout)
    assert top > 3.0 / advice.RUNG**3
    for answer, highest in ((colocated, 1.0), (splits[0], top)):
        assert answer.best.speed <= highest < answer.best.speed * advice.RUNG


def test_a_good_prediction_makes_it_short() -> None:
    truth = Table(one_peak(5, 8, 2.0))
    _, splits = searched(8, truth, one_peak(5, 8, 2.0))
    assert {advice.name(each.layout) for each in splits} == {"4P+4D", "5P+3D", "6P+2D"}
    assert len(truth.trials) <= 18


def test_one_worker_is_colocated() -> None:
    colocated, splits = searched(1, Table(lambda _: 1.0), lambda _: 2.0)
    assert colocated.layout == Layout(0, 1)
    assert not splits
    assert advice.sentence(colocated, splits, OBJECTIVES).startswith("One worker can't be split")


def test_a_cluster_that_breaks_at_every_speed_is_looked_for_so_far_only() -> None:
    truth = Table(lambda _: 0.0)
    colocated, splits = searched(8, truth, one_peak(4, 8))
    assert (colocated.best, colocated.goodput, splits[0].best) == (None, 0.0, None)
    assert "relax an objective" in advice.sentence(colocated, splits, OBJECTIVES)
    assert len(truth.trials) < 30


def test_a_cluster_that_never_breaks_is_left_alone() -> None:
    truth = Table(lambda _: float("inf"))
    colocated, _ = searched(4, truth, one_peak(2, 4))
    assert colocated.beyond is None
    assert advice.breaks_by(colocated.layout, colocated.beyond) == "nothing, at the speeds tried"
    assert len(truth.trials) < 30


@given(st.integers(-40, 40), st.integers(-20, 20))
def test_a_bracket_closes_around_the_breaking_point(highest: int, off: int) -> None:
    bracket = advice.Bracket(highest + off)
    tried: list[int] = []
    while (rung := bracket.next) is not None:
        tried.append(rung)
        bracket.note(rung, rung <= highest)
    assert (bracket.passed, bracket.failed) == (highest, highest + 1)
    assert len(set(tried)) == len(tried) <= 9


def test_a_bracket_begins_at_its_own_rung_after_a_failure_far_above() -> None:
    bracket = advice.Bracket(3)
    bracket.note(40, False)
    assert bracket.next == 3


def break_of(layout: Layout, at: advice.TrialResult | None, beyond: advice.TrialResult | None = None) -> advice.Break:
    return advice.Break(layout, advice.Trial(layout, 0) if at else None, at, beyond)


@pytest.mark.parametrize(
    ("layout", "beyond", "says"),
    [
        (Layout(0, 4), served(slow=0.2), "tokens come too slowly"),
        (Layout(2, 2), served(slow=0.2, late=0.1), "tokens come too slowly from decode"),
        (Layout(0, 4), served(late=0.2), "first tokens come too late"),
        (Layout(2, 2), served(late=0.2, prefill=0.95), "first tokens come too late: prefill has no time left"),
        (Layout(2, 2), served(late=0.2, prefill=0.4), "first tokens come too late: decode takes no more"),
    ],
)
def test_what_gives_way(layout: Layout, beyond: advice.TrialResult, says: str) -> None:
    assert advice.breaks_by(layout, beyond) == says


def test_it_says_when_splitting_pays() -> None:
    colocated = break_of(Layout(0, 8), served(3.0), served(3.1, slow=0.2))
    split = break_of(Layout(5, 3), served(4.0), served(4.1, late=0.2))
    assert advice.pays(colocated, split)
    assert advice.sentence(colocated, [split], OBJECTIVES) == (
        "Split: 5P+3D serves 1.33 times what 8 colocated workers do (4.00 against 3.00 requests a second within both "
        "objectives), where tokens come too slowly."
    )


def test_it_says_when_splitting_does_not_pay_and_why() -> None:
    colocated = break_of(Layout(0, 8), served(4.0), served(4.1, late=0.2))
    split = break_of(Layout(5, 3), served(3.0), served(3.1, late=0.2, prefill=0.99))
    assert not advice.pays(colocated, split)
    text = advice.sentence(colocated, [split], OBJECTIVES)
    assert text.startswith("Splitting does not pay here: the best split, 5P+3D, serves 0.75 times what 8 colocated")
    assert "(TPOT 20 ms at p99, 50 allowed)" in text
    assert text.endswith("in the split, first tokens come too late: prefill has no time left.")


def test_a_difference_of_less_than_a_rung_is_none() -> None:
    assert not advice.pays(break_of(Layout(0, 8), served(4.0)), break_of(Layout(5, 3), served(4.1)))
    assert "does not pay" in advice.sentence(
        break_of(Layout(0, 8), served(4.0)), [break_of(Layout(5, 3), None)], OBJECTIVES
    )
    assert "Split: 5P+3D" in advice.sentence(
        break_of(Layout(0, 8), None), [break_of(Layout(5, 3), served(4.0))], OBJECTIVES
    )
