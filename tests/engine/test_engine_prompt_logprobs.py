"""Log-probabilities of prompt tokens against transformers, whatever the chunks and whatever runs beside them."""

from collections.abc import Callable

import pytest
import torch

from engine.engine import Engine
from engine.step.batch import Chunk, PromptScoring, TokenDraw
from tests.engine.driver import GREEDY, prompt_of
from tests.support.checkpoints import RECIPES, Reference

Engines = Callable[..., Engine]
References = Callable[[str], Reference]


def scoring(prompt: list[int], start: int, end: int, first: int = 0, top: int = 3) -> PromptScoring:
    return PromptScoring(first, prompt[start + first + 1 : end + 1], top)


@pytest.mark.parametrize("name", RECIPES)
def test_scores_are_those_of_transformers(name: str, engine: Engines, reference: References):
    ours, prompt = engine(name), prompt_of(90, seed=3)
    expected = reference(name).logits(prompt).log_softmax(-1)
    scores = []
    for start, end in ((0, 30), (30, 31), (31, 90)):
        draw = GREEDY if end == 90 else None
        # A sequence that decodes, and a chunk that scores nothing, stand before and behind it.
        other = Chunk(prompt_of(9, seed=start), 0, [20], TokenDraw(temperature=0, logprobs=1))
        chunk = Chunk(prompt[start:end], start, range(6), draw, scoring(prompt, start, end))
        output = ours.run([other, chunk, Chunk(prompt_of(3), 0, [21])])
        (alone,) = ours.step([other])
        assert output.sampled[0].token == alone.token
        assert (output.sampled[1] is not None) == (draw is not None)
        assert output.scores.keys() == {1}
        scores += output.scores[1]
    assert [one.token for one in scores] == prompt[1:]
    for row, one in enumerate(scores):
        values = expected[row]
        assert one.logprob == pytest.approx(float(values[one.token]), abs=3e-3)
        ours_at = values[one.token]
        assert int((values > ours_at + 3e-3).sum()) < one.rank <= int((values > ours_at - 1e-3).sum())
        best = values.topk(3)
        torch.testing.assert_close(torch.tensor([value for _, value in one.top]), best.values, atol=3e-3, rtol=1e-5)


def test_scoring_may_begin_within_a_chunk(engine: Engines):
    ours, prompt = engine("llama"), prompt_of(40, seed=5)
    whole = ours.run([Chunk(prompt, 0, range(3), GREEDY, scoring(prompt, 0, 39))]).scores[0]
    later = ours.run([Chunk(prompt[16:], 16, range(3), GREEDY, PromptScoring(5, prompt[22:40], 3))]).scores[0]
    assert [one.token for one in later] == [one.token for one in whole[21:]]
    assert [one.logprob for one in later] == pytest.approx([one.logprob for one in whole[21:]], abs=1e-4)


def test_an_engine_without_a_head_scores_nothing(engine: Engines):
    prompt = prompt_of(20)
    output = engine("llama", head=False).run([Chunk(prompt, 0, range(2), None, scoring(prompt, 0, 19))])
    assert output.sampled == [None]
    assert not output.scores
