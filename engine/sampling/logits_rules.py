"""What a request wants of its logits before a draw: penalties, bias, and tokens that may not or must come.

The order is vLLM's: allowed tokens, bad words, bias and the minimum of tokens, then the penalties for repetition,
frequency and presence. Everything follows from the request and its tokens so far, so a fail-over continues with the
same tokens. No torch here: schedulers hold these objects, too.
"""

# pyright: strict

from collections.abc import Collection, Sequence

import numpy as np

from baton.messages import LogitsRules
from engine.step.batch import Floats, Ints, LogitsEdits


class LogitsEditor:
    """One sequence's rules, and what they need to know of its tokens."""

    def __init__(self, rules: LogitsRules, prompt: Sequence[int], stops: Collection[int]) -> None:
        """`stops` are the tokens that end the output; they may not come before `rules.min_tokens`."""
        self._rules = rules
        self._prompt = len(prompt)
        self._known = len(prompt)
        self._counts: dict[int, int] = {}  # of the output
        self._output: list[int] = []
        self._stops = sorted(stops)
        self._allowed = np.array(rules.allowed_token_ids, np.int64) if rules.allowed_token_ids else None
        self._bias = (
            np.array([token for token, _ in rules.logit_bias], np.int64),
            np.array([value for _, value in rules.logit_bias], np.float32),
        )
        self._of_prompt = np.unique(np.array(prompt, np.int64)) if rules.repetition_penalty != 1 else None
        self._words: dict[int, list[tuple[int, ...]]] = {}  # by last token: what must come before it
        for *beginning, last in rules.bad_words:
            self._words.setdefault(last, []).append(tuple(beginning))

    def edits(self, tokens: Sequence[int]) -> LogitsEdits:
        """Return the changes for the token after `tokens`, which are the prompt and all output so far."""
        for token in tokens[self._known :]:
            self._append(token)
        self._known = len(tokens)
        return self._edits()

    def edits_ahead(self, proposals: Sequence[int]) -> list[LogitsEdits]:
        """Return the changes after each of these tokens, if they come after those of the last call."""
        ahead: list[LogitsEdits] = []
        for token in proposals:
            self._append(token)
            ahead.append(self._edits())
        for _ in proposals:
            token = self._output.pop()
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
        return ahead

    def _append(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1
        self._output.append(token)

    def _edits(self) -> LogitsEdits:
        rules = self._rules
        return LogitsEdits(
            allowed=self._allowed,
            forbidden=self._forbidden(),
            bias=self._bias if rules.logit_bias else None,
            repeated=self._repeated(),
            repetition=rules.repetition_penalty,
            lowered=self._lowered(),
        )

    def _forbidden(self) -> Ints | None:
        early = len(self._output) < self._rules.min_tokens
        tokens = [*self._stops] if early else []
        for last, beginnings in self._words.items():
            if any(not before or tuple(self._output[-len(before) :]) == before for before in beginnings):
                tokens.append(last)
        return np.array(tokens, np.int64) if tokens else None

    def _repeated(self) -> Ints | None:
        if self._of_prompt is None:
            return None
        return np.union1d(self._of_prompt, np.fromiter(self._counts, np.int64, len(self._counts)))

    def _lowered(self) -> tuple[Ints, Floats] | None:
        frequency, presence = self._rules.frequency_penalty, self._rules.presence_penalty
        if not self._counts or not (frequency or presence):
            return None
        ids = np.fromiter(self._counts, np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        return ids, (counts * np.float32(frequency) + np.float32(presence)).astype(np.float32)
