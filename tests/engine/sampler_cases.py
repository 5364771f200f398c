"""Steps of random draws over random logits, and the comparison of two samplers on them."""

import math
import random
from collections.abc import Sequence

import numpy as np
import torch

from baton.messages import PromptTokenLogprob
from engine.sampling.host_sampler import HostSampler
from engine.sampling.sampler import Sampler
from engine.step.batch import ComputedMask, LogitsEdits, Sampled, TokenDraw


def random_logits(rng: random.Random, rows: int, vocab: int) -> torch.Tensor:
    """Rows of every kind: steep, flat, all equal, full of ties, masked in part or whole, NaN and infinite."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    logits = np.empty((rows, vocab), np.float32)
    for row in logits:
        row[:] = numbers.normal(size=vocab) * rng.choice([0.0, 0.01, 1.0, 4.0, 30.0]) + rng.choice(
            [0.0, 0.0, -50.0, 1e4]
        )
        if rng.random() < 0.4:
            row[:] = (row * 2).round() / 2
        if rng.random() < 0.2:
            row[numbers.random(vocab) < rng.choice([0.1, 0.9, 1.0])] = -np.inf
        if rng.random() < 0.1:
            row[rng.randrange(vocab)] = rng.choice([np.nan, np.inf, -np.inf])
    return torch.from_numpy(logits)


def random_draw(rng: random.Random, vocab: int) -> TokenDraw:
    """A third of the draws filters nothing, a third has one filter. Masses are sums of equal shares as often as not, so
    that rounding could move them."""
    only = rng.choice([("top_p", "top_k", "min_p"), ("top_p",), ("top_k",), ("min_p",), (), ()])
    return TokenDraw(
        temperature=rng.choice([0.0, 1e-9, 0.3, 0.7, 1.0, 1.0, 2.0]),
        top_p=rng.choice([1.0, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999]) if "top_p" in only else 1.0,
        top_k=rng.choice([0, 1, 2, 5, 50, 256, 257, vocab - 1, vocab, 5000]) if "top_k" in only else 0,
        min_p=rng.choice([0.0, 1e-3, 0.1, 0.5, 1.0]) if "min_p" in only else 0.0,
        seed=rng.choice([0, 2**64 - 1, rng.randrange(2**64)]),
        index=rng.randrange(3),
        logprobs=rng.choice([None, None, 0, 1, 5, 20, vocab]),
        edits=_random_edits(rng, vocab) if rng.random() < 0.4 else None,
        mask=_random_mask(rng, vocab) if rng.random() < 0.3 else None,
    )


def _some(rng: random.Random, vocab: int) -> list[int]:
    return sorted(rng.sample(range(vocab), rng.choice([1, min(3, vocab), vocab // 2 + 1, vocab])))


def _random_edits(rng: random.Random, vocab: int) -> LogitsEdits:
    def ids() -> np.ndarray:
        return np.array(_some(rng, vocab), np.int64)

    def valued() -> tuple[np.ndarray, np.ndarray]:
        chosen = ids()
        return chosen, np.array([rng.uniform(-3, 3) for _ in chosen], np.float32)

    return LogitsEdits(
        allowed=ids() if rng.random() < 0.3 else None,
        forbidden=ids() if rng.random() < 0.3 else None,
        bias=valued() if rng.random() < 0.5 else None,
        repeated=ids() if rng.random() < 0.5 else None,
        repetition=rng.choice([0.7, 1.1, 1.3, 3.0]),
        lowered=valued() if rng.random() < 0.5 else None,
    )


def _random_mask(rng: random.Random, vocab: int) -> ComputedMask:
    if rng.random() < 0.1:
        return ComputedMask(None, failure=rng.choice(["", "the grammar is too large"]))
    allowed = np.zeros(vocab, np.bool_)
    if rng.random() < 0.8:
        allowed[_some(rng, vocab)] = True
    ends = rng.choice([(), (rng.randrange(vocab),), (vocab - 1, 0, vocab + 7), (vocab + 7,)])
    return ComputedMask(allowed, rng.random() < 0.5, ends=ends)


def assert_same_draws(
    other: Sampler, logits: torch.Tensor, draws: Sequence[TokenDraw], positions: Sequence[int]
) -> None:
    """Draw with the oracle and with another sampler, on whatever device its logits are."""
    host = logits.cpu()
    expected = HostSampler().sample(host, draws, positions)
    got = other.sample(logits, draws, positions, None)
    for row, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if not theirs.finite:  # the token means nothing
            assert ours == Sampled(ours.token, finite=False, failure=theirs.failure), (row, draws[row])
            assert 0 <= ours.token < logits.shape[-1]
            continue
        assert ours.finite, (row, draws[row], ours.failure)
        assert ours.token == theirs.token, (row, draws[row])
        assert_same_logprobs((ours.token, ours.logprob, ours.top), (theirs.token, theirs.logprob, theirs.top))


def assert_same_scores(other: Sampler, logits: torch.Tensor, targets: Sequence[int], top: int) -> None:
    expected: list[PromptTokenLogprob] = HostSampler().score(logits.cpu(), targets, top)
    for ours, theirs in zip(other.score(logits, targets, top), expected, strict=True):
        assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
        assert_same_logprobs((ours.token, ours.logprob, ours.top), (theirs.token, theirs.logprob, theirs.top))


Logprobs = tuple[int, float | None, Sequence[tuple[int, float]]]


def assert_same_logprobs(ours: Logprobs, theirs: Logprobs) -> None:
    """The same tokens in the same order. A device may add up in another order, so a value may differ by rounding."""
    assert (ours[1] is None) == (theirs[1] is None)
    assert [token for token, _ in ours[2]] == [token for token, _ in theirs[2]]
    pairs = [(ours[1] or 0.0, theirs[1] or 0.0), *((a, b) for (_, a), (_, b) in zip(ours[2], theirs[2], strict=True))]
    for one, other in pairs:
        assert one == other or math.isclose(one, other, rel_tol=1e-6, abs_tol=2e-5), (one, other)
