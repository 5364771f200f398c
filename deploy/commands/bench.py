"""`baton bench`: send a load to a running cluster, and report its latencies, throughput and goodput."""

from __future__ import annotations

import asyncio
import datetime
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.client import AsyncClient, Client
from baton.errors import InvalidRequest, Unavailable
from baton.messages import ModelCard
from baton.operator_api import Process
from deploy.commands.running_cluster import find
from deploy.commands.terminal import Json, Name, command, err, new_table, out, print_json, state_folder

if TYPE_CHECKING:
    from deploy.load.figures import Figure, Outcome
    from deploy.load.presets import Preset

_TITLES = {"ttft": "TTFT", "itl": "ITL, between messages", "tpot": "TPOT", "e2e": "whole request"}


@command(
    "baton bench",
    "baton bench interactive-chat --users 16 --requests 200 --report chat.html",
    "baton bench reasoning --requests 10 --length-scale 0.1 --json",
    "baton bench --list",
)
def bench(
    preset: Annotated[str, typer.Argument(help="A workload; --list shows them.")] = "interactive-chat",
    users: Annotated[int, typer.Option("--users", "-u", min=1, help="Users, each with one request at a time.")] = 8,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests in all.")] = 100,
    duration: Annotated[float, typer.Option(min=0.1, help="Send nothing after so many seconds.")] = 300.0,
    length_scale: Annotated[float, typer.Option(help="Multiplies lengths; 0: what fits the model's context.")] = 0.0,
    time_scale: Annotated[float, typer.Option(help="Multiplies pauses; 0: as the lengths.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")] = 120.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed sends the same prompts.")] = 1,
    report: Annotated[str, typer.Option(metavar="FILE.html", help="Also write a page with plots.")] = "",
    list_: Annotated[bool, typer.Option("--list", help="Show the presets, and end.")] = False,
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Measure a running cluster under a load named as in inference-perf's workload catalogue.

    The exit status is 1 if a request failed. Prompts are random tokens; the API key comes from $BATON_API_KEY."""
    from deploy.commands.load_report import render
    from deploy.load import presets
    from deploy.load.figures import errors, figures

    if list_:
        _list(list(presets.PRESETS.values()), as_json)
        return
    chosen = presets.named(preset)
    if report and not Path(report).parent.is_dir():
        raise InvalidRequest(f"can't write {report}: there is no folder {Path(report).parent}")
    state = find(state_folder(name))
    with Client(operator=state.operator, api_key=state.operator_key) as client:
        status = client.status()
    if status.model is None:
        raise Unavailable("no worker has loaded the model yet; `baton status` shows what is missing")
    context = status.model.max_context
    lengths = length_scale or presets.scale_to(chosen, context)
    load = presets.scaled(chosen, lengths, time_scale or lengths)
    outcomes = asyncio.run(
        _send(state.target, state.tls, load, status.model, (users, requests, duration), timeout, seed)
    )
    flat = [one for own in outcomes for one in own]
    values = figures(flat, load.objectives)
    facts = {
        "preset": f"{chosen.name}: {chosen.about}",
        "scale": f"lengths × {lengths:.3g}, pauses × {time_scale or lengths:.3g}, context {context} tokens",
        "users": str(users),
        "requests": f"{_sent(len(flat), requests, duration)}, {errors(flat).total()} failed",
        "cluster": f"{status.model_name}, {_shape(status.processes)}",
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if report:
        Path(report).write_text(render(f"baton bench {chosen.name}", facts, values, outcomes))
    if as_json:
        shown = {figure.name: {"value": figure.value, "unit": figure.unit} for figure in values}
        print_json({"load": facts, "objectives": asdict(load.objectives), "figures": shown, "errors": errors(flat)})
    else:
        _show(facts, values, load)
    if errors(flat):
        for reason, count in errors(flat).items():
            err.print(f"[red]{count} failed: {reason}[/]")
        raise typer.Exit(1)


async def _send(
    address: str, tls: bool, load: Preset, model: ModelCard, amount: tuple[int, int, float], timeout: float, seed: int
) -> list[list[Outcome]]:
    """Send the load: `amount` is users, requests and seconds. Shows progress on stderr."""
    from deploy.load.presets import conversations
    from deploy.load.users import Users

    talks = conversations(load, model.vocab_size, model.max_context, seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(load.name, total=amount[1])
        async with AsyncClient(address, tls=tls) as client:
            return await Users(client, talks, timeout, lambda _: progress.advance(task)).run(*amount)


def _sent(sent: int, requests: int, duration: float) -> str:
    """Return the number of requests sent, and why they are fewer than `requests` if they are."""
    return str(sent) if sent == requests else f"{sent} of {requests}: none is sent after --duration, {duration:g} s"


def _shape(processes: Sequence[Process]) -> str:
    roles = [process.role for process in processes if process.state == "live"]
    return f"{roles.count('prefill')} prefill, {roles.count('decode')} decode"


def _show(facts: dict[str, str], measured: Sequence[Figure], load: Preset) -> None:
    for name, fact in facts.items():
        out.print(f"[dim]{name:<9}[/] {fact}", markup=True)
    values = {figure.name: figure for figure in measured}
    table = new_table("milliseconds", ">p50", ">p90", ">p99")
    for name, title in _TITLES.items():
        row = [values.get(f"{name} {quantile}") for quantile in ("p50", "p90", "p99")]
        if any(row):
            table.add_row(title, *(f"{each.value:,.1f}" if each else "" for each in row))
    out.print(table)
    rest = [figure for figure in measured if figure.name.split()[0] not in _TITLES]
    for figure in rest:
        out.print(f"{figure.name:<26} {figure}")
    objectives = load.objectives
    if objectives.ttft is not None:
        tokens = f", {objectives.tpot * 1_000:.0f} ms per token" if objectives.tpot else ""
        out.print(f"[dim]goodput counts requests within {objectives.ttft:g} s to the first token{tokens}[/]")


def _list(loads: Sequence[Preset], as_json: bool) -> None:
    if as_json:
        print_json({preset.name: asdict(preset) | {"longest": preset.longest} for preset in loads})
        return
    table = new_table("preset", ">tokens of a long conversation", "what it is")
    for preset in loads:
        table.add_row(preset.name, f"{preset.longest:,}", preset.about)
    out.print(table)
