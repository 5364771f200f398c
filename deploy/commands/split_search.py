"""Choose between split and colocated clusters by serving a load in virtual time."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from msgspec import structs
from rich.console import Console
from rich.markup import escape

from baton.config import Config
from baton.config import load as load_config
from baton.errors import InvalidRequest
from deploy.commands import chart
from deploy.commands.terminal import new_table, print_whole
from kvstore.window_groups import NO_GROUPS, WindowGroups
from simulator import mooncake, timing
from simulator.advice import Break, Evaluate, Objectives, Search, Trial, TrialResult, breaks_by, name, pays, sentence
from simulator.lengths import Lengths
from simulator.trials import Setting, WorkDemand, demand, serve
from simulator.workloads import Arrival, Random, Wishes, trace

_LONG = 10  # times the TTFT objective: only a load of this duration shows a slowly growing queue
_CURVES = 4  # splits in the plot


@dataclass(frozen=True)
class Question:
    """The input of `baton advise`. The load is a trace, or Poisson arrivals of `rate` requests a second.

    If the trace has recorded sessions, users play them in a closed loop, and the load's own speed is one user.
    """

    trace: Path | None
    rate: float
    prompt: str
    output: str
    requests: int
    gpus: int
    model: str
    objectives: Objectives
    jobs: int
    seed: int
    page_size: int
    settings: Mapping[str, object]  # of the cluster
    checkpoint: str  # whose model's pages they are; empty: those of `model`


@dataclass(frozen=True)
class AdviceResult:
    """The result of the search, with splits ordered from best to worst."""

    workers: int
    gpus: int  # of a worker
    objectives: Objectives
    demand: WorkDemand
    colocated: Break
    splits: Sequence[Break]
    trials: Sequence[tuple[Trial, TrialResult]]

    @property
    def sentence(self) -> str:
        return sentence(self.colocated, self.splits, self.objectives)

    @property
    def notes(self) -> Iterator[str]:
        """Caveats of the result."""
        whole = self.demand.prefill + self.demand.decode
        yield (
            f"By the sums of the timing model prompts take {self.demand.prefill / whole:.0%} of the work, the cached "
            f"left out, and tokens {self.demand.decode / whole:.0%}."
        )
        fastest = max((each.best.speed for each in (self.colocated, *self.splits) if each.best), default=1.0)
        lasts = self.demand.span / fastest
        if lasts < _LONG * self.objectives.ttft:
            yield (
                f"The load lasts {lasts:.0f} s at the highest of these rates, {lasts / self.objectives.ttft:.1f} times "
                f"the objective for the first token: a queue that grows slowly is not seen. Rates are rather too high; "
                f"more --requests make them truer."
            )

    def as_json(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "gpus_per_worker": self.gpus,
            "splitting_pays": bool(self.splits) and pays(self.colocated, self.splits[0]),
            "advice": self.sentence,
            "notes": list(self.notes),
            "clusters": [
                {
                    **_cluster(each.layout.prefill, each.layout.decode),
                    "speed": each.best.speed if each.best else None,
                    "breaks_by": breaks_by(each.layout, each.beyond),
                    "served": _served(each.served) if each.served else None,
                }
                for each in (self.colocated, *self.splits)
            ],
            "trials": [
                {**_cluster(trial.layout.prefill, trial.layout.decode), "speed": trial.speed, "served": _served(served)}
                for trial, served in self.trials
            ],
        }


def advise(question: Question, say: Callable[[str], object]) -> AdviceResult:
    """Search the best cluster and report every simulation to `say`. Raises InvalidRequest and ConfigError."""
    objectives = question.objectives
    if not (objectives.ttft > 0 and objectives.tpot > 0 and 0 < objectives.attainment <= 1):  # NaN compares false
        raise InvalidRequest("objectives must be more than 0 seconds, and --attainment more than 0 and at most 1")
    model = timing.read_timing(question.model)
    workers, rest = divmod(question.gpus, model.gpus)
    if workers < 1 or rest:
        raise InvalidRequest(
            f"--gpus {question.gpus} is no number of workers: one of {question.model} has {model.gpus} GPUs"
        )
    sessions = _sessions(question.trace)
    load = [] if sessions else _load(question)
    config = model.configuration(question.page_size, question.settings)
    model, groups = model.in_formats(config.model), NO_GROUPS
    if question.checkpoint:
        token_bytes, groups = _pages(question, config)
        model = structs.replace(model, token_bytes=token_bytes)
    setting = Setting(load, model, config, objectives, question.seed, sessions, question.requests, groups)
    offered = demand(setting)
    if offered.within < objectives.attainment:
        raise InvalidRequest(
            f"only {offered.within:.0%} of these requests would meet both objectives on a cluster that serves nobody "
            f"else; relax --slo-ttft, --slo-tpot or --attainment"
        )
    with _evaluating(setting, question.jobs, say) as evaluate:
        search = Search(workers, offered.speed, objectives.attainment, evaluate)
        colocated, splits = search.run()
    return AdviceResult(workers, model.gpus, objectives, offered, colocated, splits, list(search.served.items()))


def show(console: Console, advice: AdviceResult) -> None:
    kind = "worker" if advice.gpus == 1 else f"worker of {advice.gpus} GPUs"
    console.print(f"{advice.workers} × {kind}; rates are requests a second\n")
    figures = (">highest rate", ">goodput", ">TTFT, s", ">TPOT, ms", ">hits", ">prefill", ">decode")
    table = new_table("cluster", *figures, "then")
    winner = max((advice.colocated, *advice.splits), key=lambda each: each.goodput)
    for each in sorted((advice.colocated, *advice.splits), key=lambda each: -each.goodput):
        table.add_row(
            name(each.layout),
            *_cells(each.served),
            breaks_by(each.layout, each.beyond),
            style="bold" if each is winner else None,
        )
    print_whole(console, table)
    console.print("share of requests that meet both objectives, by requests a second\n")
    console.print(chart.text(_lines(advice), advice.objectives.attainment, "req/s"))
    console.print(f"\n[bold]{escape(advice.sentence)}[/]")
    for note in advice.notes:
        console.print(f"[dim]{escape(note)}[/]")


def plot(advice: AdviceResult, path: Path) -> None:
    """Write the plot as SVG. Raises InvalidRequest if the file can't be written."""
    picture = chart.svg(
        _lines(advice), advice.objectives.attainment, "requests a second", "requests that meet both objectives"
    )
    try:
        path.write_text(picture)
    except OSError as error:
        raise InvalidRequest(f"can't write {path}: {error.strerror}") from None


