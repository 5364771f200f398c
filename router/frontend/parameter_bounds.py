"""The bounds of a request's numbers and lists: one table for all doors, and for what a checkpoint recommends."""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from baton.errors import InvalidRequest
from router.generation_request import MAX_SEED

_UINT32 = 2**32 - 1
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 3e38),  # a float of 32 bits; 0 is greedy
    "top_p": (2**-149, 1),  # the least number of 32 bits above zero
    "top_k": (0, _UINT32),
    "min_p": (0, 1),
    "seed": (0, MAX_SEED),
    "max_tokens": (1, _UINT32),
    "min_tokens": (0, _UINT32),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "n": (1, 128),  # of one prompt
    "best_of": (1, 128),
    "length_penalty": (-10, 10),  # an exponent of the output's length
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-6, 1e6),  # beyond these a logit of float32 may become infinite
    "priority": (-(2**31), 2**31 - 1),
    "ttft_ms": (1, _UINT32),
    "tpot_ms": (1, _UINT32),
}
_MOST_ENTRIES = {
    "stop": 16,
    "stop_token_ids": 1_000,
    "logit_bias": 1_024,
    "bad_words": 1_000,
    "allowed_token_ids": 2**18,
    "shown_special_tokens": 64,
}


def check_bounds(fields: Mapping[str, Any]) -> None:
    """Check the numbers and the lengths of lists, by their names. Raises InvalidRequest with the value."""
    for name, value in fields.items():
        if (bounds := _NUMBERS.get(name)) is not None:
            least, most = bounds
            if not least <= value <= most:  # NaN compares false
                span = f"above 0 and at most {most}" if name == "top_p" else f"from {least} to {most}"
                raise InvalidRequest(f"{name} is {value}; it must be {span}")
        elif (most := _MOST_ENTRIES.get(name)) is not None:
            entries: Sized = value
            if len(entries) > most:
                raise InvalidRequest(f"{name} has {len(entries)} entries; at most {most} are allowed")
