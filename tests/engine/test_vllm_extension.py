"""What Baton adds to vLLM's worker, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

from engine.vllm_runner.extension import BatonExtension


def test_a_step_without_draws_ends_when_the_device_has_run_it() -> None:
    """vLLM's second model runner answers at once, with an output to wait for. Nobody else would wait."""
    waited: list[bool] = []
    worker = BatonExtension()
    worker.baton_draw = SimpleNamespace(draws={}, drawn={})
    worker.execute_model = lambda order: None
    worker.sample_tokens = lambda grammar: SimpleNamespace(get_output=lambda: waited.append(True))
    worker.baton_step(None, (), {}, {}, {})
    assert waited == [True]
    worker.sample_tokens = lambda grammar: SimpleNamespace()  # of the first
    worker.baton_step(None, (), {}, {}, {})
    assert waited == [True]
