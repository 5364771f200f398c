"""`baton scale`: set the desired number of workers, and wait until they are live."""

import time
from typing import Annotated, Any

import typer
from rich.markup import escape

from baton.client import Client, is_up
from baton.errors import ConfigError, StartupError
from deploy.commands.progress import Progress
from deploy.commands.running_cluster import find
from deploy.commands.terminal import Json, Name, command, err, out, print_json, state_folder
from deploy.control_plane import cluster, state_file
from deploy.control_plane.bring_up import Watch, ask_overview, why_failed
from deploy.control_plane.reports import ClusterOverview
from deploy.control_plane.state_file import State
from deploy.control_plane.teardown import namespace_of
from deploy.placement.desired import ClusterScale

_POLL = 0.25
_PATIENCE = 10.0  # seconds, for one answer of the supervisor


@command(
    "baton scale --decode 3", "baton scale --prefill 2 --decode 2 --timeout 120", "baton scale --model large --decode 2"
)
def scale(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers from now on.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers from now on.")] = None,
    model: Annotated[str, typer.Option(help="The model whose workers are meant, by the name in answers.")] = "",
    name: Name = "baton",
    timeout: Annotated[float, typer.Option(help="Seconds within which the change must be complete.")] = 900.0,
    as_json: Json = False,
) -> None:
    """Change the number of workers while the cluster serves, and return once they are live."""
    folder = state_folder(name)
    state = find(folder)
    with state_file.locked(folder), Progress(err, tell_first=False) as progress:
        model = model or state.model
        prefills, decodes = rescale(state, model, prefill, decode, timeout, progress.watch)
    if as_json:
        print_json({"name": state.name, "model": model, "prefill": prefills, "decode": decodes})
    else:
        whose = f" of {escape(model)}" if state.further_models else ""
        out.print(f"{state.name} has {prefills} prefill and {decodes} decode workers{whose}")


def rescale(
    state: State, model: str, prefill: int | None, decode: int | None, patience: float, watch: Watch
) -> tuple[int, int]:
    """Change the number of a model's workers and wait until the cluster has it; None leaves a number as it is. Return
    the numbers of prefill and decode workers.

    Raises ConfigError for an impossible scale and an unknown model. Raises StartupError after `patience` seconds,
    though the supervisor goes on trying. Raises RayUnusable or Unavailable if the supervisor can't be reached.
    """
    if prefill is None and decode is None:
        raise ConfigError("say how many: --prefill N, --decode M, or both")
    if (prefill is not None and prefill < 0) or (decode is not None and decode < 1):
        raise ConfigError("a cluster has at least one decode worker, and no fewer than zero prefill workers")
    models = (state.model, *state.further_models)
    if model not in models:
        raise ConfigError(f"{state.name} serves no model {model!r}; it serves {', '.join(models)}")
    cluster.connect(state.ray, namespace_of(state.name))
    before = ask_overview(state.name, _PATIENCE)
    watch(before)
    target = before.scale.changed(pool := models.index(model), prefill, decode)
    _tell(state.name, target)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        overview = ask_overview(state.name, _PATIENCE)
        watch(overview)
        if overview.scale == target and overview.settled and not _mourned(state, overview):
            return target.by_pool[pool]
        if (failure := why_failed(overview, before)) is not None:
            raise failure
        time.sleep(_POLL)
    raise StartupError(f"it has not come to that after {patience:.0f} s; `baton status` shows what is missing")


def _mourned(state: State, overview: ClusterOverview) -> set[str]:
    """Return stopped processes that the router still lists as live.

    The router may place work on them until it has missed their heartbeats for cluster.heartbeat_timeout_ms.
    """
    with Client(operator=state.operator, api_key=state.operator_key) as client:
        listed = client.status().processes
    live = {process.name for process in listed if is_up(process)}
    return live - {view.name for view in overview.processes}


def _tell(name: str, target: ClusterScale) -> None:
    import ray

    from deploy.control_plane.actor_registry import SUPERVISOR

    supervisor: Any = ray.get_actor(SUPERVISOR, namespace=namespace_of(name))
    ray.get(supervisor.scale.remote(target), timeout=_PATIENCE)
