"""`baton reload`: replace the weights of a running cluster, and wait until all workers serve the new ones."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from baton.client import Client, is_up
from baton.errors import Unavailable
from deploy.commands.running_cluster import find, operator_client
from deploy.commands.terminal import Json, Name, Operator, command, out, print_json, state_folder
from deploy.control_plane import cluster
from deploy.control_plane.state_file import State
from deploy.control_plane.teardown import namespace_of

_POLL = 0.1
_PATIENCE = 10.0  # seconds, for one answer of the supervisor


@command("baton reload ./checkpoint-2000", "baton reload ./checkpoint-2000 --patience 5")
def reload(
    checkpoint: Annotated[Path, typer.Argument(help="A directory with other weights of the same model.")],
    patience: Annotated[float, typer.Option(help="Seconds after which requests that still run fail.")] = 30.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the new weights.")] = 900.0,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Replace the weights of all workers without a restart. Requests wait meanwhile.

    The exit status is 1 if not all workers serve the new weights after --wait."""
    path = str(checkpoint.absolute())
    tell = None if operator else _supervisor(find(state_folder(name)))
    with operator_client(operator, name) as client:
        before = _workers(client)
        client.reload_weights(path, patience=patience)
        if tell is not None:
            tell(path)
        left = until_reloaded(client, before, wait)
    if as_json:
        print_json({"checkpoint": path, "done": not left, "left": left})
    elif left:
        out.print(f"not yet: {escape(', '.join(left))}")
    else:
        out.print(f"all workers serve the weights of {escape(path)}")
    if left:
        raise typer.Exit(1)


def until_reloaded(client: Client, before: Mapping[str, str], patience: float) -> list[str]:
    """Wait until each worker is live in another incarnation than `before`; return the names of those that are not.

    Ends after `patience` seconds."""
    end, left = time.monotonic() + patience, list(before)
    while left and time.monotonic() < end:
        time.sleep(_POLL)
        with contextlib.suppress(Unavailable):  # of a busy router; what was ordered goes on
            now = _workers(client)
            left = [name for name, incarnation in before.items() if now.get(name, incarnation) == incarnation]
    return left


def _workers(client: Client) -> Mapping[str, str]:
    """Return the incarnations of the workers that are live."""
    processes = client.status().processes
    return {each.name: each.incarnation for each in processes if each.role in ("prefill", "decode") and is_up(each)}


def _supervisor(state: State) -> Callable[[str], None]:
    """Return what has the supervisor start workers with the weights of a path from then on. Raises RayUnusable."""
    cluster.connect(state.ray, namespace_of(state.name))  # first: Ray reads its environment when it is imported
    import ray

    from deploy.control_plane.actor_registry import SUPERVISOR

    supervisor: Any = ray.get_actor(SUPERVISOR, namespace=namespace_of(state.name))
    return lambda path: ray.get(supervisor.reload.remote(path), timeout=_PATIENCE)
