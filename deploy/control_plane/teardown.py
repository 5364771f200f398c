"""End a cluster without remains: the supervisor first, since it would restart the other processes."""

from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from baton import operator_port
from baton.errors import RayUnusable, StartupError
from deploy.control_plane import cluster, probe, state_file
from deploy.control_plane.reports import OVERVIEW_FILE, read_overview
from deploy.control_plane.state_file import State
from deploy.processes import ProcessIdentity, end

Say = Callable[[str], None]


def namespace_of(cluster: str) -> str:
    return f"baton-{cluster}"


def tear_down(folder: Path, state: State, say: Say) -> None:
    """End the cluster of that state file, and the Ray that Baton started for it. The user's own Ray stays up.

    Also works if some processes, or Ray, have gone already. Raises RayUnusable if the user's Ray runs but does not
    accept us, since its supervisor would restart processes. Raises StartupError if processes are left. In both cases
    the state file stays, so that `down` can be repeated.
    """
    own = state.ray.own
    known = _known(folder, state)
    try:
        cluster.connect(state.ray, namespace_of(state.name))
    except RayUnusable as error:
        if own is None:
            if probe.listens(state.ray.address):
                raise RayUnusable(f"the cluster runs on a Ray that can't be asked to end it: {error}") from None
            say(f"Ray has gone ({error}); ending the processes that are known")
    else:
        say("ending the cluster's processes once their requests have ended")
        overview = read_overview(folder)
        _end_actors(namespace_of(state.name), {*state.routers, *(overview.routers if overview is not None else ())})
        cluster.disconnect()
    left = [process.pid for process in end(known, patience=0)]
    if own is not None:
        say("ending the Ray that Baton started")
        left += cluster.stop(own)
    if left:
        raise StartupError(f"processes {left} can't be ended; look at them with `ps -fp {','.join(map(str, left))}`")
    for sockets in {operator_port.folder_of(state.name), *_sockets(folder, state)}:
        operator_port.clear(sockets)
    (folder / OVERVIEW_FILE).unlink(missing_ok=True)
    if state.made_keys:
        Path(state.key_file).unlink(missing_ok=True)
    state_file.remove(folder)


def _known(folder: Path, state: State) -> list[ProcessIdentity]:
    overview = read_overview(folder)
    views = overview.processes if overview is not None else ()
    named = [state.supervisor, overview.supervisor if overview else None, *(view.identity for view in views)]
    return [identity for identity in named if identity is not None]


def _sockets(folder: Path, state: State) -> list[Path]:
    """Return the folders with operator sockets of the cluster's routers."""
    overview = read_overview(folder)
    routers = [*state.routers.values(), *(overview.routers.values() if overview is not None else ())]
    folders = [path.parent for path in operator_port.paths(router.operator for router in routers)]
    return [path for path in folders if path.name == state.name and path.parent.name.startswith("baton")]


def _end_actors(namespace: str, routers: Set[str]) -> None:
    """End all processes. Workers and stores go on until the routers' streams have ended, or have had their time."""
    from deploy.control_plane.actor_registry import NODE_KEY, ActorRegistry
    from deploy.control_plane.actors import STOP_PATIENCE
    from deploy.control_plane.kv import RayKvKeys
    from deploy.control_plane.supervisor import DESIRED_KEY, DesiredCluster

    keys = RayKvKeys(namespace)
    registry = ActorRegistry(namespace)
    registry.dismiss_supervisor()
    names = set(registry.rediscover())
    registry.poll(1.0)
    patience = STOP_PATIENCE
    if (desired := keys.get(DESIRED_KEY)) is not None:
        patience += DesiredCluster.decode(desired).config.router.shutdown_timeout_ms / 1_000
    gone: dict[str, bool] = {}
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        for some, seconds in ((names & routers, patience), (names - routers, STOP_PATIENCE)):
            gone |= zip(some, pool.map(partial(registry.retire, patience=seconds), some), strict=True)
    for name, ended in gone.items():
        if ended:
            registry.bury(name)
    if not all(gone.values()):
        left = ", ".join(name for name, ended in gone.items() if not ended)
        raise StartupError(f"can't end {left}; repeat `baton down`, or end Ray on the nodes where they run")
    for node_id, _ in list(keys.under(NODE_KEY)):
        keys.delete(NODE_KEY + node_id)
    keys.delete(DESIRED_KEY)
