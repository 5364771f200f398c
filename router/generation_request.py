"""A client's request to generate: what every door makes of it, and what the router's state gets.

A struct of the front end, the event of the state, and the record that a request keeps while it lives: all three are
this one. `router.frontend.generation` checks fields. The bounds of numbers and lists are one table for all doors,
and for what a checkpoint recommends.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from baton.errors import InvalidRequest
from baton.messages import TOKEN_BYTES, KvCompression, SamplingParams
from baton.operator_api import CascadeChoice

MAX_SEED = 2**63 - 1
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


class TextOptions(Struct, frozen=True):
    """How an output becomes text."""

    min_tokens: int = 0  # no stop string counts in the text of the tokens before
    include_stop: bool = False  # the stop string that ends the output stays at its end
    special_tokens: bool = False  # they are in the text
    shown: frozenset[int] = frozenset()  # special tokens that are in the text in any case, ...
    marked: bool = False  # ... with a mark before each


DEFAULT_TEXT = TextOptions()


class GenerationRequest(Struct, frozen=True):
    """A request, checked as far as that needs no knowledge of the cluster.

    `name` is the client's, or one that we made. The state gets it with a number behind it, so that it is unique for
    ever, among all routers of the same workers. Its attempts are numbered from 1, and a name used again would mean two
    things to a worker that missed the end of the first. `sampling` has its seed already."""

    name: str
    tokens: bytes  # of the prompt, packed
    sampling: SamplingParams
    received: float = 0.0  # when the front end got it, seconds
    max_tokens: int | None = None  # none: as many as fit
    stop_token_ids: tuple[int, ...] = ()  # the model's own end-of-sequence tokens among them, unless ignored
    tenant: str = ""  # from the authenticated identity
    salt: str = ""  # the request's own: requests with another one share no page with it
    adapter: str = ""  # name of its LoRA adapter; "": the plain model. Requests with another share no page with it
    kv_compression: KvCompression | None = None
    priority: int = 0  # lower is more urgent
    deadline: float | None = None  # seconds on the same clock
    ttft: float | None = None  # objective, seconds; none: that of its priority's class
    tpot: float | None = None  # the same
    affinity: str = ""  # requests of one key go to one decode worker while it lives
    cached_on: str = ""  # incarnation of a decode worker that has just computed all of the tokens, or all but the last
    session: str = ""  # the conversation that it is a turn of; for Explain alone
    cascade: CascadeChoice | None = None  # that led to it; for Explain alone
    template: str = ""  # digest of the chat template and its variables; "": it is no chat
    # The rest is the front end's.
    stops: tuple[str, ...] = ()  # strings that end the output
    text: TextOptions = DEFAULT_TEXT
    n: int = 1  # outputs for the client, ...
    best_of: int = 1  # ... the best of so many, which are also the beams of a search
    length_penalty: float | None = None  # of a beam search; none: tokens are drawn

    @property
    def prompt(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def sample(self, number: int) -> GenerationRequest:
        """Return the request for one of several samples."""
        seed = (self.sampling.seed + number) & MAX_SEED
        scores = self.sampling.prompt_logprobs if number == 0 else None
        return replace(self, sampling=replace(self.sampling, seed=seed, prompt_logprobs=scores))
