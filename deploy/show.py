"""Tables for people. What they show comes in as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.doctor import Finding

_COLOURS = {"live": "green", "ok": "green", "warn": "yellow", "bad": "red"}


def status(console: Console, found: dict[str, Any]) -> None:
    """The cluster on one screen."""
    serving = "[bold green]serves[/]" if found["serving"] else "[bold red]does not serve[/]"
    console.print(f"[bold]{found['cluster']}[/] {serving} {escape(found['model'])}")
    ray = found["ray"]
    owner = "started by baton" if ray["started_by_baton"] else "yours"
    console.print(f"gRPC {found['grpc']}   metrics http://{found['http'].removeprefix('http://')}/metrics")
    console.print(f"Ray {ray['address']} ({owner}, {'token' if ray['mode'] == 'token' else '[yellow]no token[/]'})")
    console.print(f"logs {escape(found['log_dir'])}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("process")
    table.add_column("state")
    for column in ("pid", "running", "waiting", "pages", "restarts"):
        table.add_column(column, justify="right")
    table.add_column("node")
    for row in found["processes"]:
        load = row.get("load", {})
        total = load.get("pages_total", 0)
        table.add_row(
            row["name"],
            _coloured(row["state"]) + (f", again in {row['retry_in_s']:.0f} s" if row["retry_in_s"] else ""),
            str(row["pid"] or ""),
            str(load.get("running", "")),
            str(load.get("waiting", "")),
            f"{total - load['pages_free']}/{total}" if total else "",
            str(row["restarts"] or ""),
            row["node"],
        )
    console.print(table)
    for row in found["processes"]:
        if row["last_failure"]:
            console.print(f"[yellow]{row['name']} last failed:[/] {escape(row['last_failure'])}")
    if counts := found["counts"]:
        console.print(
            f"requests: {counts['running']} running, {counts['queued']} queued, {counts['finished']} finished, "
            f"{counts['failed']} failed, {counts['cancelled']} cancelled; tokens: {counts['prompt_tokens']} of prompts "
            f"({counts['cached_tokens']} cached), {counts['generated_tokens']} generated"
        )
    if found["problem"]:
        console.print(f"[red]{escape(found['problem'])}[/]")


def findings(console: Console, found: Sequence[Finding]) -> None:
    """One line for each finding, and the advice below it."""
    for finding in found:
        console.print(f"{_coloured(finding.level):<16} [bold]{finding.subject}[/]  {escape(finding.found)}")
        if finding.advice:
            console.print(f"      → {escape(finding.advice)}")


def _coloured(word: str) -> str:
    return f"[{_COLOURS.get(word, 'yellow')}]{word}[/]"
