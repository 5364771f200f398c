"""The draw: what may be drawn, how often, and that nothing but the draw itself decides it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.sampling import counter_rng
from engine.sampling.filter_edges import PREFIX
from engine.sampling.host_sampler import HostSampler
from engine.step.batch import TokenDraw
from tests.support.thorough import examples

draws = st.builds(
    TokenDraw,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1003, 0.5007, 0.9003, 0.9991, 1.0]),  # no sum of equals that rounding could move
    top_k=st.sampled_from([0, 1, 5, PREFIX - 1, PREFIX, PREFIX + 1, 5000]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 3),
)


def logits_of(seed: int, rows: int, vocab: int = 1000, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def tokens_of(logits: torch.Tensor, draws: list[TokenDraw], positions: list[int]) -> list[int]:
    return [sampled.token for sampled in HostSampler().sample(logits, draws, positions)]


def candidates(logits: np.ndarray, draw: TokenDraw) -> list[int]:
    """The filters as their definitions read, one after the other over the whole vocabulary."""
    scaled = logits.astype(np.float64) / draw.temperature
    left = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if 0 < draw.top_k < len(left):
        kth = scaled[left[draw.top_k - 1]]
        left = [token for token in left if scaled[token] >= kth]
    if draw.top_p < 1:
        weights = np.exp(scaled[left] - scaled[left[0]])
        cumulated = np.cumsum(weights / weights.sum())
        left = left[: int(np.argmax(cumulated >= draw.top_p)) + 1] if (cumulated >= draw.top_p).any() else left
    if draw.min_p > 0:
        limit = scaled[left[0]] + math.log(draw.min_p)
        left = [token for token in left if scaled[token] >= limit]
    return left


@examples(300)
@given(
    draw=draws,
    logits_seed=st.integers(0, 1000),
    spread=st.sampled_from([0.01, 1.0, 10.0]),
    vocab=st.sampled_from([3, PREFIX, PREFIX + 1, 1000]),
    coarse=st.booleans(),
)
def test_the_draw_is_gumbel_max_over_what_the_filters_leave(
    draw: TokenDraw, logits_seed: int, spread: float, vocab: int, coarse: bool
):
    logits = logits_of(logits_seed, 1, vocab, spread)
    if coarse:
        logits = (logits * 2).round() / 2  # many ties
    allowed = np.array(candidates(logits[0].numpy(), draw))
    scores = logits[0].numpy().astype(np.float64)[allowed] / draw.temperature
    scores += counter_rng.gumbel(counter_rng.key(draw.seed, draw.index, 17), allowed)
    assert tokens_of(logits, [draw], [17]) == [allowed[np.argmax(scores)]]


@pytest.mark.parametrize("vocab", [4_096, 4_097, 36_864, 70_001])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
def test_a_draw_in_blocks_is_gumbel_max_over_the_whole_vocabulary(vocab: int, spread: float):
    logits = logits_of(3, 1, vocab, spread)
    scaled = ((logits[0] - logits.max()) / torch.tensor(0.7)).numpy().astype(np.float64)
    for seed in range(12):
        noisy = scaled + counter_rng.gumbel(counter_rng.key(seed, 0, 5), np.arange(vocab))
        assert tokens_of(logits, [TokenDraw(temperature=0.7, seed=seed)], [5]) == [int(np.argmax(noisy))]


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("draw", [TokenDraw(top_k=300), TokenDraw(top_p=0.9003), TokenDraw(min_p=0.02)], ids=str)
def test_filters_of_a_large_vocabulary(draw: TokenDraw, spread: float):
    vocab = 20_011
    logits = logits_of(5, 1, vocab, spread)
    allowed = np.array(candidates(logits[0].numpy(), draw))
    for seed in range(5):
        scores = logits[0].numpy().astype(np.float64)[allowed]
        scores += counter_rng.gumbel(counter_rng.key(seed, 0, 17), allowed)
        assert tokens_of(logits, [replace(draw, seed=seed)], [17]) == [allowed[np.argmax(scores)]]


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(2, 100)
    logits[0, [40, 7, 90]] = 1.0
    logits[1, 99] = 1.0
    assert tokens_of(logits, [TokenDraw(temperature=0, top_k=3)] * 2, [0, 0]) == [7, 99]


@given(order=st.permutations(range(12)), others=st.lists(draws, min_size=12, max_size=12))
@settings(deadline=None)
def test_company_does_not_matter(order: list[int], others: list[TokenDraw]):
    logits = logits_of(4, 12)
    alone = [tokens_of(logits[row : row + 1], [others[row]], [row])[0] for row in range(12)]
    together = tokens_of(logits[order], [others[row] for row in order], list(order))
    assert together == [alone[row] for row in order]


@pytest.mark.technique("Draws as a function of seed and position")
def test_every_part_of_the_key_counts():
    logits = torch.zeros(1, 1000)
    draw = TokenDraw(seed=5)
    variants = [(draw, 3), (replace(draw, seed=6), 3), (replace(draw, index=1), 3), (draw, 4)]
    assert len({tokens_of(logits, [one], [position])[0] for one, position in variants}) == len(variants)


@pytest.mark.parametrize(
    "draw",
    [
        TokenDraw(),
        TokenDraw(temperature=0.5),
        TokenDraw(top_k=5),
        TokenDraw(top_p=0.8),
        TokenDraw(min_p=0.05),
        TokenDraw(top_k=6, top_p=0.9),
    ],
    ids=str,
)
@pytest.mark.technique("Draws as a function of seed and position")
def test_frequencies_are_those_of_the_distribution(draw: TokenDraw):
    """Pearson's chi-square over 20,000 draws, its 99.9th percentile for 11 degrees of freedom being 31.3."""
    count = 20_000
    logits = logits_of(11, 1, vocab=12, spread=1.5)
    allowed = candidates(logits[0].numpy(), draw)
    expected = np.zeros(12)
    expected[allowed] = (logits[0, allowed].double() / draw.temperature).softmax(-1).numpy()
    drawn = tokens_of(logits.expand(count, -1), [replace(draw, seed=9)] * count, list(range(count)))
    observed = np.bincount(drawn, minlength=12)
    assert observed[expected == 0].sum() == 0
    likely = expected > 0
    assert (((observed - count * expected) ** 2)[likely] / (count * expected[likely])).sum() < 31.3


