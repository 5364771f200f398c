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


@command(
    "baton reload ./checkpoint-2000", "baton reload ./checkpoint-2000 --patience 5",
    "baton reload ./large-2000 --model large",
)  # fmt: skip
def reload(
    checkpoint: Annotated[Path, typer.Argument(help="A directory with other weights of the same model.")],
    model: Annotated[str, typer.Option(help="Of several models, the one to change; by default the first.")] = "",
    patience: Annotated[float, typer.Option(help="Seconds after which requests that still run fail.")] = 30.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the new weights.")] = 900.0,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Replace the weights of all workers of a model without a restart. Its requests wait meanwhile.

    The exit status is 1 if not all workers serve the new weights after --wait."""
    path = str(checkpoint.absolute())
    tell = None if operator else _supervisor(find(state_folder(name)))
    with operator_client(operator, name) as client:
        model = model or client.status().model_name
        if not (before := _workers(client, model)):
            raise Unavailable(f"no worker of a model {model!r} is live; `baton status` lists the processes")
        client.reload_weights(path, patience=patience, model=model)
        if tell is not None:
            tell(path, model)
        left = until_reloaded(client, model, before, wait)
    if as_json:
        print_json({"checkpoint": path, "done": not left, "left": left})
    elif left:
        out.print(f"not yet: {escape(', '.join(left))}")
    else:
        out.print(f"all workers serve the weights of {escape(path)}")
    if left:
        raise typer.Exit(1)


def until_reloaded(client: Client, model: str, before: Mapping[str, str], patience: float) -> list[str]:
    """Wait until the workers of `before` live in other incarnations; return the names of those that do not.

    Ends after `patience` seconds."""
    end, left = time.monotonic() + patience, list(before)
    while left and time.monotonic() < end:
        time.sleep(_POLL)
        with contextlib.suppress(Unavailable):  # of a busy router; what was ordered goes on
            now = _workers(client, model)
            left = [name for name, incarnation in before.items() if now.get(name, incarnation) == incarnation]
    return left


def _workers(client: Client, model: str) -> Mapping[str, str]:
    """Return the incarnations of a model's workers that are live."""
    processes = (each for each in client.status().processes if each.model == model)
    return {each.name: each.incarnation for each in processes if each.role in ("prefill", "decode") and is_up(each)}


def _supervisor(state: State) -> Callable[[str, str], None]:
    """Return what has the supervisor start a model's workers with the weights of a path from then on. Raises
    RayUnusable."""
    cluster.connect(state.ray, namespace_of(state.name))  # first: Ray reads its environment when it is imported
    import ray

    from deploy.control_plane.actor_registry import SUPERVISOR

    supervisor: Any = ray.get_actor(SUPERVISOR, namespace=namespace_of(state.name))
    return lambda path, model: ray.get(supervisor.reload.remote(path, model), timeout=_PATIENCE)
