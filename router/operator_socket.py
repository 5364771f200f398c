"""Where the operator's calls (`Cluster`, `Cache`) are served: a Unix socket that only this user can reach.

    $XDG_RUNTIME_DIR/baton/<cluster>/<router>.sock      without that variable: /tmp/baton-<uid>/<cluster>/<router>.sock

`router.operator` may name a port of loopback instead, which every user of the machine reaches.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from baton.errors import ConfigError, PortInUse, StartupError
from baton.hosts import is_loopback

_LONGEST = 107  # bytes of a Unix socket's path, by the kernel


def bind_address(configured: str, cluster: str, router: str) -> str:
    """What gRPC is to listen at: host:port, or "unix:" with a path whose folder is there and ours.

    Raises ConfigError for an address that is not on loopback, StartupError for a folder that another user owns or may
    enter, PortInUse where another router listens."""
    if configured:
        host, _, port = configured.rpartition(":")
        if not (port.isdigit() and is_loopback(host.strip("[]"))):
            raise ConfigError(
                f"router.operator is {configured!r}; it must be host:port on loopback, since whoever reaches it rules "
                "the cluster. Leave it empty for a Unix socket, and tunnel to that (ssh -L) from other hosts"
            )
        return configured
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    top = Path(runtime, "baton") if runtime else Path("/tmp", f"baton-{os.getuid()}")  # noqa: S108 - checked below
    for folder in (top, top / cluster):
        _own(folder)
    path = top / cluster / f"{router}.sock"
    if len(os.fsencode(path)) > _LONGEST:
        raise StartupError(f"{path} is too long for a Unix socket ({_LONGEST} bytes); set a shorter XDG_RUNTIME_DIR")
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(str(path))
        raise PortInUse(f"another router listens at {path}; stop it, or give this cluster another name")
    path.unlink(missing_ok=True)  # of a router that has died
    return f"unix:{path}"


def remove(address: str) -> None:
    """Remove the socket, and its folder where that is empty."""
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        with suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def _own(folder: Path) -> None:
    """Make a folder for this user alone. Raises StartupError where it is not, or can't be."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise StartupError(f"can't make {folder} for the operator's socket: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StartupError(
            f"{folder} is no directory of user {os.getuid()} alone (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}); remove it, or set XDG_RUNTIME_DIR to one that is"
        )
