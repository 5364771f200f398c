"""What is learned from output lengths, and the pages that are kept free for it."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.growth_reserve import GrowthOutlook, LearnedGrowthReserve
from tests.decode_worker.load import AllThatIsAllowed, OnePageEach, requests, run

pytestmark = pytest.mark.slow

PAGE = 16


def young(left: int, known: int = 64) -> GrowthOutlook:
    """A sequence that has just begun."""
    pages = -(-known // PAGE)
    return GrowthOutlook(generated=0, left=left, known=known, pages=pages, own=pages)


def taught(*lengths: int, cut: bool = False) -> LearnedGrowthReserve:
    growth_reserve = LearnedGrowthReserve()
    for length in lengths:
        growth_reserve.output_ended(0, length, cut)
    return growth_reserve


def test_a_limit_that_is_near_needs_what_it_allows() -> None:
    """Before anything is known, too: few outputs end within 32 tokens."""
    assert LearnedGrowthReserve().pages_to_keep([young(32)] * 10, PAGE) == 20


def test_a_limit_that_is_far_is_not_taken_at_its_word_but_outputs_may_be_long() -> None:
    needed = LearnedGrowthReserve().pages_to_keep([young(32_000)] * 10, PAGE)
    assert 10 * 5 < needed < 10 * 2_000 / 4


def test_short_outputs_need_little_and_long_ones_much() -> None:
    rng = random.Random(0)
    short = taught(*(rng.randrange(10, 40) for _ in range(200)))
    long = taught(*(rng.randrange(400, 1_000) for _ in range(200)))
    many = [young(4_096)] * 20
    assert short.pages_to_keep(many, PAGE) < 50
    assert 20 * 400 / PAGE < long.pages_to_keep(many, PAGE) < 20 * 1_000 / PAGE + 20


def test_what_was_cut_off_counts_as_no_shorter_and_not_as_an_end() -> None:
    """A hundred outputs that were cut at 100 tokens say nothing of any end."""
    many = [young(100)] * 10
    assert taught(*[100] * 100, cut=True).pages_to_keep(many, PAGE) >= 68
    assert taught(*[50] * 100).pages_to_keep(many, PAGE) < 45


def test_an_output_that_began_elsewhere_teaches_nothing_about_its_beginning() -> None:
    """Ends at 110 of outputs that came with 100 tokens: of those that came with none, most may end before."""
    growth_reserve = LearnedGrowthReserve()
    for _ in range(100):
        growth_reserve.output_ended(100, 110, cut=False)
    assert growth_reserve.pages_to_keep([young(2_000)] * 10, PAGE) < taught(*[110] * 100).pages_to_keep(
        [young(2_000)] * 10, PAGE
    )


def test_it_follows_the_load_when_that_changes() -> None:
    growth_reserve = taught(*[20] * 2_000)
    before = growth_reserve.pages_to_keep([young(1_000)] * 10, PAGE)
    for _ in range(1_000):
        growth_reserve.output_ended(0, 600, cut=False)
    assert growth_reserve.pages_to_keep([young(1_000)] * 10, PAGE) > 5 * before


def test_one_that_is_about_to_end_makes_room_for_others() -> None:
    """Of two that grow, the older gives its pages back before the younger needs them."""
    growth_reserve = taught(*[100] * 500)
    old = GrowthOutlook(generated=90, left=1_000, known=154, pages=10, own=10)
    assert growth_reserve.pages_to_keep([old, young(1_000)], PAGE) < 7
    shared = GrowthOutlook(generated=90, left=1_000, known=154, pages=10, own=0)
    assert growth_reserve.pages_to_keep([shared, young(1_000)], PAGE) >= 7


outlooks = st.lists(
    st.builds(
        lambda generated, left, prompt, own: GrowthOutlook(
            generated, left, prompt + generated, -(-(prompt + generated) // PAGE), own
        ),
        st.integers(0, 5_000), st.integers(1, 100_000), st.integers(1, 5_000), st.integers(0, 3),
    ),
    max_size=8,
)  # fmt: skip


@given(outlooks, st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3_000_000), st.booleans()), max_size=8))
def test_it_is_a_page_each_at_least_and_what_is_allowed_at_most(
    holders: list[GrowthOutlook], outputs: list[tuple[int, int, bool]]
) -> None:
    growth_reserve = LearnedGrowthReserve()
    for begun, more, cut in outputs:
        growth_reserve.output_ended(begun, begun + more, cut)
    needed = growth_reserve.pages_to_keep(holders, PAGE)
    allowed = AllThatIsAllowed().pages_to_keep(holders, PAGE)
    assert min(allowed, OnePageEach().pages_to_keep(holders, PAGE)) <= needed <= allowed


LOADS: dict[str, tuple[int, Callable[[random.Random], int], int]] = {
    "outputs longer than prompts": (100, lambda rng: int(rng.lognormvariate(5.3, 0.7)) + 1, 1_024),
    "outputs that reach their limit": (100, lambda rng: 10_000, 200),
    "short and long outputs": (100, lambda rng: rng.choice([8, 8, 300]), 1_024),
    "prompts longer than outputs": (600, lambda rng: int(rng.lognormvariate(4.2, 0.9)) + 1, 512),
}
"""The longest prompt, the lengths of outputs, max_tokens."""


@pytest.mark.parametrize("load", LOADS)
def test_few_are_preempted_and_the_pool_is_used(load: str) -> None:
    """In a pool half as large as the load needs: where outputs make the load, a fraction of the preemptions that
    keeping a page each costs, for some of its speed; and sooner done than when max_tokens is kept free."""
    prompt, length, limit = LOADS[load]
    load_requests = requests(250, prompt, length, limit)
    time = sum(each.output for each in load_requests)
    pages = int(32 * sum(each.output * (each.prompt + each.output / 2) for each in load_requests) / time / PAGE / 2)
    ours, plain, careful = (run(load_requests, 32, pages, rule) for rule in (None, OnePageEach(), AllThatIsAllowed()))
    print(f"{pages} pages; learned: {ours.summary}; a page each: {plain.summary}; max_tokens: {careful.summary}")
    assert careful.preemptions == 0
    assert ours.preemptions <= max(0.4 * plain.preemptions, 3)
    assert ours.seconds < 1.4 * plain.seconds
    assert ours.seconds < careful.seconds
    assert ours.utilisation > careful.utilisation