def test_rounding_does_not_move_a_draw():
    rows = 4000
    logits = logits_of(2, rows, vocab=300)
    noisy = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)) * 1e-6
    for draw in (TokenDraw(seed=1), TokenDraw(temperature=0.8, top_k=50, seed=1), TokenDraw(min_p=0.05, seed=1)):
        assert tokens_of(logits, [draw] * rows, list(range(rows))) == tokens_of(noisy, [draw] * rows, list(range(rows)))


def test_logprobs_are_the_models_own():
    logits = logits_of(6, 4)
    draws = [
        TokenDraw(temperature=0, logprobs=0),
        TokenDraw(temperature=0.2, top_k=3, logprobs=4),
        TokenDraw(),
        TokenDraw(temperature=5.0, seed=2, logprobs=2000),
    ]
    sampled = HostSampler().sample(logits, draws, [0] * 4)
    expected = logits.log_softmax(-1)
    assert sampled[2].logprob is None
    for row in (0, 1, 3):
        assert sampled[row].logprob == pytest.approx(float(expected[row, sampled[row].token]), abs=1e-6)
    assert [len(one.top) for one in sampled] == [0, 4, 0, 1000]
    for row in (1, 3):
        logprobs = [logprob for _, logprob in sampled[row].top]
        assert logprobs == sorted(logprobs, reverse=True)
        assert all(logprob == pytest.approx(float(expected[row, token])) for token, logprob in sampled[row].top)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "draw",
    [TokenDraw(temperature=0), TokenDraw(), TokenDraw(top_k=4), TokenDraw(top_p=0.5), TokenDraw(min_p=0.5, logprobs=2)],
    ids=str,
)
def test_a_row_that_is_not_finite_harms_no_other(bad: float, draw: TokenDraw):
    logits = logits_of(8, 3)
    expected = tokens_of(logits, [draw] * 3, [0, 1, 2])
    logits[1] = bad
    sampled = HostSampler().sample(logits, [draw] * 3, [0, 1, 2])
    assert [sampled[0].token, sampled[2].token] == [expected[0], expected[2]]
    assert 0 <= sampled[1].token < 1000
    assert [one.finite for one in sampled] == [True, False, True]


@pytest.mark.parametrize(("bad", "finite"), [(float("nan"), False), (float("inf"), False), (float("-inf"), True)])
@pytest.mark.parametrize("draw", [TokenDraw(temperature=0, logprobs=3), TokenDraw()], ids=str)
def test_one_logit_that_is_not_finite_is_noticed_unless_it_is_a_masked_one(bad: float, finite: bool, draw: TokenDraw):
    logits = logits_of(8, 2)
    best = logits.argmax(dim=-1).tolist()
    logits[1, 900 if best[1] != 900 else 901] = bad
    for known in (None, best):
        sampled = HostSampler().sample(logits, [draw] * 2, [0, 1], known)
        assert [one.finite for one in sampled] == [True, finite]


def test_masked_tokens_are_never_drawn():
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, [3, 700]] = 0.0
    for draw in (TokenDraw(), TokenDraw(top_p=0.9), TokenDraw(top_k=500), TokenDraw(min_p=0.1)):
        drawn = {tokens_of(logits, [replace(draw, seed=seed)], [0])[0] for seed in range(40)}
        assert drawn == {3, 700}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_very_cold_draw_is_greedy(temperature: float):
    logits = logits_of(1, 1, spread=30)
    assert tokens_of(logits, [TokenDraw(temperature=temperature, top_p=0.9)], [0]) == [int(logits.argmax())]


def test_noise_is_splitmix64():
    """The first outputs of the published generator for seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected = [((bits >> 11) + 0.5) / 2**53 for bits in known]
    assert counter_rng.uniform(1234567, np.arange(4)).tolist() == expected


def test_noise_never_changes():
    """A draw made today must be made again by every later release: a change here needs a new numerics version."""
    assert counter_rng.key(0, 0, 0) == 2558736989570252433
    assert counter_rng.key(2**64 - 1, 1, 131072) == 7341537421776312371
