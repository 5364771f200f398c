"""A timing model for the simulator from this machine's engine: runs the bare engine over a grid of steps, fits what a
step costs, and says how far the fit is off.

    python -m bench.engine.fit_model [--model 100m] [--dtype bfloat16] [--threads 1] [--repeats 5] [--quick] > FILE.yaml

    seconds = fixed + token · prompt tokens + pair · pairs + row · rows + context · tokens of the rows' contexts
            + mixed, where there are both prompt tokens and rows

Every step of the grid is run several times, and its median counts. The fit minimises relative errors, so that small
steps count as much as large ones; errors beyond three times the typical one count linearly (Huber: Robust Estimation
of a Location Parameter, Annals of Mathematical Statistics 35, 1964), and no coefficient is negative. Some steps with
prompts and rows together are left out of the fit: their error tells how far the formula goes.

The file is written to stdout and the errors to stderr. What no step shows (copies, messages, turns of a loop) is as
docs/lab/benchmarks.md has measured it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np
import numpy.typing as npt

from baton.step_cost_model import StepCoefficients, pairs
from bench import models, report
from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw

_PAGE_SIZE = 16
_POOL_TOKENS = 32_768
_PROMPTS = (16, 64, 128, 256, 512, 1_024)
_BEHIND = (0, 1_024, 4_096)
_ROWS = (1, 2, 4, 8, 16)
_CONTEXTS = (64, 512, 2_000)
_MIXED = (
    (64, 0, 4, 64),
    (64, 0, 8, 512),
    (128, 1_024, 4, 512),
    (256, 0, 8, 512),
    (512, 0, 16, 64),
    (512, 1_024, 8, 512),
)
_CHECKED = ((64, 0, 4, 512), (256, 0, 4, 64), (256, 1_024, 4, 2_000), (512, 1_024, 16, 512))
_HUBER = 3.0  # times the typical error: from here on an error counts linearly
_ROUNDS = 20  # of reweighting; the coefficients have settled long before
_GREEDY = TokenDraw(temperature=0)


@dataclass(frozen=True)
class Step:
    """One prompt chunk of `tokens` behind `behind` others, and `rows` sequences of `context` tokens each."""

    tokens: int = 0
    behind: int = 0
    rows: int = 0
    context: int = 0

    @property
    def amounts(self) -> tuple[int, int, int, int]:
        """Prompt tokens, pairs, rows, tokens of their contexts."""
        return self.tokens, pairs(self.tokens, self.behind), self.rows, self.rows * self.context

    @property
    def features(self) -> list[float]:
        """What each coefficient of `StepCoefficients` is multiplied with."""
        return [1.0, *self.amounts, float(self.tokens > 0 and self.rows > 0)]

    def chunks(self) -> Iterator[Chunk]:
        """On pages of their own, as far as they need any; what was computed before does not matter for the time."""
        page = 0
        sizes = [(self.behind, self.tokens, None)] if self.tokens else []
        for start, new, draw in [*sizes, *[(self.context - 1, 1, _GREEDY)] * self.rows]:
            needed = -(-(start + new) // _PAGE_SIZE)
            yield Chunk([1 + index % 97 for index in range(new)], start, range(page, page + needed), draw)
            page += needed


def grid(quick: bool = False) -> tuple[list[Step], list[Step]]:
    """Steps to fit, and steps to check the fit with."""
    prompts = [Step(tokens, behind) for tokens in _PROMPTS for behind in _BEHIND]
    rows = [Step(rows=rows, context=context) for rows in _ROWS for context in _CONTEXTS]
    fitted, checked = prompts + rows + [Step(*mixed) for mixed in _MIXED], [Step(*mixed) for mixed in _CHECKED]
    return (fitted[::3], checked[:1]) if quick else (fitted, checked)


def fit(steps: Sequence[Step], seconds: Sequence[float]) -> StepCoefficients:
    """The coefficients that explain `seconds`, all positive, of at least six different steps best."""
    measured = np.array(seconds)
    features = np.array([step.features for step in steps]) / measured[:, None]  # so that errors are relative
    scale = np.maximum(features.max(axis=0), 1e-300)
    weights = np.ones(len(steps))
    solution = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        solution = _nonnegative(features / scale * root[:, None], root)
        errors = np.abs(features / scale @ solution - 1.0)
        limit = _HUBER * max(float(np.median(errors)), 1e-9)
        weights = np.minimum(1.0, limit / np.maximum(errors, 1e-300))
    return StepCoefficients(*(solution / scale).tolist())


def _nonnegative(matrix: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares over x ≥ 0, near enough: what comes out negative is held at 0 and the rest solved again."""
    free = np.ones(matrix.shape[1], dtype=np.bool_)
    while True:
        solution = np.zeros(matrix.shape[1])
        solution[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        if solution.min() >= 0:
            return solution
        free &= solution > 0


def errors(model: StepCoefficients, steps: Iterable[Step], seconds: Iterable[float]) -> list[float]:
    """Of each step, relative to what was measured."""
    return [model.of(*step.amounts) / measured - 1 for step, measured in zip(steps, seconds, strict=True)]


@dataclass(frozen=True)
class StepTimes:
    seconds: float  # their median
    noise: float  # standard deviation of their logarithms


def measure(engine: Engine, steps: Sequence[Step], repeats: int) -> list[StepTimes]:
    """Each step, `repeats` times after one to warm up. In rounds over all steps, so that a slow moment hits many of
    them once and not one of them always."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(repeats + 1):
        for step, seconds in zip(steps, times, strict=True):
            chunks = list(step.chunks())
            began = time.perf_counter()
            engine.step(chunks)
            if turn:
                seconds.append(time.perf_counter() - began)
    return [StepTimes(statistics.median(each), statistics.pstdev(map(math.log, each))) for each in times]


_FILE = """\
about: |
  The bare engine on {machine}: {model} in {dtype}, {threads} thread(s) to a worker. Fitted by
  bench/engine/fit_model.py to {steps} steps of up to {largest} prompt tokens or {rows} rows, each run {repeats} times:
  half of them are within {half:.0%} of the fit, nine in ten within {most:.0%}; of {checked} steps with both, which were
  not fitted, half within {checked_half:.0%}. Copies, pages between stores and turns of loops: docs/lab/benchmarks.md.

token_bytes: {token_bytes}
max_context: {max_context}
kv_cache_bytes: 512MiB
host_cache_bytes: 2GiB
prefill: &step
  {{fixed: {fixed:.3g}, token: {token:.3g}, pair: {pair:.3g},
  row: {row:.3g}, context: {context:.3g}, mixed: {mixed:.3g}}}
decode: *step
copy: 12.0e9
network: 5.0e9
network_latency: 0.0005
message: 0.00015
call: 0.00005
start: 2.0
turn: 0.0002
noise: {noise:.2g}
config: {{model.device: cpu}}
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    report.say(report.machine())
    pages = _POOL_TOKENS // _PAGE_SIZE
    engine = Engine.load(
        models.directory(arguments.model),
        arguments.dtype,
        "cpu",
        pages,
        _PAGE_SIZE,
        head=True,
        threads=arguments.threads,
    )
    fitted, checked = grid(arguments.quick)
    measured = measure(engine, [*fitted, *checked], arguments.repeats)
    seconds = [each.seconds for each in measured]
    coefficients = fit(fitted, seconds[: len(fitted)])
    own = errors(coefficients, fitted, seconds[: len(fitted)])
    others = errors(coefficients, checked, seconds[len(fitted) :])
    for step, each, error in zip([*fitted, *checked], measured, [*own, *others], strict=True):
        report.say(f"{astuple(step)!s:>24}  {each.seconds * 1_000:9.2f} ms, spread {each.noise:.1%}, fit {error:+.1%}")
    print(
        _FILE.format(
            machine=arguments.machine,
            model=arguments.model,
            dtype=arguments.dtype,
            threads=arguments.threads,
            steps=len(fitted),
            largest=max(_PROMPTS),
            rows=max(_ROWS),
            repeats=arguments.repeats,
            half=_quantile(own, 0.5),
            most=_quantile(own, 0.9),
            checked=len(checked),
            checked_half=_quantile(others, 0.5),
            token_bytes=engine.layout.page_bytes // _PAGE_SIZE,
            max_context=engine.config.max_positions,
            noise=statistics.median(each.noise for each in measured),
            **asdict(coefficients),
        ),
        end="",
    )
    return 0


def _quantile(relative: Sequence[float], share: float) -> float:
    return float(np.quantile(np.abs(relative), share))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A timing model for the simulator from this machine's engine.")
    parser.add_argument("--model", default="100m", help="100m, tiny, or a checkpoint's directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="of the engine, as a worker would have")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--machine", default="this machine", help="what the file is to call it")
    parser.add_argument("--quick", action="store_true", help="a third of the steps")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
