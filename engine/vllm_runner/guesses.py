"""What vLLM's drafts propose: tokens drawn as the model would draw them, not the likeliest. For the child alone.

A guess is right wherever the draft finds nearly the logits of the model, at any temperature.
"""

# pyright: reportMissingImports=false

import time
from typing import Any

import torch
from msgspec.structs import replace

from engine.sampling import counter_rng
from engine.sampling.likely_draws import draw_likely
from engine.vllm_runner.draw import BatonDraw


class Guesses:
    """Stands in the place of the draws of vLLM's draft."""

    def __init__(self, drafter: Any, draw: BatonDraw) -> None:
        from vllm.v1.spec_decode.medusa import MedusaProposer

        self._drafter, self._draw = drafter, draw
        self._step: object = None
        self._ahead = 0  # tokens guessed in this step
        self._began = self._seconds = 0.0
        if isinstance(drafter, MedusaProposer):
            drafter.propose = self._of_heads
        else:
            drafter._greedy_sample = self._of_hidden

    @property
    def seconds(self) -> float:
        """What guessing took in the step that has run. A draft's K and V of its tokens are no part of it."""
        return self._seconds if self._step is self._draw.drawn else 0.0

    def _of_heads(self, num_speculative_tokens: int, target_hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """The proposals of Medusa's heads, [requests, heads]."""
        if not num_speculative_tokens:
            return torch.zeros(len(target_hidden_states), 0, dtype=torch.int64)
        self._begin()
        model = self._drafter.model
        heads = model(target_hidden_states)[:num_speculative_tokens]
        return torch.stack([self._guess(each) for each in model.compute_logits(heads)], dim=1)

    def _of_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next proposal for each request. vLLM calls it once for each token that it guesses."""
        self._begin()
        return self._guess(self._drafter.model.compute_logits(hidden))

    def _begin(self) -> None:
        if self._step is not self._draw.drawn:  # another step's
            self._step, self._ahead, self._began = self._draw.drawn, 0, time.perf_counter()

    def _guess(self, logits: torch.Tensor) -> torch.Tensor:
        draw = self._draw
        tokens = torch.zeros(len(logits), dtype=torch.int64)
        drawing = [(at, draw.rows[name], draw.drawn[name]) for at, name in enumerate(draw.names) if name in draw.drawn]
        if drawing:
            draws = [replace(one, mask=None, logprobs=None) for _, row, _ in drawing if (one := row.draw) is not None]
            first = [row.start + len(row.known) + len(drawn) + self._ahead for _, row, drawn in drawing]
            keys = counter_rng.keys([one.seed for one in draws], [one.index for one in draws], first)
            places = [at for at, _, _ in drawing]
            tokens[places] = torch.tensor(draw_likely(logits[places], draws, keys))
        self._ahead += 1
        self._seconds = time.perf_counter() - self._began
        return tokens
