"""Compute the figures that judge a load from the outcomes of its requests. Pure.

TTFT   sent → first token received
ITL    between two messages with tokens; a message has several where the stream's reader is slower than the model
TPOT   (end − first token) / (tokens − 1); none for a single token
E2E    sent → end
Goodput: finished requests a second that meet every objective given.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request. Instants are seconds after the start of the run."""

    due: float  # when the plan would have it sent
    sent: float
    ended: float
    tokens: tuple[float, ...] = ()  # when each token arrived
    failed: str = ""  # the error's reason; empty: it finished
    prompt_tokens: int = 0
    cached_tokens: int = 0
    split: bool = False  # a prefill worker computed of its prompt
    attempts: int = 1

    @property
    def ttft(self) -> float | None:
        return self.tokens[0] - self.sent if self.tokens else None

    @property
    def tpot(self) -> float | None:
        return (self.ended - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.tokens) if later > earlier]

    @property
    def e2e(self) -> float:
        return self.ended - self.sent


@dataclass(frozen=True)
class Objectives:
    """Latencies, in seconds, that a request should stay within; none: no such objective."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, outcome: Outcome) -> bool:
        """A request that failed, or that made no token, met nothing."""
        if outcome.failed or outcome.ttft is None:
            return False
        slow_start = self.ttft is not None and outcome.ttft > self.ttft
        slow_tokens = self.tpot is not None and outcome.tpot is not None and outcome.tpot > self.tpot
        return not (slow_start or slow_tokens)


@dataclass(frozen=True)
class Figure:
    """One number about a run."""

    name: str
    value: float
    unit: str

    def __str__(self) -> str:
        """Return the value as a person reads it."""
        match self.unit:
            case "share":
                return f"{self.value:.1%}"
            case "count":
                return f"{self.value:,.0f}"
            case unit:
                return f"{self.value:,.4g} {unit}"


def percentile(values: Sequence[float], quantile: float) -> float:
    """Linear between the two nearest of at least one value."""
    return float(np.percentile(values, quantile))


def figures(outcomes: Sequence[Outcome], objectives: Objectives) -> list[Figure]:
    """Every figure of one run that has anything to be computed from. Latencies are those of finished requests."""
    finished = [one for one in outcomes if not one.failed]
    return [*_latencies(finished), *_rates(outcomes, finished, objectives), *_shares(outcomes, finished)]


def errors(outcomes: Sequence[Outcome]) -> Counter[str]:
    return Counter(one.failed for one in outcomes if one.failed)


def _latencies(finished: Sequence[Outcome]) -> Iterator[Figure]:
    samples = {
        "ttft": [one.ttft for one in finished if one.ttft is not None],
        "itl": [gap for one in finished for gap in one.gaps],
        "tpot": [one.tpot for one in finished if one.tpot is not None],
        "e2e": [one.e2e for one in finished],
    }
    for name, values in samples.items():
        for quantile in QUANTILES if values else ():
            yield Figure(f"{name} p{quantile}", percentile(values, quantile) * 1_000, "ms")


def _rates(outcomes: Sequence[Outcome], finished: Sequence[Outcome], objectives: Objectives) -> Iterator[Figure]:
    if not outcomes:
        return
    span = max(one.ended for one in outcomes) - min(one.sent for one in outcomes)
    if span <= 0:
        return
    yield Figure("requests", len(finished) / span, "requests/s")
    yield Figure("output tokens", sum(len(one.tokens) for one in finished) / span, "tokens/s")
    yield Figure("prompt tokens", sum(one.prompt_tokens for one in finished) / span, "tokens/s")
    if objectives != Objectives():
        yield Figure("goodput", sum(map(objectives.met, outcomes)) / span, "requests/s")


def _shares(outcomes: Sequence[Outcome], finished: Sequence[Outcome]) -> Iterator[Figure]:
    if prompt := sum(one.prompt_tokens for one in finished):
        yield Figure("cached prompt tokens", sum(one.cached_tokens for one in finished) / prompt, "share")
    if finished:
        yield Figure("prefilled apart", sum(one.split for one in finished) / len(finished), "share")
        yield Figure("attempts beyond the first", sum(one.attempts - 1 for one in finished), "count")
    if outcomes:
        yield Figure("sent late p99", percentile([one.sent - one.due for one in outcomes], 99) * 1_000, "ms")
    yield Figure("errors", sum(errors(outcomes).values()), "count")
