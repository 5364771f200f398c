"""API keys: the file that holds their hashes, and the keys of a router, which follow that file.

A key is 32 random bytes. No guess finds one, so a plain SHA-256 hides it, and a slow hash would only delay requests. A
key is found by its hash. How long that takes says nothing of the key, because no client can choose its hash.

The file is for its owner alone, and is replaced as a whole. Once it exists, every client needs a key, also after the
last key was removed. Where it vanishes while a router runs, that router refuses every client.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton import private_folder
from baton.errors import InvalidRequest, KeyNotFound, KeysUnusable, shown
from baton.logs import RateLimitedLog

log = RateLimitedLog(logging.getLogger(__name__))

_PREFIX = "baton-"
_MAX_KEY = 200  # characters of a credential; a longer one is no key
_MAX_FILE = 64 * 2**20
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Limit = Annotated[int, Meta(ge=1)] | None


class Identity(Struct, frozen=True, kw_only=True):
    """A client: whose pages and quotas it uses, what it may do, and how much. No limit is None."""

    name: str  # of its key; "": it has none
    tenant: str = ""
    operator: bool = False  # it may watch and change the cluster
    max_body_bytes: Limit = None
    max_prompt_tokens: Limit = None
    max_streams: Limit = None  # requests at a time


ANONYMOUS = Identity(name="")


class ApiKey(Identity, frozen=True, kw_only=True):
    """A key as the file has it. The key itself is nowhere."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    created: str = ""  # ISO 8601


class _KeysFile(Struct, frozen=True):
    keys: tuple[ApiKey, ...] = ()


def hash_of(key: str) -> str:
    """Return the hash under which the file has a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...] | None:
    """Return the keys of a file; None: there is no file. Raises KeysUnusable if it is broken or others can read it."""
    try:
        with path.open("rb") as file:
            if (mode := os.fstat(file.fileno()).st_mode) & 0o077:
                raise KeysUnusable(
                    f"the API keys in {path} can be read by others (mode {mode & 0o777:04o}): `chmod 600 {path}`"
                )
            content = file.read(_MAX_FILE)
        return msgspec.json.decode(content, type=_KeysFile).keys
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeysUnusable(f"can't read the API keys in {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise KeysUnusable(f"{path} holds no API keys ({error}); `baton keys add` writes that file") from None


def add_key(path: Path, key: Identity, created: str) -> str:
    """Add a key with that name, tenant and limits to the file, and return it: it is not shown again.

    Raises InvalidRequest for a name that is taken or is none, and KeysUnusable."""
    for what, word in (("name", key.name), ("tenant", key.tenant)):
        if not _WORD.fullmatch(word) and (word or what == "name"):
            raise InvalidRequest(
                f"{what} is {shown(word)!r}; it must have 1 to 64 letters, digits, dots, dashes and underscores, and "
                "begin with a letter or digit"
            )
    if not key.tenant and not key.operator:
        raise InvalidRequest("a key needs a tenant: --tenant NAME; only an operator's key may be without one")
    secret = _PREFIX + secrets.token_urlsafe(32)
    with _changed(path) as keys:
        if key.name in keys:
            raise InvalidRequest(f"there is a key named {key.name!r} already; remove it first, or take another name")
        keys[key.name] = ApiKey(**msgspec.structs.asdict(key), sha256=hash_of(secret), created=created)
    return secret


def remove(path: Path, name: str) -> int:
    """Remove the key of that name, and return how many are left. Raises KeyNotFound and KeysUnusable."""
    with _changed(path) as keys:
        if keys.pop(name, None) is None:
            raise KeyNotFound(f"there is no key named {shown(name)!r} in {path}; `baton keys list` shows all")
    return len(keys)


@contextlib.contextmanager
def _changed(path: Path) -> Iterator[dict[str, ApiKey]]:
    """Yield the keys of the file by name, and write them back. One process at a time changes a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = {key.name: key for key in read_keys(path) or ()}
            yield keys
            with private_folder.replacing(path) as file:
                file.write(msgspec.json.format(msgspec.json.encode(_KeysFile(tuple(keys.values())))) + b"\n")
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise KeysUnusable(f"can't write the API keys to {path}: {error.strerror}") from None


def file_mark(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written or replaced; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ino, status.st_size, status.st_mode)


class KeyRing:
    """The keys that a router knows. `refresh` follows the file; `find` never touches it."""

    def __init__(self, path: Path | None, *, required: bool = False, operator_key: str | None = None) -> None:
        """Read the file. `path`: None if there can be no such file. `required`: clients need a key even without a file.
        `operator_key`: one more key, of the cluster's own processes. Raises KeysUnusable."""
        self._path = path
        self._own = {hash_of(operator_key): Identity(name="cluster", operator=True)} if operator_key else {}
        self.required = required
        self._seen: tuple[int, ...] | None = None
        self._identities: dict[str, Identity] = {}
        if path is not None:
            seen = file_mark(path)
            self._take(read_keys(path))
            self._seen = seen

    def find(self, credential: str) -> Identity | None:
        if len(credential) > _MAX_KEY or not credential.isascii():
            return None
        digest = hash_of(credential)
        return self._identities.get(digest) or self._own.get(digest)

    def named(self, name: str) -> Identity | None:
        """Return the client whose key has this name."""
        return next((one for one in (*self._identities.values(), *self._own.values()) if one.name == name), None)

    def refresh(self) -> None:
        """Read the file again if it has changed. A file that can't be read changes nothing."""
        if self._path is None or (seen := file_mark(self._path)) == self._seen:
            return
        try:
            self._take(read_keys(self._path))
        except KeysUnusable as error:
            log.warning("the API keys stay as they were: %s", error)
        self._seen = seen

    def _take(self, keys: tuple[ApiKey, ...] | None) -> None:
        if keys is not None:
            self.required = True
        self._identities = {key.sha256: key for key in keys or ()}
