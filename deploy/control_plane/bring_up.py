"""`baton up`: start a cluster from a configuration, or raise a typed error and leave nothing behind."""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from baton.addresses import ServiceAddresses
from baton.checkpoints import hub, named
from baton.client import Client
from baton.config import Config, ModelConfig
from baton.errors import BatonError, RayUnusable, StartupError, Unavailable
from baton.hosts import is_loopback
from baton.wire import ClusterKeys
from deploy.control_plane import checkpoint, cluster, gpu_checks, preflight, probe, state_file
from deploy.control_plane.reconcile import JOIN_PATIENCE
from deploy.control_plane.reports import ClusterOverview
from deploy.control_plane.state_file import RayLink, State
from deploy.control_plane.teardown import Say, namespace_of, tear_down
from deploy.interrupts import held, interruptible
from deploy.placement.desired import scale_of

RayChoice: TypeAlias = Literal["auto", "own", "join"]
Watch: TypeAlias = Callable[[ClusterOverview], None]

_POLL = 0.2
_SUPERVISOR_PATIENCE = 60.0  # seconds until its first answer
_REPAIRS = 2  # unexplained crashes of a process during the start; one more and `up` fails


@contextlib.contextmanager
def bring_up(
    config: Config, choice: RayChoice, dashboard: bool, patience: float, say: Say, watch: Watch
) -> Iterator[State]:
    """Start the cluster and yield once it serves. The caller holds the cluster's lock.

    If this fails, or the context's body does, or a signal ends either, all that was started is taken down. Raises
    BatonError, and Interrupted after a signal.
    """
    folder = config.cluster.state_dir
    with held():
        preflight.check_name_free(folder)
        if (stale := state_file.read_state(folder)) is not None:
            say("clearing away what a cluster that died left behind")
            tear_down(folder, stale, lambda _: None)
        named = bool(config.cluster.key_file)
        with interruptible():
            preflight.check(config, say)
            gpu_checks.warn(config, say)
            made_keys = not named and not config.cluster.key_path.exists()
            config = _settle(config, say)
            checked = [checkpoint.check(pool) for pool in config.pools()]
            config = config.with_models([pool.model for pool, _ in checked])
            for pool, notes in checked:
                for note in notes:
                    say(f"{pool.model.served_name}: {note}" if config.models else note)
            checkpoint.check_cascades(config)
            _compile_kernels(config, say)
        try:
            with interruptible():
                state = _on_ray(config, folder, choice, dashboard, made_keys, say)
                # The processes get the keys from memory: their nodes need no copy of the file.
                keys = (ClusterKeys.read_file if named else ClusterKeys.read_or_make)(Path(config.cluster.key_file))
                _start_supervisor(config, folder, keys, patience)
                say("starting the cluster's processes")
                overview = _wait_serving(state.name, patience, watch)
                state = _complete(state, overview)
                state_file.write(folder, state)
                yield state
        except BaseException:
            _give_up(folder, say)
            raise


def _give_up(folder: Path, say: Say) -> None:
    """Take down what was started. The error that led here is raised, and not one of this."""
    if (written := state_file.read_state(folder)) is None:
        return
    say("taking down what was started")
    cluster.disconnect()
    try:
        tear_down(folder, written, lambda _: None)
    except BatonError as left:
        say(f"not all of it could be taken down; `baton down` ends it: {left}")


def _settle(config: Config, say: Say) -> Config:
    """Return the configuration with absolute paths, and with a hub model or a named one downloaded.

    Ray's processes have another working directory and may have another home. If other nodes may join, a named model
    keeps its name, by which each node finds or fetches it at a place of its own.
    """
    config = config.with_models([_settle_model(pool, say) for pool in config.pools()])
    cluster = msgspec.structs.replace(
        config.cluster,
        log_dir=str(config.cluster.logs.expanduser().resolve()),
        trace_dir=_absolute(config.cluster.trace_dir),
        key_file=str(config.cluster.key_path.resolve()),
    )
    disk = msgspec.structs.replace(config.disk, path=_absolute(config.disk.path))
    api = msgspec.structs.replace(config.api, keys_file=_absolute(str(config.api_keys_path or "")))
    tls = msgspec.structs.replace(
        config.tls, **{name: _absolute(path) for name, path in msgspec.structs.asdict(config.tls).items()}
    )
    return msgspec.structs.replace(config, cluster=cluster, disk=disk, api=api, tls=tls)


def _settle_model(pool: Config, say: Say) -> ModelConfig:
    model = pool.model
    path, known = hub.resolve(model.path, say=say), named.MODELS.get(model.path)
    if (draft := model.speculative_config) is not None and draft.model:
        draft = msgspec.structs.replace(draft, model=str(hub.resolve(draft.model, say=say).resolve()))
    by_name = known is not None and path == known.folder and not is_loopback(pool.router.host)
    return msgspec.structs.replace(
        model,
        path=model.path if by_name else str(path.resolve()),
        draft_model=model.draft_model and str(hub.resolve(model.draft_model, say=say).resolve()),
        speculation_heads=model.speculation_heads and str(hub.resolve(model.speculation_heads, say=say).resolve()),
        speculative_config=draft,
        served_model_name=model.served_model_name or Path(model.path).resolve().name,
    )


def _compile_kernels(config: Config, say: Say) -> None:
    """Compile the CPU kernels before the workers start, if they will need them and this user has not compiled them.

    Several workers would wait for one of them without a word. On other nodes the first worker compiles."""
    from engine.cpu import build

    on_cpu = any(
        pool.model.native and (preflight.runs_on_cpu(pool, "prefill") or preflight.runs_on_cpu(pool, "decode"))
        for pool in config.pools()
    )
    if on_cpu and build.must_compile():
        say("compiling kernels for this processor, which takes about half a minute, once")
        build.library()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""


