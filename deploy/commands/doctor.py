"""`baton doctor`: what the checks of this machine, or of a model on it, find, and advice on each problem."""

from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from deploy.commands.doctor_model import examine_model
from deploy.commands.terminal import ConfigFile, Json, Settings, coloured, command, load, out, print_json
from deploy.control_plane import gpu_checks, preflight


@command("baton doctor", "baton doctor --config cluster.yaml --json", "baton doctor ./model")
def doctor(
    model: Annotated[
        str, typer.Argument(help="Say which engine would serve this here, and why: a directory, a hub id or smollm2.")
    ] = "",
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Check Ray, memory, ports, torch, cores and GPUs, or a MODEL, and advise on each problem.

    A MODEL of the hub must be in its cache: nothing is fetched but smollm2. The exit status is 1 if it can't be served.
    """
    loaded = load(config, settings, {"model.path": model})
    report = examine_model(loaded, model) if model else None
    if report is not None:
        findings = report.findings
    else:
        findings = (*preflight.examine(loaded), *gpu_checks.examine(loaded, gpu_checks.read_facts(loaded)))
    if as_json:
        print_json(msgspec.to_builtins(report or {"findings": findings}))
    else:
        for finding in findings:
            out.print(f"{coloured(finding.level):<16} [bold]{finding.subject}[/]  {escape(finding.text)}")
            if finding.advice:
                out.print(f"      → {escape(finding.advice)}")
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)
