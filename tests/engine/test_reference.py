"""What other tests compare ours with: it says where rounding decides."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.cpu import build
from tests.engine.driver import prompt_of
from tests.soak import deaths
from tests.support import checkpoints


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_a_near_tie_of_experts_is_seen(name: str, tmp_path: Path):
    """In the last layer that has them, at one of the tokens."""
    reference = checkpoints.reference(checkpoints.make(name, tmp_path))
    tokens = prompt_of(20, 1)
    routers: list[Any] = [each for each in reference.model.modules() if type(each).__name__.endswith("Router")]
    assert routers
    assert 1e-5 < reference.expert_gap(tokens) < math.inf
    last, records = routers[-1], []
    last.register_forward_hook(
        lambda _, inputs, output: records.append((inputs[0].reshape(-1, last.hidden_dim), output[0]))
    )
    reference.expert_gap(tokens)
    states, logits = records[0]
    order = logits[7].argsort(descending=True)
    chosen, left = order[last.top_k - 1], order[last.top_k]
    with torch.no_grad():  # the expert that is left comes within 1e-4 of the one that is taken
        lack = logits[7, chosen] - logits[7, left] - 1e-4
        last.weight[left] += lack * states[7] / states[7].square().sum()
    assert reference.expert_gap(tokens) <= 1.5e-4


def test_a_model_without_experts_has_no_tie_of_them(tmp_path: Path):
    assert checkpoints.reference(checkpoints.make("llama", tmp_path)).expert_gap(prompt_of(20, 1)) == math.inf


def test_the_soak_leaves_out_prompts_in_which_experts_nearly_tie(monkeypatch: pytest.MonkeyPatch):
    """Such a one had other tokens than transformers over 1P+1D: with the other expert transformers has them, too."""

    def gap(tokens: Sequence[int]) -> float:
        return 1e-4 if len(tokens) % 2 else 1.0

    stub = SimpleNamespace(generate=lambda _, count: ([5] * count, [1.0] * count), expert_gap=gap)
    monkeypatch.setattr(checkpoints, "reference", lambda _: stub)
    monkeypatch.setattr(build, "can_compile", lambda: False)  # so that torch computes
    streams = deaths.expected_of(Path("nowhere"), 1, Path("nowhere"))
    assert streams
    assert all((len(stream.prompt) + deaths.OUTPUT) % 2 == 0 for stream in streams)