def _on_ray(config: Config, folder: Path, choice: RayChoice, dashboard: bool, made_keys: bool, say: Say) -> State:
    """Connect to a Ray and write the state file that names it.

    Raises RayUnusable, and StartupError if that Ray already runs a cluster of this name.
    """
    state = State(
        name=config.cluster.name,
        ray=RayLink("", "disabled"),
        log_dir=config.cluster.log_dir,
        model=config.model.served_name,
        further_models=tuple(each.model.served_name for each in config.models),
        key_file=config.cluster.key_file,
        api_keys_file=config.api.keys_file,
        tls=bool(config.tls.cert_file),
        made_keys=made_keys,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    namespace = namespace_of(config.cluster.name)
    address = None if choice == "own" else probe.find()
    if address is None and choice == "join":
        raise RayUnusable("no Ray runs here; start one with `ray start --head`, or leave out --ray join")
    if address is not None:
        link = probe.link(address)
        say(f"joining the Ray at {address}")
        if link.mode == "disabled":
            say(
                "warning: this Ray asks nobody for a token: whoever reaches its ports can run code here. "
                "Stop it, then `ray get-auth-token --generate` and `RAY_AUTH_MODE=token ray start --head`"
            )
        cluster.connect(link, namespace)
        _check_namespace_free(config.cluster.name)
    else:
        say("starting a Ray of our own")
        log = Path(config.cluster.log_dir) / "ray.log"
        with held():  # a Ray that no state file names would stay
            own = cluster.launch(log, dashboard)
            try:
                state_file.write(folder, msgspec.structs.replace(state, ray=RayLink("", "token", own=own)))
            except StartupError:
                cluster.stop(own)
                raise
        link = cluster.wait_ready(own, log)
        cluster.connect(link, namespace)
    state = msgspec.structs.replace(state, ray=link)
    state_file.write(folder, state)
    return state


def _check_namespace_free(name: str) -> None:
    import ray

    listed: Any = ray.util.list_named_actors(all_namespaces=True)
    if any(actor["namespace"] == namespace_of(name) for actor in listed):
        raise StartupError(
            f"this Ray runs a cluster named {name!r} already, started from another home or machine; end it from "
            "there, or give this one another name: --name"
        )


def _start_supervisor(config: Config, folder: Path, keys: ClusterKeys, patience: float) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from deploy.control_plane.actor_registry import SUPERVISOR
    from deploy.control_plane.supervisor import DesiredCluster, Supervisor

    # On this node, where the router will run too, so that the router's addresses work for the supervisor. Not with
    # soft=True: Ray 2.60 would then use any node. Without this node the router is lost anyway.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {
        "name": SUPERVISOR,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 4,
        "scheduling_strategy": here,
    }
    desired = DesiredCluster(config, scale_of(config), str(folder), join_patience=max(JOIN_PATIENCE, patience))
    ray.remote(Supervisor).options(**options).remote(namespace_of(config.cluster.name), desired, keys)


def ask_overview(name: str, patience: float) -> ClusterOverview:
    """Return the supervisor's current overview.

    Raises Unavailable if it does not answer in time, RayUnusable if Ray can't run it, StartupError if there is none.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    from deploy.control_plane.actor_registry import SUPERVISOR, first_line

    try:
        supervisor: Any = ray.get_actor(SUPERVISOR, namespace=namespace_of(name))
        return msgspec.json.decode(bytes(ray.get(supervisor.overview.remote(), timeout=patience)), type=ClusterOverview)
    except ValueError:
        raise StartupError(f"this Ray runs no cluster named {name!r}") from None
    except GetTimeoutError:
        raise Unavailable(f"the supervisor of {name!r} does not answer within {patience:.0f} s") from None
    except RayActorError as error:
        raise RayUnusable(
            f"Ray can't run the supervisor ({first_line(error)}); start Ray from the environment in which Baton is "
            "installed, so that its workers can import it"
        ) from None


def _wait_serving(name: str, patience: float, watch: Watch) -> ClusterOverview:
    deadline = time.monotonic() + patience
    overview = ask_overview(name, _SUPERVISOR_PATIENCE)
    while time.monotonic() < deadline:
        watch(overview)
        if (failure := why_failed(overview)) is not None:
            raise failure
        if overview.settled and all(map(_serves, overview.routers.values())):
            return overview
        time.sleep(_POLL)
        overview = ask_overview(name, _SUPERVISOR_PATIENCE)
    late = ", ".join(f"{view.name} ({view.condition})" for view in overview.processes if view.condition != "live")
    raise StartupError(
        f"the cluster does not serve after {patience:.0f} s; not live: {late or 'none, but a router is not ready'}. "
        "Give it longer with --timeout, or see the logs"
    )


def _serves(router: ServiceAddresses) -> bool:
    with Client(operator=router.operator) as client:
        return client.serving()


def why_failed(overview: ClusterOverview, before: ClusterOverview | None = None) -> BatonError | None:
    """Return the error that stops a cluster from starting, or from changing since `before`; None while it may succeed.

    A process that reported an error would fail again. One that died without an error may be restarted `_REPAIRS` times.
    """
    then = {view.name: view for view in before.processes} if before is not None else {}
    for view in overview.processes:
        old = then.get(view.name)
        restarts = view.restarts - (old.restarts if old is not None else 0)
        happened = old is None or restarts > 0 or view.failure != old.failure
        if view.condition in ("live", "ending") or view.failure is None or not happened:
            continue
        if view.failure.reason != Unavailable.reason or restarts > _REPAIRS:
            return view.failure.error(view.name)
    return None


def _complete(state: State, overview: ClusterOverview) -> State:
    return msgspec.structs.replace(state, routers=overview.routers, supervisor=overview.supervisor)
