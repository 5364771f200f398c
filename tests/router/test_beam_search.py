"""Beam search against transformers: the same outputs, in the same order, with the same scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from router.frontend.beam_search import BeamSearch

PROMPT = [5, 77, 400, 12, 9, 31]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32).eval()


def report(model: Any, tokens: list[int], count: int) -> list[tuple[int, float]]:
    with torch.inference_mode():
        best = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(count)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@pytest.mark.technique("Beam search")
@pytest.mark.slow
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize(("width", "ends"), [(1, 1), (2, 1), (4, 1), (3, 12), (4, 60)])
def test_outputs_are_those_of_transformers(model: Any, width: int, ends: int, penalty: float) -> None:
    """With many tokens that end an output, outputs end at different lengths."""
    eos = list(range(100, 100 + ends)) if ends > 1 else [2]
    with torch.inference_mode():
        theirs = model.generate(
            torch.tensor([PROMPT]), num_beams=width, num_return_sequences=width, max_new_tokens=12,
            length_penalty=penalty, do_sample=False, eos_token_id=eos, pad_token_id=999, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
    search = BeamSearch(width, 12, eos, penalty)
    while search.running:
        search.extend([report(model, PROMPT + list(beam.tokens), search.alternatives) for beam in search.running])
    ours = search.outputs
    assert len(ours) == width
    for output, sequence, score in zip(
        ours, theirs.sequences.tolist(), getattr(theirs, "sequences_scores", [None]), strict=False
    ):
        generated = sequence[len(PROMPT) :]
        assert list(output.beam.tokens) == generated[: len(output.beam.tokens)]
        assert set(generated[len(output.beam.tokens) :]) <= {999}, "the rest is padding"
        assert (output.reason == "stop") == (output.beam.tokens[-1] in eos)
        if score is not None:
            assert output.score == pytest.approx(float(score), abs=1e-4)


def test_a_beam_that_cannot_win_any_more_ends_the_search() -> None:
    search = BeamSearch(1, 100, [9], 1.0)
    search.extend([[(9, -0.1), (3, -5.0)]])
    assert search.running == []
    assert [output.beam.tokens for output in search.outputs] == [(9,)]
