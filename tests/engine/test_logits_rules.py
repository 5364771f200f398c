"""Penalties, bias, and tokens that may not or must come: as transformers' processors have them."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from baton.messages import LogitsRules
from engine.sampling.host_sampler import HostSampler, apply
from engine.sampling.logits_rules import LogitsEditor
from engine.step.batch import Sampled, TokenDraw
from tests.support.thorough import examples

VOCAB = 40
STOPS = (2, 3)
token = st.integers(0, VOCAB - 1)
tokens = st.lists(token, min_size=1, max_size=30)


def changed(rules: LogitsRules, logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    row = logits.clone()
    apply(LogitsEditor(rules, prompt, STOPS).edits(prompt + output), row)
    return row


def some_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def processed(processor: object, known: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return processor(torch.tensor([list(known)]), logits.clone()[None])[0]  # type: ignore[operator]


@examples(150)
@given(prompt=tokens, output=st.lists(token, max_size=20), seed=st.integers(0, 99), penalty=st.floats(0.1, 5))
def test_repetition_is_transformers(prompt: list[int], output: list[int], seed: int, penalty: float) -> None:
    logits = some_logits(seed)
    right = processed(RepetitionPenaltyLogitsProcessor(penalty), prompt + output, logits)
    torch.testing.assert_close(changed(LogitsRules(repetition_penalty=penalty), logits, prompt, output), right)


@examples(150)
@given(
    prompt=tokens,
    output=st.lists(token, max_size=20),
    seed=st.integers(0, 99),
    bias=st.dictionaries(token, st.floats(-100, 100), min_size=1, max_size=9),
)
def test_bias_is_transformers(prompt: list[int], output: list[int], seed: int, bias: dict[int, float]) -> None:
    logits = some_logits(seed)
    right = processed(SequenceBiasLogitsProcessor({(one,): value for one, value in bias.items()}), prompt, logits)
    ours = changed(LogitsRules(logit_bias=tuple(bias.items())), logits, prompt, output)
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-5)


@examples(150)
@given(
    output=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_bad_words_are_transformers(output: list[int], words: list[list[int]]) -> None:
    logits = some_logits(1)
    right = processed(NoBadWordsLogitsProcessor(words), output, logits)
    ours = changed(LogitsRules(bad_words=tuple(map(tuple, words))), logits, [VOCAB - 1], output)
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("count", [0, 4, 5, 6])
def test_min_tokens_are_transformers(count: int) -> None:
    logits, prompt = some_logits(1), [7, 8, 9]
    output = [5] * count
    right = processed(MinNewTokensLengthLogitsProcessor(len(prompt), 5, list(STOPS)), prompt + output, logits)
    torch.testing.assert_close(changed(LogitsRules(min_tokens=5), logits, prompt, output), right)


@examples(150)
@given(output=st.lists(token, max_size=30), frequency=st.floats(-2, 2), presence=st.floats(-2, 2))
def test_frequency_and_presence_count_the_output_alone(output: list[int], frequency: float, presence: float) -> None:
    """As OpenAI's API defines them: logit - count · frequency - (count > 0) · presence."""
    logits = some_logits(3)
    ours = changed(
        LogitsRules(frequency_penalty=frequency, presence_penalty=presence), logits, list(range(VOCAB)), output
    )
    counts = torch.tensor([output.count(one) for one in range(VOCAB)], dtype=torch.float32)
    torch.testing.assert_close(ours, logits - counts * frequency - (counts > 0) * presence, rtol=0, atol=1e-5)


def test_only_allowed_tokens_are_left_and_the_order_is_vllms() -> None:
    logits = some_logits(4)
    rules = LogitsRules(
        presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=2.0, logit_bias=((5, 3.0), (6, -1.0)),
        min_tokens=9, bad_words=((7,),), allowed_token_ids=(2, 5, 6, 7),
    )  # fmt: skip
    ours = changed(rules, logits, [6], [5, 5])
    biased = {5: float(logits[5]) + 3, 6: float(logits[6]) - 1}
    shrunk = {one: value / 2 if value > 0 else value * 2 for one, value in biased.items()}
    right = {5: shrunk[5] - 1 - 2 * 0.5, 6: shrunk[6]}
    assert {one for one in range(VOCAB) if ours[one] > -math.inf} == {5, 6}
    assert float(ours[5]) == pytest.approx(right[5], abs=1e-5)
    assert float(ours[6]) == pytest.approx(right[6], abs=1e-5)


@given(prompt=tokens, output=tokens, cut=st.integers(0, 30))
def test_a_fail_over_changes_nothing(prompt: list[int], output: list[int], cut: int) -> None:
    """One editor that has followed the output token by token, and one that begins in the middle of it."""
    rules = LogitsRules(repetition_penalty=1.5, frequency_penalty=0.3, bad_words=((1, 2), (3,)), min_tokens=4)
    logits = some_logits(5)
    one, other = LogitsEditor(rules, prompt, STOPS), LogitsEditor(rules, prompt, STOPS)
    for known in range(len(output) + 1):
        ours = logits.clone()
        apply(one.edits(prompt + output[:known]), ours)
        if known >= min(cut, len(output)):
            again = logits.clone()
            apply(other.edits(prompt + output[:known]), again)
            assert torch.equal(ours, again)


def test_rows_without_rules_stay_and_logprobs_are_the_models_own() -> None:
    logits = torch.stack([some_logits(6), some_logits(6)])
    best = int(logits[0].argmax())
    editor = LogitsEditor(LogitsRules(logit_bias=((best, -100.0),)), [1], ())
    draws = [TokenDraw(temperature=0, logprobs=1), TokenDraw(temperature=0, logprobs=1, edits=editor.edits([1]))]
    plain, ruled = HostSampler().sample(logits, draws, [1, 1], [best, best])
    second = int(logits[0].topk(2).indices[1])
    assert (plain.token, ruled.token) == (best, second)
    own = logits[0].log_softmax(dim=-1)
    assert ruled.logprob == pytest.approx(float(own[second]), abs=1e-6)
    assert ruled.top[0][0] == best


def test_rules_that_leave_no_token_are_told() -> None:
    logits = some_logits(7)[None]
    editor = LogitsEditor(LogitsRules(allowed_token_ids=(2,), min_tokens=5), [1], STOPS)
    for temperature in (0.0, 1.0):
        (drawn,) = HostSampler().sample(logits, [TokenDraw(temperature=temperature, edits=editor.edits([1]))], [1])
        assert drawn == Sampled(drawn.token, finite=False)


def test_a_bias_has_the_frequency_that_it_should() -> None:
    """Chi-square of 4,000 draws over five tokens, one of them biased; p above 0.001."""
    logits = torch.tensor([[0.0, 0.5, 1.0, -0.5, 0.2]])
    editor = LogitsEditor(LogitsRules(logit_bias=((3, 1.5),)), [0], ())
    right = (logits[0] + torch.tensor([0, 0, 0, 1.5, 0])).softmax(dim=-1)
    counts = torch.zeros(5)
    for seed in range(4_000):
        (drawn,) = HostSampler().sample(logits, [TokenDraw(seed=seed, edits=editor.edits([0]))], [1])
        counts[drawn.token] += 1
    chi = float((((counts - 4_000 * right) ** 2) / (4_000 * right)).sum())
    assert chi < 18.47
