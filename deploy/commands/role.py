"""`baton role`: change a worker's role, and wait until it has the new one."""

import time
from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape

from baton.client import Client, is_up
from baton.errors import ProcessNotFound
from baton.messages import WorkerRole
from baton.operator_api import Process
from deploy.commands.running_cluster import operator_client
from deploy.commands.terminal import Json, Name, Operator, command, out, print_json

_POLL = 0.1


class WorkerKind(StrEnum):
    """The roles of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"


@command("baton role prefill-1 decode")
def role(
    worker: Annotated[str, typer.Argument(help="A worker, such as decode-0; baton status lists them.")],
    new_role: Annotated[WorkerKind, typer.Argument(metavar="prefill|decode", help="Its new role.")],
    patience: Annotated[float, typer.Option(help="Seconds until its remaining requests are moved.")] = 30.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the new role.")] = 60.0,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Change a worker's role from decode to prefill, or back, without a restart.

    The exit status is 1 if the worker does not have the role after --wait."""
    kind: WorkerRole = "prefill" if new_role is WorkerKind.PREFILL else "decode"
    with operator_client(operator, name) as client:
        client.set_role(worker, kind, patience=patience)
        process, done = until_changed(client, worker, kind, wait)
    if as_json:
        print_json({"worker": worker, "role": kind, "done": done, "attempts": process.attempts})
    elif done:
        out.print(f"{escape(worker)} is a {kind} worker now")
    else:
        out.print(f"{escape(worker)} is no {kind} worker yet; {process.attempts} attempts are left")
    if wait and not done:
        raise typer.Exit(1)


def until_changed(client: Client, worker: str, role: WorkerRole, patience: float) -> tuple[Process, bool]:
    """Wait until the worker has `role`; return its last status, and whether it has the role.

    Ends early if the change of role is cancelled, and after `patience` seconds. Raises ProcessNotFound if the worker
    has gone.
    """
    end = time.monotonic() + patience
    while True:
        process = next((each for each in client.status().processes if each.name == worker), None)
        if process is None or not is_up(process):
            raise ProcessNotFound(f"{worker} has gone; its successor has the role that it is configured with")
        if process.role == role or not process.becoming or time.monotonic() >= end:
            return process, process.role == role
        time.sleep(_POLL)
