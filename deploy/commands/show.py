"""Print the state of a cluster as tables of at most 80 columns, from plain data."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from baton.messages import MIXED
from deploy.commands.terminal import coloured, new_table, size


def cluster(console: Console, page: dict[str, Any]) -> None:
    """Print the cluster on one screen."""
    serving = "[bold green]serves[/]" if page["serving"] else "[bold red]does not serve[/]"
    console.print(f"[bold]{page['cluster']}[/] {serving} {escape(page['model'])}")
    ray = page["ray"]
    owner = "started by baton" if ray["started_by_baton"] else "yours"
    for number, router in enumerate(page["routers"].values()):
        metrics = f"metrics http://{router['http'].removeprefix('http://')}/metrics"
        console.print(escape(metrics if number else f"gRPC {router['grpc']}   {metrics}"))  # they share the first one
    token = "token" if ray["mode"] == "token" else "[yellow]no token[/]"
    console.print(f"Ray {escape(ray['address'])} ({owner}, {token})")
    console.print(f"logs {escape(page['log_dir'])}")
    if page["key_file"]:
        console.print(f"keys {escape(page['key_file'])}")
    nodes = sorted({row["node"] for row in page["processes"]})
    if len(nodes) == 1:
        console.print(f"node {escape(nodes[0])}")
    if page["numerics"]:
        console.print(f"numerics {_numerics(page)}")
    on_gpus = any(row.get("gpu") for row in page["processes"])
    more = [">gpu"] * on_gpus + ["node"] * (len(nodes) > 1)
    columns = (">pid", ">run", ">wait", ">pages used", ">restarts", *more)
    table = new_table("process", "state", *columns, narrow=True)
    for row in page["processes"]:
        load = row.get("load", {})
        total = load.get("pages_total", 0)
        cells = [
            row["name"],
            coloured(row["state"]),
            str(row["pid"] or ""),
            _count(load.get("running")),
            _count(load.get("waiting")),
            f"{_count(total - load['pages_free'])}/{_count(total)}" if total else "",
            _count(row["restarts"] or None),
        ]
        table.add_row(*cells, *(row.get(name.removeprefix(">"), "") for name in more))
    console.print(table)
    for row in page["processes"]:
        if notes := _notes(row):
            console.print(f"[yellow]{row['name']}:[/] {notes}")
    _tiers(console, [row for row in page["processes"] if "tiers" in row])
    for row in page["processes"]:
        if row["last_failure"]:
            console.print(f"[yellow]{row['name']} last failed:[/] {escape(row['last_failure'])}")
    if counts := page["counts"]:
        console.print(
            f"requests: {counts['running']} running, {counts['queued']} queued, {counts['finished']} finished, "
            f"{counts['failed']} failed, {counts['cancelled']} cancelled"
        )
        console.print(
            f"tokens: {counts['prompt_tokens']} of prompts ({counts['cached_tokens']} cached), "
            f"{counts['generated_tokens']} generated"
        )
    if busy := page["bottleneck"]:
        console.print(f"predicted utilisation: prefill {busy['prefill']:.0%}, decode {busy['decode']:.0%}")
        if busy["advised"]:
            console.print(
                f"  with one {busy['advised']} worker more: {busy['prefill_then']:.0%} and {busy['decode_then']:.0%} "
                "(baton role)"
            )
    if page["problem"]:
        console.print(f"[red]{escape(page['problem'])}[/]")


def _numerics(page: dict[str, Any]) -> str:
    """Return the class of the workers' arithmetic, or all classes where several may serve."""
    if page["numerics"] != MIXED:
        return escape(page["numerics"])
    classes = sorted({row["numerics"] for row in page["processes"] if row.get("numerics")})
    return f"[yellow]mixed[/] ({escape(', '.join(classes))}): tokens may depend on the workers"


def _notes(row: dict[str, Any]) -> str:
    """Return what the table has no column for: another role than the name says, the next start, a drain."""
    notes = [] if row["name"].startswith(row["role"]) else [f"serves as {row['role']} worker"]
    if row["retry_in_s"]:
        notes.append(f"starts again in {row['retry_in_s']:.0f} s")
    elif row["state"] == "draining":
        notes.append(f"draining, {row['attempts']} left" if row["attempts"] else "draining, empty")
        notes += [f"then {row['becoming']}"] if row["becoming"] else []
    return ", ".join(notes)


def _tiers(console: Console, stores: Sequence[dict[str, Any]]) -> None:
    """Print the pages, hits and loads of each store by tier, then its pins and long-held resources."""
    if not stores:
        return
    figures = (">pages", ">size", ">hits", ">loads", ">ms each", ">evicted", ">regret")
    table = new_table("store", "tier", *figures, narrow=True)
    for row in stores:
        for tier, tier_row in row["tiers"].items():
            loads = tier_row.get("loads", 0)
            table.add_row(
                row["name"] if tier == "host" else "",
                tier if tier != "disk" or row["disk_up"] else "[dim]disk, off[/]",
                _count(tier_row.get("pages")),
                size(tier_row.get("bytes")),
                _count(tier_row.get("hits")),
                _count(tier_row.get("loads")),
                f"{tier_row['load_seconds'] / loads * 1_000:.4g}" if loads else "",
                _count(tier_row.get("evictions")),
                _seconds(tier_row["regret_seconds"]),
            )
    console.print(table)
    for row in stores:
        notes = [f"oldest lease {row['oldest_lease_seconds']:.0f} s"] if row.get("oldest_lease_seconds", 0) >= 1 else []
        for tier, figures in row["tiers"].items():
            if damaged := figures.get("checksum_failures"):
                notes.append(f"[red]{damaged:.0f} pages found damaged on {tier}[/]")
        if pinned := row.get("pinned_bytes"):
            notes.append(f"{size(pinned)} pinned")
        if unproven := row.get("unproven_reservations"):
            notes.append(f"[yellow]{unproven:.0f} slots reserved by writers that may still write[/]")
        for each in notes:
            console.print(f"{row['name']}: {each}")


def _seconds(number: float) -> str:
    return "" if not number else f"{number:.2f} s" if number < 100 else f"{_count(number)} s"


def _count(number: float | None) -> str:
    """Return a number in at most six characters: 12345, 123.5k, 12.3M."""
    if number is None:
        return ""
    if number < 100_000:
        return f"{number:.0f}"
    return next(
        (f"{number / unit:.1f}{name}" for unit, name in ((1e3, "k"), (1e6, "M")) if number < 1e3 * unit),
        f"{number:.2g}",
    )
