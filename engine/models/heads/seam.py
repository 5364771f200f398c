"""What heads have in common: they guess a model's next tokens from the hidden states that it leaves behind.

Guessing goes head by head: `first` makes a state from the row that a token was drawn from, `advance` goes on with a
token, and `logits` says what may follow it. What is drawn from the logits is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from baton.errors import UnsupportedModel
from engine.step.batch import DrawnRows, HiddenRow

MOST = 16  # heads


class HeadsSpec(Protocol):
    """The sizes that have to fit the model, and how many tokens are guessed at most."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def count(self) -> int: ...


class Heads(Protocol):
    """Heads of one form. A state is its own matter."""

    @property
    def spec(self) -> HeadsSpec: ...

    @property
    def remembers(self) -> bool:
        """Whether `keep` is to be called after each step."""
        ...

    def keep(self, hidden: torch.Tensor, drawn: Sequence[DrawnRows]) -> None:
        """Keep hidden states of the last step. A sequence without rows there is forgotten."""
        ...

    def first(self, hidden: torch.Tensor, rows: Sequence[HiddenRow]) -> Any:
        """The state that the first head takes. `hidden`, [rows, hidden], are the normed states of `rows`."""
        ...

    def advance(self, head: int, state: Any, tokens: torch.Tensor) -> Any:
        """The state of a head, from that of the one before and the tokens [rows] before its own."""
        ...

    def logits(self, head: int, state: Any) -> torch.Tensor:
        """[rows, vocab]"""
        ...


class Embeddings(Protocol):
    """A model's own input and output embeddings, which some heads use."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens] → [tokens, hidden]"""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [rows, hidden] → [rows, vocab]"""
        ...


def read_size(path: Path, raw: Mapping[str, Any], name: str, most: float = math.inf) -> int:
    """Return the field `name` of the config of `path`. Raises UnsupportedModel unless it is from 1 to `most`."""
    value = raw.get(name)
    if not isinstance(value, int) or not 0 < value <= most:
        bound = f" and at most {most}" if most < math.inf else ""
        raise UnsupportedModel(f"{path}/config.json: {name} is {value!r}; it must be an integer above 0{bound}")
    return value
