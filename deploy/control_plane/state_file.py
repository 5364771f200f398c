"""The file by which later commands find a cluster: where it answers, and what of it was started by us.

`<cluster.state_dir>/cluster.json`, mode 0600, replaced atomically. It may be stale, since everything it names may have
been killed. One command at a time works on a cluster: `locked` sees to that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from baton.errors import StartupError
from deploy.addresses import ServiceAddresses, operator_target, target
from deploy.processes import Identity


class OwnRay(msgspec.Struct, frozen=True):
    """A Ray that `baton up` started: everything in the session of that process, and its directory."""

    leader: Identity
    directory: str


class RayLink(msgspec.Struct, frozen=True):
    """How to reach the cluster's Ray."""

    address: str
    mode: Literal["token", "disabled"]
    token_path: str = ""  # empty: Ray's own default
    own: OwnRay | None = None  # none: the user's; it stays up after `baton down`


class State(msgspec.Struct, frozen=True):
    """What one cluster consists of."""

    name: str
    ray: RayLink
    log_dir: str
    routers: Mapping[str, ServiceAddresses] = {}  # by name, the first one first; none until they serve
    model: str = ""
    supervisor: Identity | None = None
    created: str = ""
    key_file: str = ""  # the cluster's keys
    made_keys: bool = False  # by `baton up`, for this cluster: they end with it

    @property
    def first(self) -> ServiceAddresses:
        """Of the first router."""
        return next(iter(self.routers.values()))

    @property
    def target(self) -> str:
        """For a client: of any router that can be reached."""
        return target(self.routers.values())

    @property
    def operator(self) -> str:
        """For the operator's calls: of any router that can be reached."""
        return operator_target(self.routers.values())


def path(folder: Path) -> Path:
    return folder / "cluster.json"


def read(folder: Path) -> State | None:
    """The state of the cluster of that folder, or none. Raises StartupError for a file that is not ours."""
    try:
        return msgspec.json.decode(path(folder).read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError(f"can't read {path(folder)} ({error}); remove it if no cluster of that name runs") from None


def write(folder: Path, state: State) -> None:
    replace(path(folder), msgspec.json.format(msgspec.json.encode(state)) + b"\n")


def remove(folder: Path) -> None:
    path(folder).unlink(missing_ok=True)


def replace(target: Path, content: bytes) -> None:
    """Write a file that nobody else may read, so that readers see the old one or the new one. Raises StartupError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        fresh.replace(target)
    except OSError as error:
        raise StartupError(f"can't write {target}: {error.strerror}") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the cluster for this command. The kernel lets go when the command ends, however it ends.
    Raises StartupError when another command holds it, or there can be no such folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StartupError(f"can't make {folder}: {error.strerror}; it is below the home directory") from None
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(
                f"another baton command is working on the cluster {folder.name!r}; wait until it has ended"
            ) from None
        yield
