"""`baton drain`: give a worker nothing new, and wait until it is empty."""

import time
from typing import Annotated

import typer
from rich.markup import escape

from baton.client import Client
from baton.errors import ProcessNotFound
from baton.operator_api import Process
from deploy.commands.running_cluster import operator_client
from deploy.commands.terminal import Json, Name, Operator, command, out, print_json

_POLL = 0.1


@command("baton drain decode-0 --wait 60", "baton drain decode-0 --now", "baton drain decode-0 --undo")
def drain(
    worker: Annotated[str, typer.Argument(help="A worker, such as decode-0; baton status lists them.")],
    now: Annotated[bool, typer.Option("--now", help="Move its requests now; they keep their tokens so far.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Place work on it again.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait until it is empty.")] = 0.0,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Place no new work on a worker; its requests go on. The exit status is 1 if it is not empty after --wait."""
    with operator_client(operator, name) as client:
        process = client.drain(worker, now=now, undo=undo)
        if wait and not undo:
            process = until_empty(client, process, wait)
    if as_json:
        print_json({"worker": worker, "draining": not undo, "attempts": process.attempts})
    elif undo:
        out.print(f"{escape(worker)} is given work again")
    else:
        left = f"{process.attempts} attempts are left" if process.attempts else "it is empty"
        out.print(f"{escape(worker)} is given nothing new; {left}")
    if wait and process.attempts:
        raise typer.Exit(1)


def until_empty(client: Client, worker: Process, patience: float) -> Process:
    """Wait until the router has no attempt on the worker, at most `patience` seconds; return its last status.

    Raises ProcessNotFound if the worker has gone.
    """
    end = time.monotonic() + patience
    while worker.attempts and time.monotonic() < end:
        time.sleep(_POLL)
        listed = (process for process in client.status().processes if process.incarnation == worker.incarnation)
        if (current := next(listed, None)) is None:
            raise ProcessNotFound(f"{worker.name} has gone")
        worker = current
    return worker
