"""A step that vLLM's second model runner has launched: the device computes it, and its results are collected later.

vLLM's executor knows such outputs by their class. Of several ranks, each collects on a thread beside its steps.
"""

# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from baton.messages import PromptTokenLogprob
from engine.sampling.device_sampler import LaunchedDraws
from engine.step.batch import Sampled

StepOutput = tuple[
    Mapping[str, Sequence[Sampled]],
    Mapping[str, list[PromptTokenLogprob]],
    Sequence[str],
    Mapping[str, Sequence[int]],
    float,
]


class LaunchedStep(AsyncModelRunnerOutput):
    """Has the draws' logits until it is collected."""

    def __init__(
        self,
        output: Any,
        launched: tuple[Sequence[str], LaunchedDraws] | None,
        scores: Mapping[str, list[PromptTokenLogprob]],
    ) -> None:
        """`output`: vLLM's. `launched`: the requests that draw, and their draws."""
        self._output, self._launched, self._scores = output, launched, scores

    def get_output(self) -> StepOutput:
        """Wait for the device. Return what `BatonExtension.baton_step` does."""
        if hasattr(self._output, "get_output"):
            self._output.get_output()
        if self._launched is None:
            return {}, self._scores, (), {}, 0.0
        names, draws = self._launched
        drawn = {name: [one] for name, one in zip(names, draws.collect(), strict=True)}
        corrected = [names[row] for row in draws.corrected]
        self._launched = None  # the logits
        return drawn, self._scores, corrected, {}, 0.0
