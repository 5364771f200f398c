"""Measure a simulated cluster as its clients see it, request by request, and compute figures.

TTFT    Time from arrival to the first token.
TPOT    Mean gap between tokens after the first.
TBT     Mean of the longest tenth of a request's gaps, as in Mooncake's evaluation (FAST'25).
goodput Finished requests that met both objectives, per second of the load.
"""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.messages import LOWEST_CLASS
from engine.step.batch import Sampled
from router.events import Cancelled, Failed, Finished, RequestEnded
from simulator.clock import Agenda
from simulator.worker import END, ScriptedOutput
from simulator.workloads import Arrival, scripted_answer

_PERCENTILES = (50, 90, 95, 99)
_COLUMNS = (
    "arrived",
    "ttft",
    "tpot",
    "tbt",
    "seconds",
    "prompt",
    "output",
    "cached",
    "attempts",
    "finished",
    "possible",
    "gap",
    "priority",
)


@dataclass(slots=True)
class _Live:
    arrival: Arrival
    received: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # seconds, number of such gaps


class Measures:
    """Plays the clients: counts tokens of open requests, and keeps only the figures of ended ones."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._live: dict[str, _Live] = {}
        self.outputs: dict[str, ScriptedOutput] = {}  # of open requests: the tokens that the model will generate
        self._columns = {name: array("d") for name in _COLUMNS}
        self._tenants: list[str] = []
        self.arrived = self.over = 0
        self.ends: Counter[str] = Counter()  # by outcome
        self.ended_twice: list[str] = []
        self.resends = 0  # number of times that a request was sent again because its router died
        self.last_end = 0.0
        self.watch: Callable[[str, str, float], object] | None = None  # called at each end with request, tenant, TTFT

    # --- events ------------------------------------------------------------------------------------------------------

    def begin(self, name: str, arrival: Arrival) -> None:
        self._live[name] = _Live(arrival, self._agenda.now)
        self.outputs[name] = ScriptedOutput(arrival.prompt + arrival.output, Sampled(1 + self.arrived % 60_000))
        self.arrived += 1

    def ask_again(self, name: str, again: str) -> Arrival:
        """Restart a request whose router died, under a new name. It loses its tokens, but keeps its arrival time."""
        live = self._live[again] = self._live.pop(name)
        live.first, live.tokens = None, 0
        live.gaps.clear()
        self.outputs[again] = self.outputs.pop(name)
        self.resends += 1
        return live.arrival

    def tokens(self, request: str, count: int, spacing: float) -> None:
        """Count tokens; see `simulator.router.Clients`."""
        live, now = self._live[request], self._agenda.now
        earliest = now - (count - 1) * spacing
        if live.first is None:
            live.first = earliest
        else:
            live.gaps.append((earliest - live.last, 1))
        if count > 1:
            live.gaps.append((spacing, count - 1))
        live.last = now
        live.tokens += count

    def check(self, request: str, tokens: Sequence[int]) -> None:
        """Raise AssertionError unless these are the next tokens of the request's output."""
        live, output = self._live[request], self.outputs[request]
        left = live.arrival.output - live.tokens
        right = [output.token.token] * min(len(tokens), left - 1) + [END.token] * (len(tokens) >= left)
        assert list(tokens) == right, f"{request} gets {tokens} after {live.tokens} tokens, {left} before its end"

    def check_end(self, end: RequestEnded) -> None:
        """Raise AssertionError if a finished request has not got its whole output."""
        if isinstance(end.outcome, Finished) and (live := self._live.get(end.request)) is not None:
            assert live.tokens == live.arrival.output, f"{end.request} ends after {live.tokens} tokens"

    def request_ended(self, end: RequestEnded) -> tuple[Arrival, bytes] | None:
        """Take the end of a request. Return it with its whole answer, empty unless it finished; None if it was over."""
        live = self._live.pop(end.request, None)
        if live is None:
            self.ended_twice.append(end.request)
            return None
        output = self.outputs.pop(end.request)
        self.over += 1
        self.last_end = self._agenda.now
        self.ends[_outcome(end)] += 1
        usage = end.summary.usage
        ttft = math.nan if live.first is None else live.first - live.received
        tpot = math.nan if live.first is None or live.tokens < 2 else (live.last - live.first) / (live.tokens - 1)
        figures = (
            live.received, ttft, tpot, longest_tenth(live.gaps), self._agenda.now - live.received, live.arrival.prompt,
            live.tokens, usage.cached, end.summary.served.attempts, isinstance(end.outcome, Finished),
            live.arrival.possible, live.arrival.gap, live.arrival.priority,
        )  # fmt: skip
        for name, figure in zip(_COLUMNS, figures, strict=True):
            self._columns[name].append(figure)
        self._tenants.append(live.arrival.tenant)
        if self.watch is not None:
            self.watch(end.request, live.arrival.tenant, ttft)
        whole = isinstance(end.outcome, Finished) and live.tokens > 0
        return live.arrival, scripted_answer(live.tokens, output.token.token, END.token) if whole else b""

    @property
    def waiting(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._live)

    # --- figures -----------------------------------------------------------------------------------------------------

    def table(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return a row for each ended request, in the order of the ends. Times are seconds, `finished` is 1 or 0."""
        return {name: np.frombuffer(column, dtype=np.float64).copy() for name, column in self._columns.items()}

    def report(self) -> dict[str, Any]:
        table = self.table()
        good, fills = table["finished"] > 0, table["priority"] >= LOWEST_CLASS
        timed = good & ~fills if bool((good & ~fills).any()) else good  # gaps are filled whenever there are some
        seconds = float(self.last_end - table["arrived"].min()) if len(good) else 0.0
        prompts = float(table["prompt"][good].sum())
        return {
            "requests": self.arrived,
            "ends": dict(sorted(self.ends.items())),
            "seconds": seconds,
            "hit_rate": float(table["cached"][good].sum()) / prompts if prompts else 0.0,
            "prompt_tokens": prompts,
            "output_tokens": float(table["output"].sum()),
            "attempts": float(table["attempts"].sum()),
            "in_gaps": float((table["output"] * (good & fills)).sum()),
            **{name: _spread(table[name][timed]) for name in ("ttft", "tpot", "tbt")},
            "refused_after": _spread(table["seconds"][~good]),
        }

    def goodput(self, ttft: float, tbt: float) -> float:
        """Return the share of all requests that finished with TTFT and TBT within these objectives, in seconds."""
        table = self.table()
        well = (table["finished"] > 0) & (table["ttft"] <= ttft) & ~(table["tbt"] > tbt)
        return float(well.sum()) / self.arrived if self.arrived else 0.0

    def by_tenant(self) -> Mapping[str, float]:
        """Return the prompt and output tokens of finished requests, by tenant."""
        total: dict[str, float] = defaultdict(float)
        columns = (self._columns[name] for name in ("prompt", "output", "finished"))
        for tenant, prompt, output, finished in zip(self._tenants, *columns, strict=True):
            total[tenant] += (prompt + output) * finished
        return dict(sorted(total.items()))


def _outcome(end: RequestEnded) -> str:
    match end.outcome:
        case Finished():
            return "finished"
        case Failed(error=error):
            return error.reason
        case Cancelled():
            return "cancelled"


def longest_tenth(gaps: list[tuple[float, int]]) -> float:
    """Return the mean of the longest tenth of the gaps, given as (seconds, number); NaN if there is none."""
    total = sum(count for _, count in gaps)
    tenth = left = max(1, total // 10)
    sum_ = 0.0
    for seconds, count in sorted(gaps, reverse=True):
        part = min(count, left)
        sum_ += seconds * part
        left -= part
        if not left:
            break
    return sum_ / tenth if total else math.nan


def _spread(values: npt.NDArray[np.float64]) -> dict[str, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    points = np.percentile(known, _PERCENTILES)
    return {"mean": float(known.mean()), **{f"p{p}": float(v) for p, v in zip(_PERCENTILES, points, strict=True)}}
