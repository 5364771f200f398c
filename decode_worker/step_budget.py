"""How much may be put between two tokens of the running sequences: prompt tokens in their step, page copies before it.

Both are bounds in time, turned into counts by the recent times of steps and copies. Where nothing decodes there is no
sequence to delay, and only the configured counts hold.

Pure: the times are given.
"""

# pyright: strict

from msgspec import Struct

from baton.config import DecodeConfig
from baton.messages import StepSample
from engine.step.limit import StepLimit
from engine.step.timing import WorkerStepTimes

_MIXED = 8.0
"""Times a step that only decodes: what one with prompts in it may take, unless `decode.itl_ms` says. With 3, on
two cores, chunks had some 50 tokens, each of which took twice as long as one in a chunk of 512: all were slower."""
_MIXED_SHORT = 1.3
"""The same where all partial prefills are short (`decode_worker.batching`). They come in parts then, each of which
reads the weights together with the decoding sequences."""
_LEAST_SHORT = 4  # tokens of such a part, since fewer take hardly less: they read what comes before them together
_UNKNOWN_SHARE = (_MIXED_SHORT - 1) / _LEAST_SHORT  # of a step: what a token of a short one costs, until that is known
_FREE = 1e-4  # of a step: a token that makes it longer by less costs nothing
_BESIDES = 0.2  # of a step: where copies or the store took longer between two of them, no short one follows
_UNKNOWN = 8  # part of max_num_batched_tokens that prompts get while it is not known what they cost
STEP_WEIGHT = 0.2
"""Of the newest step, in an average."""
_FAR = 4.0  # times the average: so much counts of a copy that took longer, since the process may have stood still


class DecodeRows(Struct, frozen=True):
    """Sequences that wait for their next token, and how many tokens they have together."""

    count: int
    context: int


class StepBudget:
    """What steps and copies take, and what follows from it."""

    def __init__(self, config: DecodeConfig, costs: WorkerStepTimes, limit: StepLimit | None = None) -> None:
        """`limit`: of a step's tokens; by default as configured."""
        self._config = config
        self._limit = limit or StepLimit(config.max_num_batched_tokens, 1)
        self._costs = costs
        self._copy_seconds = 0.0  # for a page; 0: not measured yet
        self._short_shares: dict[int, float] = {}
        """By how much comes before it (`_magnitude`): by how much of itself a token of a short partial prefill makes a
        step longer. Fits to all steps tell little about so few tokens, of which the first few cost the most."""
        self._lately = 1.0  # times what the fit, which lags behind, expects: steps without prompts

    def observe_copies(self, pages: int, seconds: float) -> None:
        """So many pages were copied, and the store was told, in that time."""
        if pages <= 0 or seconds <= 0:
            return
        each, old = seconds / pages, self._copy_seconds
        self._copy_seconds = old + STEP_WEIGHT * (min(each, _FAR * old) - old) if old else each

    def observe_step(self, step: StepSample, *, weight: float = STEP_WEIGHT) -> None:
        """A step whose partial prefills were short, if it had any. `weight`: its share of the average
        over steps without prompts."""
        plain = self._costs.seconds(rows=step.rows, context=step.context)
        if not step.rows or not plain:
            return
        took = step.seconds / plain
        if not step.tokens:
            self._lately += weight * (min(took, _FAR * self._lately) - self._lately)
            return
        longer = min(max(took / self._lately - 1, 0.0), 1.0)  # more has another cause
        share, magnitude = longer / step.tokens, _magnitude(step.pairs // step.tokens)
        old = self._short_shares.get(magnitude, _UNKNOWN_SHARE)
        self._short_shares[magnitude] = old + STEP_WEIGHT * (share - old)

    def prompt_tokens(self, rows: DecodeRows, context: int, alignment: int) -> int:
        """How many tokens of partial prefills, that attend to `context` positions before them, a step with these rows
        may have. At least two units of `alignment`, so that both short and long ones get on."""
        room = self._limit.tokens - rows.count
        if rows.count:
            within = self._costs.tokens_within(self.longest_step(rows) - self._seconds(rows), context, rows.count)
            room = min(room, self._limit.tokens // _UNKNOWN if within is None else within)
        return max(room, 2 * alignment)

    def short_prompt_tokens(self, rows: DecodeRows, context: int, alignment: int) -> int:
        """The same where all partial prefills are short."""
        most = self.prompt_tokens(rows, context, alignment)
        if not rows.count:
            return most
        share = self._short_shares.get(_magnitude(context), _UNKNOWN_SHARE)
        return min(most, max(int((_MIXED_SHORT - 1) / max(share, _FREE)), _LEAST_SHORT))

    def delays_too_long(self, rows: DecodeRows, seconds: float) -> bool:
        """Whether so many seconds between two steps delay decoding sequences long enough already."""
        return rows.count > 0 and seconds > _BESIDES * self._seconds(rows) > 0

    def copies(self, rows: DecodeRows) -> int:
        """How many pages may be copied before a step of these rows; at least one."""
        most = self._config.copies_per_step
        if not rows.count or not self._copy_seconds:
            return most
        return max(1, min(most, int(self._config.copy_share * self._seconds(rows) / self._copy_seconds)))

    def longest_step(self, rows: DecodeRows) -> float:
        """Seconds that a step with prompts in it may take; 0 while nothing is known."""
        return self._config.itl_ms / 1_000 or _MIXED * self._seconds(rows)

    def patience(self, rows: DecodeRows) -> float:
        """Seconds that a step may be put off for the store's word on pages that were copied: less than they would wait
        for the end of that step."""
        return self._config.copy_share * self._seconds(rows) / 2

    def _seconds(self, rows: DecodeRows) -> float:
        """Of a step without prompts."""
        return self._costs.seconds(rows=rows.count, context=rows.context)


def _magnitude(context: int) -> int:
    """0 below 512 tokens, and one more whenever they double."""
    return (context // 512).bit_length()
