"""`baton status`: the router's view of the cluster, merged with the supervisor's."""

from pathlib import Path
from typing import Any

import msgspec
import typer

from baton.client import Client, is_up
from baton.errors import BatonError
from baton.operator_api import Status
from deploy.commands import figures, show
from deploy.commands.running_cluster import find
from deploy.commands.terminal import Json, Name, command, out, print_json, state_folder
from deploy.control_plane.reports import ClusterOverview, SupervisedProcess, read_overview

_LOAD = ("running", "waiting", "pages_free", "pages_total", "tokens_queued")


@command("baton status", "baton status --json")
def status(name: Name = "baton", as_json: Json = False) -> None:
    """Show the cluster's processes, their load, and its log folder."""
    page = collect(state_folder(name))
    if as_json:
        print_json(page)
    else:
        show.cluster(out, page)
    if not page["serving"]:
        raise typer.Exit(1)


def collect(folder: Path) -> dict[str, Any]:
    """Return everything that `baton status` shows, as plain data. Raises StartupError if there is no such cluster."""
    state = find(folder)
    overview = read_overview(folder)
    status, problem, serving = None, "", False
    with Client(operator=state.operator, api_key=state.operator_key) as client:
        try:
            status = client.status()
        except BatonError:
            problem = f"no router answers its operator at {state.operator}"
        serving = client.serving()
    dead = overview is None or overview.supervisor.gone()
    if dead and status is None:
        problem = f"the cluster has died; `baton down --name {state.name}` clears away what is left"
    elif dead:
        problem = problem or "the supervisor does not run; Ray restarts it, unless Ray itself has gone"
    return {
        "cluster": state.name,
        "model": state.model,
        "further_models": state.further_models,
        "serving": serving,
        "problem": problem or (overview.problem if overview else ""),
        **msgspec.structs.asdict(state.first),
        "routers": {name: msgspec.structs.asdict(router) for name, router in state.routers.items()},
        "log_dir": state.log_dir,
        "key_file": state.key_file,
        "ray": {"address": state.ray.address, "mode": state.ray.mode, "started_by_baton": state.ray.own is not None},
        "supervisor": {"pid": overview.supervisor.pid if overview else None, "alive": not dead},
        "processes": _with_tiers(_processes(status, overview)),
        "numerics": status.model.namespace.numerics if status and status.model else "",
        "counts": msgspec.structs.asdict(status.counts) if status else {},
        "bottleneck": _bottleneck(status),
    }


def _processes(status: Status | None, overview: ClusterOverview | None) -> list[dict[str, Any]]:
    views = {view.name: view for view in overview.processes} if overview is not None else {}
    listed = {process.name: process for process in status.processes} if status is not None else {}
    rows: list[dict[str, Any]] = []
    if overview is not None and not overview.supervisor.gone():
        # The router still lists dead processes. One that the supervisor no longer knows was stopped on purpose.
        listed = {name: process for name, process in listed.items() if name in views or is_up(process)}
    for name in dict.fromkeys([*views, *listed]):
        view, process = views.get(name), listed.get(name)
        row: dict[str, Any] = {"name": name, "role": process.role if process else view.role if view else ""}
        row["node"] = process.node if process else view.node if view else ""
        row["pid"] = process.pid if process else view.identity.pid if view and view.identity else None
        row["state"] = process.state if process else _condition(view)
        row["gpu"] = view.gpu if view else ""
        row["restarts"] = view.restarts if view else 0
        row["retry_in_s"] = round(view.retry_in, 1) if view else 0.0
        row["last_failure"] = view.failure.message if view and view.failure else ""
        if process is not None:
            row["load"] = {name: getattr(process.load, name) for name in _LOAD}
            row["pages_known"] = process.pages_known
            row["attempts"] = process.attempts
            row["becoming"] = process.becoming
            row["metrics"] = process.metrics_address
            row["events"] = process.events_endpoint
            row["replay"] = process.replay_endpoint
            row["numerics"] = process.numerics
            row["heartbeat_age_ms"] = process.heartbeat_age_ms
        rows.append(row)
    return rows


def _with_tiers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same rows, with tier figures from their metrics pages for stores."""
    # Only the router knows the metrics addresses: without it, rows have none.
    addresses = {
        row["name"]: row.get("metrics")
        for row in rows
        if row["role"] != "router" and row["state"] in ("live", "draining")
    }
    pages = figures.scrape({name: address for name, address in addresses.items() if address})
    for row in rows:
        if row["role"] == "store" and row["name"] in pages:
            mates = [r["name"] for r in rows if r["node"] == row["node"] and r["role"] in ("prefill", "decode")]
            row |= figures.of_store(pages[row["name"]], [pages[name] for name in mates if name in pages])
    return rows


def _condition(view: SupervisedProcess | None) -> str:
    """Return the supervisor's last condition, checked against the process itself: the supervisor may have gone."""
    if view is None:
        return ""
    return "gone" if view.identity is not None and view.identity.gone() else view.condition


def _bottleneck(status: Status | None) -> dict[str, Any]:
    """Return the predicted utilisation of prefill and decode workers; empty if the router has none."""
    if status is None or status.bottleneck is None:
        return {}
    fields = msgspec.structs.asdict(status.bottleneck)
    return fields if fields["advised"] else {name: fields[name] for name in ("prefill", "decode", "advised")}
