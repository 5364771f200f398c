"""Which tokens end an output: all that a checkpoint's files name."""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from baton.errors import ModelError

_FIELD = "eos_token_id"


def end_tokens(
    named: str | None,
    token_of: Callable[[str], int | None],
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    vocab_size: int,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids of the tokens that end an output, the tokenizer's own first, and what of them is odd.

    A chat model's config.json often has the base model's token, and only its tokenizer, with the text `named`, the one
    that ends a turn. So the files add up. What the model can't write ends nothing, as with transformers.
    Raises ModelError for a value that is no token id.
    """
    ids: list[int] = []
    notes: list[str] = []
    if named is not None:
        if (own := token_of(named)) is not None:
            ids.append(own)
        else:
            notes.append(f"eos_token {named!r} of the tokenizer's settings is no token of it; it ends no output")
    ids += _ids(generation, "generation_config.json") + _ids(config, "config.json")
    for one in dict.fromkeys(ids):
        if one >= vocab_size:
            notes.append(f"end-of-sequence token {one} is beyond the vocabulary of {vocab_size}; it ends no output")
    known = tuple(one for one in dict.fromkeys(ids) if one < vocab_size)
    if not known:
        notes.append("the checkpoint names no end-of-sequence token; its outputs end at max_tokens or a stop string")
    return known, tuple(notes)


def _ids(settings: Mapping[str, Any], file: str) -> list[int]:
    value: Any = settings.get(_FIELD)
    ids = cast("list[Any]", value if isinstance(value, list) else [] if value is None else [value])
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise ModelError(f"{_FIELD} is {value!r} in {file}; it must be a token id or a list of them")
    return ids
