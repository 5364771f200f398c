"""`baton profile`: trace the steps of a worker or store."""

from typing import Annotated

import typer
from rich.markup import escape

from deploy.commands.running_cluster import operator_client
from deploy.commands.terminal import Json, Name, Operator, command, out, print_json


@command("baton profile decode-0 --steps 200", "baton profile decode-0 --stop")
def profile(
    process: Annotated[str, typer.Argument(help="A worker or store, such as decode-0; baton status lists them.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps to trace.")] = 100,
    stop: Annotated[bool, typer.Option("--stop", help="End the trace that the process is writing.")] = False,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Trace the next steps of a process, for chrome://tracing or Perfetto.

    A cluster writes one trace at a time."""
    with operator_client(operator, name) as client:
        trace = client.stop_profile(process) if stop else client.profile(process, steps)
    if as_json:
        print_json({"process": process, "steps": trace.steps, "path": trace.path, "node": trace.node})
        return
    does = "ends its trace" if stop else f"traces its next {trace.steps} steps"
    out.print(f"{escape(process)} {does}; once it is written, on {escape(trace.node)}:")
    out.print(escape(trace.path))