def _pages(question: Question, config: Config) -> tuple[int, WindowGroups]:
    """Return the bytes of a token in a page of the checkpoint's model, and the groups of its layers. Raises
    InvalidRequest and ModelError."""
    from deploy.commands.size import sizes_of  # torch: a timing model alone need not wait for it

    on_cpu = config.device_of("decode") == "cpu"
    own = {"model.device": "cpu" if on_cpu else "cuda", "pages.page_size": question.page_size, **question.settings}
    sizes = sizes_of(load_config(None, own), question.checkpoint, 1, 1, 0)
    return -(-sizes.page_bytes // question.page_size), sizes.groups


# --- the load, and trials of it ---------------------------------------------------------------------------------------


def _sessions(trace: Path | None) -> list[mooncake.TraceLine]:
    """Return the turns of recorded sessions, or nothing if the trace has none."""
    lines = mooncake.read_trace(trace) if trace is not None else []
    return lines if any(line.after_ms is not None for line in lines) else []


def _load(question: Question) -> list[Arrival]:
    wishes = Wishes()
    if question.trace is not None:
        return list(trace(mooncake.read_trace(question.trace, question.requests), 1.0, wishes, question.seed))
    if not question.rate > 0:
        raise InvalidRequest(f"--poisson {question.rate:g} is no rate; it must be more than 0 requests a second")
    load = Random(question.rate, Lengths.parse(question.prompt), Lengths.parse(question.output))
    return list(load.arrivals(question.requests, wishes, question.seed))


@contextlib.contextmanager
def _evaluating(setting: Setting, jobs: int, say: Callable[[str], object]) -> Iterator[Evaluate]:
    """Run trials in `jobs` processes, or in this one if `jobs` is 1."""

    def tell(run: Callable[[Sequence[Trial]], Iterable[TrialResult]], trials: Sequence[Trial]) -> Iterator[TrialResult]:
        for trial, served in zip(trials, run(trials), strict=True):
            say(
                f"{name(trial.layout)} at {trial.speed:.2f} times the load's speed, {served.rate:.2f} requests a "
                f"second: {served.attained:.1%} meet both objectives"
            )
            yield served

    if jobs == 1:
        yield partial(tell, partial(map, partial(serve, setting)))
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (setting,)) as pool:
        yield partial(tell, partial(pool.map, _serve))


_setting: Setting | None = None  # of a process of the pool


def _begin(setting: Setting) -> None:
    global _setting
    _setting = setting
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once


def _serve(trial: Trial) -> TrialResult:
    assert _setting is not None
    return serve(_setting, trial)


def default_jobs() -> int:
    """Return the number of processes: one per core, at most 3, the number of trials that run at a time."""
    return min(len(os.sched_getaffinity(0)), 3)


# --- how it looks -----------------------------------------------------------------------------------------------------


def _cells(served: TrialResult | None) -> list[str]:
    if served is None:
        return ["none found", *[""] * 6]
    ttft, tpot = served.ttft, served.tpot
    return [
        f"{served.rate:.2f}",
        f"{served.goodput:.2f}",
        f"{ttft[0]:.2f} / {ttft[1]:.2f}" if ttft else "",
        f"{tpot[0] * 1_000:.0f} / {tpot[1] * 1_000:.0f}" if tpot else "",
        f"{served.hits:.0%}",
        f"{served.busy['prefill']:.0%}" if "prefill" in served.busy else "",
        f"{served.busy['decode']:.0%}",
    ]


def _lines(advice: AdviceResult) -> list[chart.ChartLine]:
    layouts = [each.layout for each in (advice.colocated, *advice.splits[:_CURVES])]
    return [
        chart.ChartLine(
            name(layout),
            sorted((served.rate, served.attained) for trial, served in advice.trials if trial.layout == layout),
        )
        for layout in layouts
    ]


def _cluster(prefill: int, decode: int) -> dict[str, int]:
    return {"prefill": prefill, "decode": decode}


def _served(served: TrialResult) -> dict[str, Any]:
    def spread(values: tuple[float, float] | None) -> dict[str, float] | None:
        return dict(zip(("p50", "p99"), values, strict=True)) if values else None

    return {
        "requests_per_second": served.rate,
        "goodput": served.goodput,
        "attained": served.attained,
        "late": served.late,
        "slow": served.slow,
        "ttft_s": spread(served.ttft),
        "tpot_s": spread(served.tpot),
        "hit_rate": served.hits,
        "busy": dict(served.busy),
    }
