"""Connect to a Ray and disconnect: the user's Ray, or one that Baton starts and ends.

Our own Ray is one `ray start --head --block` in its own session, on loopback, with a token that only this user can
read. The session proves ownership: exactly the descendants of our process belong to it. So our Ray is ended by the ids
of these processes. `ray stop` is never used, since it ends every Ray on the machine.
"""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.errors import RayUnusable, StartupError
from deploy.control_plane.probe import OWN_PREFIX, RayAnswer, ask_ray
from deploy.control_plane.state_file import OwnRay, RayLink
from deploy.processes import ProcessIdentity, end, session_members

START_PATIENCE = 180.0  # seconds; about 4 on an idle machine, and 56 where seven others computed on two cores
_DRIVER_PATIENCE = 20.0  # seconds until a Ray that answers accepts a driver; about 1 on an idle machine
_ROUNDS = 5  # of searches for remaining processes of our Ray
# Ray takes 127.0.0.1 for "find my real address" and then listens on every interface. With this variable, meant for
# desktops, it rules out other nodes and listens on loopback only.
_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_OBJECT_STORE_BYTES = 100_000_000  # Baton's pages never pass through Ray


def launch(log: Path, dashboard: bool = False) -> OwnRay:
    """Start our own Ray and return at once. Its output goes to `log`.

    Raises RayUnusable, and StartupError if the log's folder can't be made.
    """
    executable = Path(sys.executable).with_name("ray")
    if not executable.exists():
        raise RayUnusable(f"there is no {executable}; install Baton with its dependencies: pip install baton")
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StartupError(f"can't make {log.parent}: {error.strerror}; give another: --set cluster.log_dir=") from None
    directory = Path(tempfile.mkdtemp(prefix=Path(OWN_PREFIX).name, dir=Path(OWN_PREFIX).parent))
    token = _token_path(directory)
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    command: list[str] = [str(executable), "start", "--head", "--block", "--port=0"]
    command += [f"--temp-dir={_temp_dir(directory)}", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    command += [f"--include-dashboard={'true' if dashboard else 'false'}", "--include-log-monitor=false"]
    # Ray does not choose these two ports itself: on the defaults, two Rays on one machine would collide.
    command += [f"--ray-client-server-port={_free_port()}", f"--dashboard-agent-listen-port={_free_port()}"]
    command += ["--disable-usage-stats"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment |= _ON_LOOPBACK
    # Ray keeps its workers' stdout and stderr in files, which it rotates only with these settings.
    environment |= {"RAY_ROTATION_MAX_BYTES": str(64 * 2**20), "RAY_ROTATION_BACKUP_COUNT": "2"}
    environment |= {"RAY_worker_niceness": "0"}  # by default Ray runs actors at 15, behind everything else
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - a list, no shell
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return OwnRay(ProcessIdentity.of(process.pid), str(directory))


def wait_ready(own: OwnRay, log: Path, patience: float = START_PATIENCE) -> RayLink:
    """Wait until our Ray accepts drivers. Raises RayUnusable with the end of its output."""
    directory = Path(own.directory)
    address_file = _temp_dir(directory) / "ray_current_cluster"
    token = _token_path(directory)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not own.leader.gone():
        address = address_file.read_text().strip() if address_file.exists() else ""
        if address and ask_ray(address, token.read_text()) is RayAnswer.WELCOME:
            return RayLink(address, "token", str(token), own)
        time.sleep(0.05)
    problem = "has ended" if own.leader.gone() else f"is not ready after {patience:.0f} s"
    last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-5:])
    raise RayUnusable(f"the Ray that Baton started {problem}; its output is {log}:\n{last}")


def stop(own: OwnRay) -> list[int]:
    """End our whole Ray and remove its directory. Return the pids that could not be ended, normally none."""
    # No SIGTERM: the head would drain for up to 30 s, and nothing in it needs saving. The leader is killed first.
    # Processes that the others start meanwhile belong to the session as well.
    left = end([own.leader], patience=0)
    for _ in range(_ROUNDS):
        if not (members := session_members(own.leader)):
            break
        left = end(members, patience=0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(own.leader.pid, os.WNOHANG)  # reaps it if this command also started it
    if own.directory.startswith(OWN_PREFIX):
        shutil.rmtree(own.directory, ignore_errors=True)
    return [process.pid for process in left]


def connect(link: RayLink, namespace: str) -> None:
    """Make this process a driver of that Ray.

    Raises RayUnusable: within probe.PATIENCE if no Ray answers, and within _DRIVER_PATIENCE more if this machine is not
    one of its nodes.
    """
    if ask_ray(link.address, _token(link)) is not RayAnswer.WELCOME:
        raise RayUnusable(f"Ray at {link.address} has gone, or refuses our token; see `baton doctor`")
    os.environ["RAY_AUTH_MODE"] = link.mode
    if link.token_path:
        os.environ["RAY_AUTH_TOKEN_PATH"] = link.token_path
        os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray would prefer it, and it may belong to another Ray
    if link.own is not None:
        os.environ |= _ON_LOOPBACK
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    problem: list[Exception] = []
    thread = threading.Thread(target=_init, args=(link.address, namespace, problem), daemon=True)
    with _native_stderr_muted():
        thread.start()
        thread.join(_DRIVER_PATIENCE)
    if thread.is_alive():
        raise RayUnusable(
            f"Ray at {link.address} answers, but takes no drivers from this machine within {_DRIVER_PATIENCE:.0f} s; "
            f"is this machine one of its nodes? Join it with `ray start --address={link.address}`, or restart Ray"
        )
    if problem:
        raise RayUnusable(f"Ray at {link.address} can't be used: {str(problem[0]).strip()}")


def disconnect() -> None:
    """Disconnect this process from Ray, if it is a driver."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def _init(address: str, namespace: str, problem: list[Exception]) -> None:
    try:
        import ray
        from ray._private import worker

        ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.CRITICAL)
        # Ray prints every actor's death to the driver's output. The supervisor reports those.
        worker.print_worker_logs = lambda *_args, **_kwargs: None
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is handed to the caller's thread
        problem.append(error)


@contextlib.contextmanager
def _native_stderr_muted() -> Iterator[None]:
    """Discard writes to file descriptor 2, since Ray's C++ side logs there at its start, whatever its level.

    Python's own stderr still works.
    """
    python_stderr, duplicate = sys.stderr, os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere, os.fdopen(os.dup(duplicate), "w", buffering=1) as still_stderr:
            sys.stderr = still_stderr
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(duplicate, 2)
        os.close(duplicate)
        sys.stderr = python_stderr


def _token(link: RayLink) -> str | None:
    if link.mode == "disabled":
        return None
    if not link.token_path:
        return os.environ.get("RAY_AUTH_TOKEN", "")
    try:
        return Path(link.token_path).read_text().strip()
    except OSError:
        return ""


def _token_path(directory: Path) -> Path:
    return directory / "token"


def _temp_dir(directory: Path) -> Path:
    return directory / "ray"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
