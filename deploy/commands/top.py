"""`baton top`: a live view of a cluster in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from baton.client import Client
from baton.errors import BatonError
from baton.operator_api import Counts, Process, RequestSummary, Status
from deploy.commands.running_cluster import operator_client
from deploy.commands.terminal import Name, Operator, coloured, command, new_table, out

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 40  # of a sparkline
_RATES = (("requests", "finished"), ("prompt tokens", "prompt_tokens"), ("output tokens", "generated_tokens"))


@command("baton top", "baton top --interval 5 --requests 20", "baton top --count 1")
def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="Show the last N requests.")] = 10,
    count: Annotated[int, typer.Option(min=0, help="End after N looks; 0: at Ctrl-C.")] = 0,
    operator: Operator = "",
    name: Name = "baton",
) -> None:
    """Watch the cluster: rates, processes and their load, and the last requests."""
    history = History()
    with (
        operator_client(operator, name) as client,
        Live(console=out, auto_refresh=False, screen=out.is_terminal) as live,
    ):
        looks = 0
        while not count or looks < count:
            if looks:
                time.sleep(interval)
            looks += 1
            live.update(_look(client, history, requests), refresh=True)


def _look(client: Client, history: History, requests: int) -> RenderableType:
    """Ask the router and draw its answer. A router that does not answer is asked again at the next look."""
    try:
        status = client.status()
        listed = client.requests(requests) if requests else []
    except BatonError as error:
        return Text(f"{error}\nasking again…", style="red")
    history.add_counts(time.monotonic(), status.counts)
    return render(status, listed, history)


@dataclass
class History:
    """The cluster's counts at the last looks, and the rates between them."""

    rates: dict[str, deque[float]] = field(default_factory=lambda: {name: deque(maxlen=_COLUMNS) for name, _ in _RATES})
    _at: float = 0.0
    _counts: Counts | None = None

    def add_counts(self, now: float, counts: Counts) -> None:
        """Note the counts of a look at `now`, in seconds. A router that was restarted counts from 0 again."""
        if self._counts is not None and now > self._at:
            for name, counter in _RATES:
                grown = getattr(counts, counter) - getattr(self._counts, counter)
                self.rates[name].append(max(0, grown) / (now - self._at))
        self._at, self._counts = now, counts


def render(status: Status, requests: Sequence[RequestSummary], history: History) -> RenderableType:
    """Draw one look in 80 columns."""
    counts = status.counts
    cached = f"{counts.cached_tokens / counts.prompt_tokens:.0%}" if counts.prompt_tokens else "–"
    ended = f"{counts.finished} finished, {counts.failed} failed, {counts.cancelled} cancelled"
    head = [
        f"[bold]{escape(status.cluster)}[/] {escape(status.model_name)}",
        f"requests: {counts.running} running, {counts.queued} queued, {ended}",
        f"prompts: {counts.prompt_tokens} tokens, {cached} cached",
    ]
    return Group(Text.from_markup("\n".join(head)), _rates(history), _processes(status.processes), _requests(requests))


def _rates(history: History) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, _ in _RATES:
        values = history.rates[name]
        table.add_row(name, f"{values[-1]:>10,.1f}/s" if values else f"{'–':>12}", f"[cyan]{sparkline(values)}[/]")
    return table


def sparkline(values: Iterable[float]) -> str:
    """Draw values as bars, the largest one as a full block; one character each."""
    drawn = list(values)
    most = max(drawn, default=0.0)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] if most else _BARS[0] for value in drawn)


def _processes(processes: Iterable[Process]) -> Table:
    table = new_table("process", "state", ">run", ">wait", ">tokens queued", ">pages used", ">silent", narrow=True)
    for process in processes:
        load = process.load
        used = load.pages_total - load.pages_free
        table.add_row(
            escape(process.name),
            coloured(process.state),
            str(load.running or ""),
            str(load.waiting or ""),
            str(load.tokens_queued or ""),
            f"{used / load.pages_total:>4.0%} {_bar(used / load.pages_total)}" if load.pages_total else "",
            f"{age / 1_000:.1f} s" if (age := process.heartbeat_age_ms or 0.0) >= 1_000 else "",
        )
    return table


def _bar(share: float, width: int = 10) -> str:
    filled = round(min(1.0, share) * width)
    return f"[cyan]{'█' * filled}[/][dim]{'░' * (width - filled)}[/]"


def _requests(requests: Sequence[RequestSummary]) -> RenderableType:
    if not requests:
        return Text("no requests yet", style="dim")
    figures = (">prompt", ">cached", ">output", ">TTFT ms", ">TPOT ms")
    table = new_table("last requests", "state", *figures, narrow=True)
    for column, width in zip(table.columns, (20, 14), strict=False):
        column.max_width, column.no_wrap = width, True
    for request in requests:
        table.add_row(
            escape(request.request_id),
            escape(request.outcome.partition(":")[0] or request.state),
            str(request.prompt_tokens),
            "" if request.cached_tokens is None else str(request.cached_tokens),
            str(request.completion_tokens),
            "" if request.ttft_ms is None else f"{request.ttft_ms:.1f}",
            "" if request.tpot_ms is None else f"{request.tpot_ms:.2f}",
        )
    return table
