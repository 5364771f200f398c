"""Print the state of a cluster as tables, from plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.commands.terminal import coloured, size


def cluster(console: Console, found: dict[str, Any]) -> None:
    """Print the cluster on one screen."""
    serving = "[bold green]serves[/]" if found["serving"] else "[bold red]does not serve[/]"
    console.print(f"[bold]{found['cluster']}[/] {serving} {escape(found['model'])}")
    ray = found["ray"]
    owner = "started by baton" if ray["started_by_baton"] else "yours"
    for router in found["routers"].values():
        metrics = f"http://{router['http'].removeprefix('http://')}/metrics"
        console.print(escape(f"gRPC {router['grpc']}   metrics {metrics}"))
    token = "token" if ray["mode"] == "token" else "[yellow]no token[/]"
    console.print(f"Ray {escape(ray['address'])} ({owner}, {token})")
    console.print(f"logs {escape(found['log_dir'])}")
    if found["key_file"]:
        console.print(f"keys {escape(found['key_file'])}")
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
            _named(row),
            coloured(row["state"]) + _more(row),
            str(row["pid"] or ""),
            str(load.get("running", "")),
            str(load.get("waiting", "")),
            f"{total - load['pages_free']}/{total}" if total else "",
            str(row["restarts"] or ""),
            row["node"],
        )
    console.print(table)
    _tiers(console, [row for row in found["processes"] if "tiers" in row])
    for row in found["processes"]:
        if row["last_failure"]:
            console.print(f"[yellow]{row['name']} last failed:[/] {escape(row['last_failure'])}")
    if counts := found["counts"]:
        console.print(
            f"requests: {counts['running']} running, {counts['queued']} queued, {counts['finished']} finished, "
            f"{counts['failed']} failed, {counts['cancelled']} cancelled; tokens: {counts['prompt_tokens']} of prompts "
            f"({counts['cached_tokens']} cached), {counts['generated_tokens']} generated"
        )
    if busy := found["bottleneck"]:
        said = f"predicted utilisation: prefill {busy['prefill']:.0%}, decode {busy['decode']:.0%}"
        if busy["advised"]:
            said += (
                f"; one {busy['advised']} worker more would make that {busy['prefill_then']:.0%} and "
                f"{busy['decode_then']:.0%} (baton role)"
            )
        console.print(said)
    if found["problem"]:
        console.print(f"[red]{escape(found['problem'])}[/]")


def _named(row: dict[str, Any]) -> str:
    """Return the name, with the role if the name implies another one."""
    fits = row["name"].startswith(row["role"])
    return row["name"] if fits else f"{row['name']} [yellow]({row['role']})[/]"


def _more(row: dict[str, Any]) -> str:
    if row["retry_in_s"]:
        return f", again in {row['retry_in_s']:.0f} s"
    if row["state"] == "draining":
        left = f", {row['attempts']} left" if row["attempts"] else ", empty"
        return left + (f", then {row['becoming']}" if row["becoming"] else "")
    return ""


def _tiers(console: Console, stores: Sequence[dict[str, Any]]) -> None:
    """Print the pages, hits and loads of each store by tier, then its pins and long-held resources."""
    if not stores:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("store")
    table.add_column("tier")
    for column in ("pages", "size", "hits", "loads", "ms each", "evicted", "regret", "damaged"):
        table.add_column(column, justify="right")
    for row in stores:
        for tier, found in row["tiers"].items():
            loads = found.get("loads", 0)
            table.add_row(
                row["name"] if tier == "host" else "",
                tier if tier != "disk" or row["disk_up"] else "disk [dim](off)[/]",
                _count(found.get("pages")),
                size(found.get("bytes")),
                _count(found.get("hits")),
                _count(found.get("loads")),
                f"{found['load_seconds'] / loads * 1_000:.1f}" if loads else "",
                _count(found.get("evictions")),
                f"{found['regret_seconds']:.2f} s" if found["regret_seconds"] else "",
                _count(found.get("checksum_failures")),
            )
    console.print(table)
    for row in stores:
        said = [f"oldest lease {row['oldest_lease_seconds']:.0f} s"] if row.get("oldest_lease_seconds", 0) >= 1 else []
        if pinned := row.get("pinned_bytes"):
            said.append(f"{size(pinned)} pinned")
        if unproven := row.get("unproven_reservations"):
            said.append(f"[yellow]{unproven:.0f} slots reserved by writers that may still write[/]")
        if said:
            console.print(f"{row['name']}: {', '.join(said)}")


def _count(number: float | None) -> str:
    return "" if number is None else f"{number:.0f}"
