"""Where a router listens for its operator: a Unix socket that only its own user can open, or a port on loopback.

The operator's API is served there and on no other port, since it asks no client for its name. A Unix
socket lies in a folder of mode 0700 and has mode 0600 itself, so the kernel refuses every other user. A port on
loopback is open to every user of the machine.
"""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from baton.errors import PortInUse, StartupError
from baton.operator_address import _SCHEME, SUFFIX, Loopback, operator_of_router, parse_operator

MAX_PATH_BYTES = 107  # Linux's sun_path has 108, and the last one is 0
_BACKLOG = 128
_SHARED = Path("/tmp")  # noqa: S108 - sticky; the folder in it is checked before it is used


def folder_of(cluster: str) -> Path:
    """The folder with the sockets of that cluster's routers: in $XDG_RUNTIME_DIR where that is ours alone, else in /tmp
    with the user's number in its name."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and _ours_alone(runtime):
        return runtime / "baton" / cluster
    return _SHARED / f"baton-{os.geteuid()}" / cluster


def default_path(cluster: str, router: str) -> Path:
    """The socket of that router where `router.operator` names none."""
    path = folder_of(cluster) / f"{router}{SUFFIX}"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        return _SHARED / f"baton-{os.geteuid()}" / cluster / f"{router}{SUFFIX}"
    return path


def prepare(path: Path, is_default: bool) -> None:
    """Make the folder of a socket and remove the socket that a dead router has left there. `is_default`: the folder
    lies in another one of ours. Raises StartupError, and PortInUse where a process listens."""
    if (length := len(os.fsencode(path))) > MAX_PATH_BYTES:
        raise StartupError(
            f"the path {path} of the operator's socket has {length} bytes, and Linux takes {MAX_PATH_BYTES}; "
            "set router.operator to a shorter one"
        )
    for folder in (path.parent.parent, path.parent) if is_default else (path.parent,):
        _own(folder)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise StartupError(f"{path} is no socket; remove it, or set router.operator to another path")
    if _answers(path):
        raise PortInUse(f"another router listens at {path}; stop it, or set router.operator to another path")
    path.unlink(missing_ok=True)


def listen(path: Path, is_default: bool) -> socket.socket:
    """Return a socket that listens there, which no other user can open. Raises what `prepare` raises."""
    prepare(path, is_default)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # with which Linux makes the file
        listener.bind(os.fsencode(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        remedy = "stop what listens there or change router.operator"
        raise PortInUse(f"can't listen on {path}: {error.strerror}; {remedy}") from None
    listener.setblocking(False)
    return listener


def target(path: Path) -> str:
    """The path as `--operator` takes it."""
    return f"{_SCHEME}{quote(str(path))}"


def target_of(setting: str, cluster: str, router: str) -> str:
    """The address at which one of several routers serves its operator."""
    match parse_operator(operator_of_router(setting, router)):
        case Loopback() as port:
            return str(port)
        case path:
            return target(path or default_path(cluster, router))


def paths(targets: Iterable[str]) -> list[Path]:
    """The paths among these addresses, each of which may name several after one another."""
    return [
        Path(unquote(path.removeprefix(_SCHEME)))
        for target in targets
        if target.startswith(_SCHEME)
        for path in target.split(",")
    ]


def clear(folder: Path) -> None:
    """Remove what dead routers have left in the folder of a cluster, and the folder itself once it is empty."""
    if not _ours_alone(folder):
        return
    for path in folder.glob(f"*{SUFFIX}"):
        if stat.S_ISSOCK(path.lstat().st_mode) and not _answers(path):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something is left in it
        folder.rmdir()
        folder.parent.rmdir()


def _ours_alone(folder: Path) -> bool:
    """Whether it is a folder, no link, of this user, into which no other can write."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _own(folder: Path) -> None:
    """Make a folder that no other user can enter, or check the one that is there. Raises StartupError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise StartupError(f"can't make {folder} for the operator's socket: {error.strerror}") from None
    remedy = "remove it, or set router.operator to the path of a socket elsewhere"
    if not stat.S_ISDIR(status.st_mode):
        raise StartupError(f"{folder} is {'a link' if stat.S_ISLNK(status.st_mode) else 'no folder'}; {remedy}")
    if status.st_uid != os.geteuid():
        raise StartupError(f"{folder} belongs to uid {status.st_uid}, and this router runs as {os.geteuid()}; {remedy}")
    if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        raise StartupError(f"{folder} has mode {mode:04o}, so others may enter it; `chmod 700 {folder}`")


def _answers(path: Path) -> bool:
    """Whether a process listens at that socket, be it a stopped one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fsencode(path)) not in (errno.ECONNREFUSED, errno.ENOENT)
