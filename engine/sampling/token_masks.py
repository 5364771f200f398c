"""Masks of the tokens that may come next, as schedulers and the sampler see them.

A scheduler asks the sequence's `OutputGrammar` for the mask of its next token. The engine has it computed on threads
while the model runs (`mask_threads`), and the sampler applies it. No torch, no thread and no llguidance here.
"""

# pyright: strict

from collections.abc import Collection, Sequence
from typing import Protocol

from baton.messages import Grammar
from engine.step.batch import TokenMask


class OutputGrammar(Protocol):
    """The grammar of one sequence's output. Its state derives from the tokens alone."""

    @property
    def ready(self) -> bool:
        """Whether it is compiled. Until then its sequence takes part in no step."""
        ...

    def mask(self, tokens: Sequence[int]) -> TokenMask:
        """Return the mask of the token after `tokens`, which are the prompt and all output so far. The same tokens have
        the same mask."""
        ...


class OutputGrammars(Protocol):
    """Makes the grammars of a worker's sequences."""

    def follow(self, grammar: Grammar, ends: Collection[int], tokens: Sequence[int], prompt: int) -> OutputGrammar:
        """Return the grammar of a sequence that has these tokens, of which the first `prompt` are its prompt. `ends`
        are the tokens that end the output. Returns at once."""
        ...
