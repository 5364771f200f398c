"""Draws for guesses are those of the sampler, unless they fall on an unlikely token."""

import numpy as np
import pytest
import torch

from engine.sampling import counter_rng
from engine.sampling.host_sampler import HostSampler
from engine.sampling.likely_draws import draw_likely
from engine.step.batch import LogitsEdits, TokenDraw

ROWS, VOCAB = 200, 500
EDITS = LogitsEdits(forbidden=np.arange(0, VOCAB, 2))


@pytest.mark.parametrize(
    "draw",
    [
        TokenDraw(temperature=0.0),
        TokenDraw(temperature=1.0),
        TokenDraw(temperature=0.7, top_p=0.8),
        TokenDraw(temperature=1.3, top_k=5),
        TokenDraw(temperature=1.0, min_p=0.1, seed=2**63),
        TokenDraw(temperature=1.0, edits=EDITS),
        TokenDraw(temperature=0.0, edits=EDITS),
    ],
)
def test_most_draws_are_the_samplers(draw: TokenDraw) -> None:
    logits = 4 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    draws, positions = [draw] * ROWS, list(range(ROWS))
    expected = [each.token for each in HostSampler().sample(logits, draws, positions)]
    keys = counter_rng.keys([draw.seed] * ROWS, [draw.index] * ROWS, positions)
    drawn = draw_likely(logits, draws, keys)
    same = sum(one == other for one, other in zip(drawn, expected, strict=True))
    assert same == ROWS if draw.temperature == 0 or draw.top_k else same > 0.9 * ROWS


def test_rows_of_one_step_are_drawn_each_by_its_own_rules() -> None:
    logits = 4 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    draws = [TokenDraw(temperature=0.0), TokenDraw(temperature=1.0, top_k=1, seed=3)]
    assert draw_likely(logits, draws, counter_rng.keys([0, 3], [0, 0], [7, 8])) == logits.argmax(1).tolist()
