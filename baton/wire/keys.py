"""The cluster's CURVE key pair: one per cluster, and every process with it may take part.

Every process has the same pair: the sockets that it binds use it as the server's, the sockets that it connects as the
client's, and a server accepts no other client. The pair does not tell processes apart: incarnations do.

On disk the pair is one line, its secret half in ZMQ's own alphabet (the public half follows from it), in a file that
only its owner can read. A secret that others could read is refused: they may have done so already.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from baton.errors import KeysUnusable

_SECRET_CHARACTERS = 40


@dataclass(frozen=True)
class ClusterKeys:
    """One pair. Its text never holds the secret, so that no log does."""

    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        """Raises KeysUnusable."""
        try:
            if len(self.secret) != _SECRET_CHARACTERS:
                raise ValueError
            self.public_bytes  # noqa: B018 - it raises for what is no key
        except (ValueError, KeyError, zmq.ZMQError):
            raise KeysUnusable("a key is 40 characters of ZMQ's Z85 alphabet, and this is none") from None

    @classmethod
    def generate(cls) -> ClusterKeys:
        _, secret = zmq.curve_keypair()
        return cls(secret.decode())

    @property
    def operator_key(self) -> str:
        """The API key with which the cluster's own processes call a router's operator port over TCP."""
        return hashlib.blake2b(b"baton operator", key=self.secret.encode(), digest_size=32).hexdigest()

    @property
    def public(self) -> bytes:
        """The public half, as text."""
        return zmq.curve_public(self.secret.encode())

    @property
    def public_bytes(self) -> bytes:
        """The public half, as a server is shown it."""
        return z85.decode(self.public)

    @classmethod
    def read_file(cls, path: Path) -> ClusterKeys:
        """Raises KeysUnusable when the file is missing, not for its owner alone, or no key."""
        try:
            with path.open() as file:
                if (mode := os.fstat(file.fileno()).st_mode) & 0o077:
                    raise KeysUnusable(
                        f"the cluster's keys in {path} can be read by others (mode {mode & 0o777:04o}): make new ones "
                        f"with `baton keys cluster FILE`, or, if you trust everybody here, `chmod 600 {path}`"
                    )
                text = file.read(1_000)
        except OSError as error:
            raise KeysUnusable(
                f"can't read the cluster's keys in {path} ({error.strerror}): make some with `baton keys "
                f"cluster {path}`, and give the same file to every process"
            ) from None
        except UnicodeDecodeError:
            text = ""
        try:
            return cls(text.strip())
        except KeysUnusable:
            raise KeysUnusable(
                f"{path} holds no keys: one line of 40 characters, as `baton keys cluster FILE` writes it"
            ) from None

    @classmethod
    def read_or_make(cls, path: Path) -> ClusterKeys:
        """Read the pair in `path`, after making it if there is no such file.

        Several processes may do this at once: all of them get the same pair. Raises KeysUnusable, also where another
        user owns the folder or may write to it, because that user could exchange the file."""
        _check_folder(path.parent)
        if not os.path.lexists(path):
            fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            cls.generate().write(fresh)
            try:
                # A link appears at once and never replaces a file: the pair of the first process stays.
                with contextlib.suppress(FileExistsError):
                    path.hardlink_to(fresh)
            except OSError as error:
                raise KeysUnusable(
                    f"can't make the cluster's keys in {path} ({error.strerror}): make them with `baton keys cluster "
                    "FILE` and set cluster.key_file to that file"
                ) from None
            finally:
                fresh.unlink(missing_ok=True)
        return cls.read_file(path)

    def write(self, path: Path) -> None:
        """Write a new file that only we can read. Raises KeysUnusable when there is one, or none can be made."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise KeysUnusable(f"{path} exists; keys are never overwritten: remove it, or name another") from None
        except OSError as error:
            raise KeysUnusable(f"can't write the cluster's keys to {path}: {error.strerror}") from None
        with os.fdopen(descriptor, "w") as file:
            file.write(self.secret + "\n")


def _check_folder(folder: Path) -> None:
    """Make the folder if need be, and see that it is ours alone to write to. Raises KeysUnusable."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise KeysUnusable(
            f"can't make the folder {folder} for the cluster's keys ({error.strerror}): make keys with `baton keys "
            "cluster FILE` and set cluster.key_file to that file"
        ) from None
    if status.st_uid != os.geteuid():
        raise KeysUnusable(
            f"the folder {folder} of the cluster's keys belongs to uid {status.st_uid}, and this process runs as uid "
            f"{os.geteuid()}: start every process as one user, or set cluster.key_file"
        )
    if status.st_mode & 0o022:
        raise KeysUnusable(
            f"other users may write to the folder {folder} of the cluster's keys (mode {status.st_mode & 0o777:04o}): "
            f"`chmod 700 {folder}`, and remove the keys in it if you don't trust them"
        )
