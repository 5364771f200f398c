"""The numbers at which filters cut, the same on every device.

A device adds in another order than a CPU, so sums of probabilities differ in their last bits. Temperatures, masses and
limits are therefore made here, once, and a sum counts as equal to `top_p` when it is within rounding.
"""

# pyright: strict

import math

from engine.step.batch import TokenDraw

PREFIX = 256
"""Filters look at so many of the likeliest tokens first. Sorting a whole vocabulary costs more than a small model's
step."""
COLDEST = 1e-6
"""Temperatures below this one count as this one, which keeps a scaled logit finite."""
_ROUNDING = 2.0**-22
"""The share of `top_p` within which a cumulated probability reaches it. Two devices' sums agree better than that.
Without it, rounding would decide where equal logits add up to `top_p` exactly."""
NO_MASK = "the mask was not computed"
LEFT_NO_TOKEN = "the grammar and the request's other rules leave no token"  # noqa: S105


def temperature(draw: TokenDraw) -> float:
    """Return what the logits are divided by."""
    return max(draw.temperature, COLDEST)


def top_p_mass(draw: TokenDraw) -> float:
    """Return the cumulated probability at which top-p cuts; infinity where it cuts nothing."""
    return draw.top_p * (1 - _ROUNDING) if draw.top_p < 1 else math.inf


def min_p_logit(draw: TokenDraw) -> float:
    """Return the scaled logit, relative to the likeliest token's 0, below which min-p cuts."""
    return math.log(draw.min_p) if draw.min_p > 0 else -math.inf


def filters(draw: TokenDraw, vocab_size: int) -> bool:
    """Whether anything is filtered from so many tokens."""
    return 0 < draw.top_k < vocab_size or draw.top_p < 1 or draw.min_p > 0
