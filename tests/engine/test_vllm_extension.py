"""What Baton adds to vLLM's worker, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from engine.step.batch import TokenDraw
from engine.vllm_runner.draw import FirstDraw
from engine.vllm_runner.extension import BatonExtension


def test_a_step_without_draws_ends_when_the_device_has_run_it() -> None:
    """vLLM's second model runner answers at once, with an output to wait for."""
    waited: list[bool] = []
    worker: Any = BatonExtension()
    worker.baton_draw = SimpleNamespace(draws={}, drawn={})
    worker.execute_model = lambda order: None
    worker.sample_tokens = lambda grammar: SimpleNamespace(get_output=lambda: waited.append(True))
    worker.baton_step(None, (), {}, {}, {})
    assert waited == [True]
    worker.sample_tokens = lambda grammar: SimpleNamespace()  # of the first
    worker.baton_step(None, (), {}, {}, {})
    assert waited == [True]


def test_what_vllm_measures_is_our_draw_of_all_rows() -> None:
    """Its profile runs its sampler over as many rows as a step may have, and names none of them."""
    runner = SimpleNamespace(sampler=None, device=torch.device("cpu"), input_batch=SimpleNamespace(req_ids=[]))
    draw = FirstDraw(runner)
    assert draw._tokens(torch.rand(5, 40), draw.names).shape == (5,)
    assert len(draw.drawn) == 5
    assert all(draw.draws[name][0].logprobs for name in draw.drawn)
    draw.measured, draw.draws, draw.drawn = False, {"b": (TokenDraw(temperature=0.0), 7)}, {}
    assert draw._tokens(torch.eye(3), ["a", "b", "c"]).tolist() == [0, 1, 0]
    assert list(draw.drawn) == ["b"]
