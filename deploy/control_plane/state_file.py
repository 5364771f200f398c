"""The file by which later commands find a cluster: its addresses, and the Ray and keys that `baton up` made for it.

`<cluster.state_dir>/cluster.json`, mode 0600, replaced atomically. It may be stale, since the processes it names may
have been killed. `locked` ensures that one command at a time works on a cluster.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from baton import file_lock, private_folder
from baton.addresses import ServiceAddresses, operator_target
from baton.errors import KeysUnusable, StartupError
from baton.wire import ClusterKeys
from deploy.processes import ProcessIdentity


class OwnRay(msgspec.Struct, frozen=True):
    """A Ray that `baton up` started: all processes in the session of `leader`, and its directory."""

    leader: ProcessIdentity
    directory: str


class RayLink(msgspec.Struct, frozen=True):
    """How to reach the cluster's Ray."""

    address: str
    mode: Literal["token", "disabled"]
    token_path: str = ""  # empty: Ray's default file
    own: OwnRay | None = None  # None: the user's Ray, which stays up after `baton down`


class State(msgspec.Struct, frozen=True):
    """The contents of the state file of one cluster."""

    name: str
    ray: RayLink
    log_dir: str
    routers: Mapping[str, ServiceAddresses] = {}  # by name, first router first; empty until they serve
    model: str = ""
    further_models: tuple[str, ...] = ()  # served beside it
    supervisor: ProcessIdentity | None = None
    created: str = ""
    key_file: str = ""  # the cluster's keys
    api_keys_file: str = ""  # the clients' keys
    tls: bool = False  # at the doors to clients
    made_keys: bool = False  # `baton up` made them for this cluster, so `baton down` removes them

    @property
    def first(self) -> ServiceAddresses:
        return next(iter(self.routers.values()))

    @property
    def target(self) -> str:
        """The gRPC target for clients, which all routers share."""
        return self.first.grpc

    @property
    def operator(self) -> str:
        """The address for the operator's calls: the first router that can be reached."""
        return operator_target(self.routers.values())

    @property
    def operator_key(self) -> str | None:
        """The API key for the operator's calls over TCP, made of the cluster's keys; None if they can't be read."""
        try:
            return ClusterKeys.read_file(Path(self.key_file)).operator_key if self.key_file else None
        except KeysUnusable:
            return None


def path(folder: Path) -> Path:
    return folder / "cluster.json"


def read_state(folder: Path) -> State | None:
    """Return the state of the cluster of that folder, or None. Raises StartupError for an unreadable file."""
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
    """Replace a file of mode 0600 atomically: readers see the old one or the new one. Raises StartupError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with private_folder.replacing(target) as file:
            file.write(content)
    except OSError as error:
        raise StartupError(f"can't write {target}: {error.strerror}") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the cluster for this command. The kernel releases the lock when the command ends, even if it is killed.

    Raises StartupError if another command holds the lock, or if the folder can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StartupError(f"can't make {folder}: {error.strerror}; it is below the home directory") from None
    late = StartupError(f"another baton command is working on the cluster {folder.name!r}; wait until it has ended")
    with file_lock.locked(folder / "lock", 0.0, late):
        yield
