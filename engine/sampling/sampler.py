"""From logits to tokens: the seam between an engine and the device that its logits are on."""

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.messages import PromptTokenLogprob
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.host_sampler import HostSampler
from engine.step.batch import Sampled, TokenDraw

SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are in memory at a time: 64 rows of a vocabulary of 128,000 take 33 MB."""


class Sampler(Protocol):
    """Draws tokens and scores prompt tokens. Every sampler gives the same tokens for the same logits.

    Log-probabilities are those of the model's own distribution, in float32. Their last bits may differ by device.
    """

    def sample(
        self, logits: torch.Tensor, draws: Sequence[TokenDraw], positions: Sequence[int], best: Sequence[int] | None
    ) -> list[Sampled]:
        """Draw one token from each row of `logits` [rows, vocab]. `positions` are those that the new tokens will have.

        `best` is the likeliest token of each row, of equal logits the lowest id, if that is known already. A row that
        is not finite gives some token of the vocabulary, which `Sampled.finite` tells apart, and touches no other row.
        """
        ...

    def score(self, logits: torch.Tensor, targets: Sequence[int], top: int) -> list[PromptTokenLogprob]:
        """Return the log-probability and rank of one token for each row of `logits` [rows, vocab], and the `top`
        likeliest tokens of that row, of equal logits the lowest id first."""
        ...


def sampler_for(device: torch.device) -> Sampler:
    """Return the sampler for logits on this device. On a CPU that is NumPy, one row after the other. Everywhere else
    torch draws all rows at once where they are."""
    return HostSampler() if device.type == "cpu" else DeviceSampler(device)
