"""Switch off one technique at a time, under the same load, and measure what each is worth.

    python -m bench.cluster.ablation            # about 20 minutes
    python -m bench.cluster.ablation --quick    # about 80 s, a tiny model: whether it runs

A technique that is off is off by a setting that users have, or by what the requests ask for. docs/ablation.md has the
tables.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from baton.client import AsyncClient, Client
from baton.config import parse_override
from baton.errors import BatonError
from baton.operator_api import Status
from bench import clusters, models, report
from deploy.load.figures import Objectives, Outcome, errors, figures
from deploy.load.presets import Preset, Turn, conversations, fixed, spread
from deploy.load.users import Users

_TIMEOUT = 300.0  # seconds that a request may take
_LIMIT = 3_600.0  # seconds of a run
_LOOK = 0.1  # seconds between two looks at the pages that are held
_WARM_UP = 4  # requests
_SHOWN = ("output tokens", "ttft p50", "ttft p99", "itl p99", "cached prompt tokens")


@dataclass(frozen=True)
class Arm:
    """The cluster with something changed."""

    about: str
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    workers: tuple[int, int] = (1, 1)  # prefill, decode
    salted: bool = False  # no two requests may share a page


WHOLE_PROMPTS = {f"{role}.max_num_batched_tokens": 8_192 for role in ("prefill", "decode")} | {"decode.itl_ms": 60_000}
COLOCATED = (0, 2)
ARMS: Mapping[str, Arm] = {
    "everything": Arm("1P+1D as configured by default, with a disk tier"),
    "batching": Arm("one sequence a step", {"prefill.max_num_seqs": 1, "decode.max_num_seqs": 1}),
    "paging": Arm("a sequence's memory comes in pieces of 1,024 tokens", {"pages.page_size": 1_024}),
    "prefix reuse": Arm("every request has a cache salt of its own", salted=True),
    "disaggregation": Arm("two workers that do both", workers=COLOCATED),
    "disaggregation and chunked prefill": Arm(
        "two workers that do both, prompts whole in one step", WHOLE_PROMPTS, COLOCATED
    ),
    "disk tier": Arm("memory alone", {"disk.path": ""}),
    "speculation": Arm("a token a step", {"model.speculation": "off"}),
}
"""By what is off. The first has all."""

LOADS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("chat", "a system prompt that all share, 4 turns", spread(150, 90), fixed(48), 500, 4, 60),
        Preset("documents", "8 questions about one document each", fixed(1_500), fixed(32), 0, 8, 30),
        Preset("code", "long files, one answer each", spread(1_500, 900), fixed(48), 200),
        Preset("agents", "12 calls, each of which continues the last", spread(600, 240), fixed(24), 400, 12, 120),
    )
}
_CONTEXT = 4_096  # tokens


@dataclass(frozen=True)
class Seen:
    """One run of one load."""

    outcomes: Sequence[Outcome]
    held: int  # device pages of all workers that were taken at a time, at most, in bytes


async def _run(address: str, operator: str, arm: Arm, talks: Iterator[list[Turn]], users: int, requests: int) -> Seen:
    async with AsyncClient(address, operator=operator) as client:
        load = asyncio.create_task(Users(client, talks, _TIMEOUT, salted=arm.salted).run(users, requests, _LIMIT))
        held = 0
        while not load.done():
            held = max(held, held_bytes(await client.status(timeout=30.0)))
            await asyncio.wait([load], timeout=_LOOK)
        return Seen([one for own in await load for one in own], held)


def held_bytes(status: Status) -> int:
    """The device pages that are neither free nor only cached."""
    if status.model is None:
        return 0
    workers = (process.load for process in status.processes if process.role in ("prefill", "decode"))
    return sum(load.pages_total - load.pages_free for load in workers) * status.model.page_bytes


def measure(name: str, model: Path, loads: Sequence[Preset], arguments: argparse.Namespace) -> dict[str, list[Seen]]:
    """Start a cluster without one technique, and return the runs of each load."""
    arm, runs = ARMS[name], dict[str, list[Seen]]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-ablation-")))
        settings: dict[str, object] = {
            "store.host_cache_bytes": "256MiB", "disk.path": str(folder), "prefill.threads": 1, "decode.threads": 1,
            "prefill.kv_cache_bytes": "256MiB", "decode.kv_cache_bytes": "512MiB", "disk.admit_after": 1,
        }  # fmt: skip
        settings |= dict(arm.settings) | dict(map(parse_override, arguments.set))
        cluster = stack.enter_context(clusters.local(model, *arm.workers, settings, patience=180.0))
        with Client(operator=cluster.operator) as client:
            card = client.status(timeout=30.0).model
        assert card is not None
        context = min(_CONTEXT, card.max_context)
        for load in loads:
            warm = replace(load, turns=1)
            for run in range(-1, arguments.runs):
                # A seed of its own for each run: the prompts of one must not be found in the cache by the next.
                talks = conversations(warm if run < 0 else load, card.vocab_size, context, arguments.seed + run + 1)
                requests = _WARM_UP if run < 0 else arguments.requests
                seen = asyncio.run(_run(cluster.address, cluster.operator, arm, talks, arguments.users, requests))
                if run >= 0:
                    report.say(f"{_title(name)}, {load.name}: {_line(seen)}")
                    runs.setdefault(load.name, []).append(seen)
    return runs


def results(name: str, load: str, runs: Sequence[Seen], full: Sequence[Seen]) -> Iterator[report.Result]:
    """The medians of the runs, each beside that of the runs with everything on."""
    title = _title(name)
    for case in _SHOWN:
        values, limits = ([_figure(run, case) for run in each] for each in (runs, full))
        result = report.median_of("ablation", f"{load}, {title}: {case}", _UNITS[case], values)
        limit = median(limits)
        yield replace(result, limit=limit, ratio=result.value / limit if limit else None)
    yield report.median_of("ablation", f"{load}, {title}: memory held", "MiB", [run.held / 2**20 for run in runs])
    if failed := errors([outcome for run in runs for outcome in run.outcomes]):
        yield report.Result("ablation", f"{load}, {title}: {dict(failed)}", failed.total(), "errors")


_UNITS = dict(zip(_SHOWN, ("tokens/s", "ms", "ms", "ms", "share"), strict=True))


def _title(name: str) -> str:
    return name if name == "everything" else f"without {name}"


def _figure(seen: Seen, name: str) -> float:
    return next((each.value for each in figures(seen.outcomes, Objectives()) if each.name == name), 0.0)


def _line(seen: Seen) -> str:
    shown = ", ".join(f"{case} {_figure(seen, case):.4g}" for case in _SHOWN)
    return f"{shown}, held {seen.held / 2**20:.1f} MiB"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    loads = [LOADS[name] for name in arguments.loads]
    report.say(report.machine())
    try:
        full = dict[str, list[Seen]]()
        for name in ARMS if arguments.only is None else ("everything", *arguments.only):
            runs = measure(name, models.directory(arguments.model), loads, arguments)
            full = full or runs
            for load in loads:
                for result in results(name, load.name, runs[load.name], full[load.name]):
                    report.emit(result)
    except BatonError as error:
        report.say(f"ablation: {error}")
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with what --quick sets filled in."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster.ablation")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one run, few requests")
    parser.add_argument("--model", help="tiny, 100m, or a checkpoint's directory; default: 100m")
    parser.add_argument("--loads", nargs="*", choices=list(LOADS), help="default: all")
    parser.add_argument("--only", nargs="*", choices=[name for name in ARMS if name != "everything"])
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--requests", type=int, help="of each run; default: 96")
    parser.add_argument("--runs", type=int, help="default: 3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.SETTING=VALUE")
    arguments = parser.parse_args(argv)
    quick = {"model": "tiny", "loads": ["chat"], "requests": 16, "runs": 1}
    for name, value in (quick if arguments.quick else {}).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    for name, value in {"model": "100m", "loads": list(LOADS), "requests": 96, "runs": 3}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
