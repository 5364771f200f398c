"""Folders and files that are this user's alone: files that Baton, or a library it uses, made to be run, and locks.

A user that can write to such a file, or exchange it or a folder above it, could run code as this user.
"""

# pyright: strict

import contextlib
import os
import secrets
import stat
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from baton.errors import FolderUntrusted


def cache_root() -> Path:
    """Return where this user's files are kept that can be made again. Raises FolderUntrusted where there is no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise FolderUntrusted(
            f"user {os.geteuid()} has no home directory; set XDG_CACHE_HOME to a directory of its own"
        ) from None
    return Path(base) / "baton"


def runtime_root() -> Path:
    """Return where this user's processes on this machine find files that only running ones need."""
    own = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    if own.is_dir() and own.stat().st_uid == os.geteuid():  # `su` leaves that of another user
        return own / "baton"
    return Path(f"/tmp/baton-{os.geteuid()}")  # noqa: S108 - `make` refuses one that another user has made


def make(folder: Path) -> None:
    """Make a folder and those missing above it, for this user alone whatever the umask. Raises FolderUntrusted where
    another user could write to it or exchange it, and OSError."""
    _make(folder)
    refuse_strangers(folder)


def refuse_strangers(path: Path) -> None:
    """Raises FolderUntrusted where another user could write to `path`, or exchange it or a folder above it."""
    _refuse_writers(path, frozenset({os.geteuid()}))
    # The path as it was given, whose links could be exchanged, and the path that it comes to.
    for above in {*path.absolute().parents, *path.resolve().parents}:
        _refuse_writers(above, frozenset({os.geteuid(), 0}))


@contextlib.contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Write a file for its owner alone, which appears under its name once it is whole, or never. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    if not folder.exists():
        _make(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def _refuse_writers(path: Path, owners: frozenset[int]) -> None:
    info = path.lstat()
    writers = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISLNK(info.st_mode) or (stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX):
        writers = 0  # a link has no mode; in a sticky directory (/tmp) others can't move what is ours
    if info.st_uid not in owners or writers:
        raise FolderUntrusted(
            f"{path} belongs to user {info.st_uid} with mode {stat.S_IMODE(info.st_mode):o}, so another user could "
            "exchange files that are run; make it yours alone, or remove it"
        )
