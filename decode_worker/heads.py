"""Guesses of heads: small layers that go on from the hidden state which the model's last step has left of a sequence.

The runner keeps the states of its last step only. So there is nothing to keep of a sequence here, and one that was not
in that step has no guess. Heads that attend to earlier states keep these themselves, and are told of each step. Pure,
but for what runs the heads.
"""

# pyright: strict

from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import takewhile

from msgspec.structs import replace

from baton.messages import AttemptName
from decode_worker.drafter import FAR, LATELY, Draft
from decode_worker.sequence import Sequence
from engine.step.batch import DrawnRows, HiddenRow, Sampled, TokenDraw
from engine.step.outcome import ScheduledBatch

_MANY, _TRIES = 32, 5  # rows of the larger size that is measured at first, and how often


class HeadsDrafter:
    """The heads of a model, where the states of sequences are, and what heads take."""

    ask = None

    def __init__(
        self,
        run: Callable[[Items[HiddenRow], int], tuple[Items[Items[int]], float]],
        count: int,
        keep: Callable[[Items[DrawnRows]], None] | None = None,
    ) -> None:
        """`run`: guesses so many tokens for each row, with as many of the `count` heads, and returns the seconds, too.
        It is measured here. `keep`: is told of the rows of each step that count."""
        self._run, self._count, self._keep = run, count, keep
        row = HiddenRow(None, 0, 0, 1, TokenDraw(temperature=1))
        few, many = (min(run([row] * rows, count)[1] for _ in range(_TRIES)) / count for rows in (1, _MANY))
        self._row = max(0.0, (many - few) / (_MANY - 1))  # seconds of a head for each sequence, and besides
        self._fixed = max(0.0, few - self._row)
        self._last: tuple[ScheduledBatch, Items[Items[Sampled]]] = ({}, ())
        self._rows: dict[AttemptName, DrawnRows] | None = None
        self._lately = 1.0  # times what the cost says
        self._seen = 0  # runs: the first ones count for more, since a loop of runs alone is quicker than one in steps

    def drew(self, plan: ScheduledBatch, drawn: Items[Items[Sampled]]) -> None:
        self._last, self._rows = (plan, drawn), None  # most steps are not guessed for where guesses don't pay
        if self._keep is not None:
            self._keep([*self._drawn_rows.values()])

    def most(self, sequence: Sequence) -> int:
        return self._count if sequence.name in self._drawn_rows else 0

    @property
    def _drawn_rows(self) -> dict[AttemptName, DrawnRows]:
        """The rows of the last step that count, by sequence."""
        if self._rows is None:
            row, self._rows = 0, {}
            plan, drawn = self._last
            for (name, chunk), each in zip(plan.items(), drawn, strict=True):
                if each:
                    self._rows[name] = DrawnRows(name, row, [one.token for one in each], chunk.known)
                row += 0 if chunk.sample is None else 1 + len(chunk.verify)
        return self._rows

    def seconds(self, steps: int, sequences: int, context: int) -> float:
        return steps * self._lately * (self._fixed + self._row * sequences)

    def catching_up(self, sequence: Sequence) -> float:
        return 0.0

    def guess(self, drafts: Items[Draft], within: float | None) -> float:
        rows = list[HiddenRow]()
        for draft in drafts:
            last = self._drawn_rows[draft.sequence.name]
            at, tokens = last.row + len(last.tokens) - 1, draft.sequence.tokens
            draw = replace(draft.draw, mask=None, logprobs=None)
            rows.append(HiddenRow(last.name, at, tokens[-1], len(tokens), draw))
        steps = max(draft.count for draft in drafts)
        guesses, seconds = self._run(rows, steps)
        for draft, guess in zip(drafts, guesses, strict=True):
            stops = draft.sequence.stop_token_ids
            draft.guess += takewhile(lambda token, stops=stops: token not in stops, guess[: draft.count])
        if expected := self.seconds(steps, len(drafts), 0) / self._lately:
            self._seen += 1
            newest = max(LATELY, 1 / self._seen)
            self._lately += newest * (min(seconds / expected, FAR * self._lately) - self._lately)
        return seconds
