"""From the C++ sources beside this file to a loaded library, compiled for the very CPU it runs on.

The library is kept in the user's cache, named by all that went into it (sources, flags, compiler, CPU). So a change of
any of them makes another library. A user that can write to the library, or to a folder above it, could run code as this
user. Then, and where there is no home, the library is compiled into a private folder of this process, which is removed
once it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from baton import private_folder
from baton.errors import FolderUntrusted
from baton.file_lock import locked

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-pthread")
NEEDED = frozenset({"avx2", "fma"})
COMPILE_SECONDS = 300

Library = ctypes.CDLL


class LibraryUnavailable(Exception):  # stays in this package: what it tells is logged, and torch does the work
    """Why there can be none here."""


def can_compile() -> bool:
    """Whether this machine is one that kernels are made for: its CPU and a compiler."""
    try:
        find_compiler()
    except LibraryUnavailable:
        return False
    return set(cpu_description().split()) >= NEEDED


def must_compile() -> bool:
    """Whether `library` would first compile, for about half a minute. False where there can be none."""
    try:
        cpu, compiler = cpu_description(), find_compiler()
        return set(cpu.split()) >= NEEDED and not _target(SOURCES, cache_root(), compiler, cpu).exists()
    except (LibraryUnavailable, FolderUntrusted):
        return False


@functools.cache
def library() -> Library | None:
    """The loaded library, compiled if it has not been; None where that can't be, which one log line explains."""
    try:
        try:
            return load(SOURCES, cache_root())
        except FolderUntrusted as reason:
            log.warning("native kernels are compiled for this process alone: %s", reason)
            with tempfile.TemporaryDirectory(prefix="baton-native-") as folder:
                return load(SOURCES, Path(folder))
    except LibraryUnavailable as reason:
        log.info("no native kernels: %s; torch does their work", reason)
        return None


def cache_root() -> Path:
    """Where this user's libraries are kept, each in a directory of its own. Raises FolderUntrusted where there is
    no home."""
    return private_folder.cache_root() / "native"


def load(sources: Path, root: Path) -> Library:
    """The library of the C++ files in `sources`, from `root` or compiled into it. Raises LibraryUnavailable, and
    FolderUntrusted where another user may write to it or above it."""
    cpu = cpu_description()
    if missing := NEEDED - set(cpu.split()):
        raise LibraryUnavailable(f"this CPU lacks {', '.join(sorted(missing))}")
    compiler = find_compiler()
    target = _target(sources, root, compiler, cpu)
    directory = target.parent
    try:
        private_folder.make(directory)
        if not target.exists():
            # Workers start together: one of them compiles, with all cores, and the others wait.
            late = LibraryUnavailable(f"another process keeps {directory} locked")
            with locked(directory / "lock", time.monotonic() + COMPILE_SECONDS, late):
                if not target.exists():
                    _compile(compiler, sorted(sources.glob("*.cpp")), target)
        private_folder.refuse_strangers(target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise LibraryUnavailable(f"{target}: {error}") from error


def _target(sources: Path, root: Path, compiler: list[str], cpu: str) -> Path:
    """Return where the library of these sources lies, or will lie."""
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])
    return root / _digest(files, compiler, cpu) / "library.so"


def cpu_description() -> str:
    """Model and flags of the first CPU, as words; "" where the kernel does not tell them."""
    if platform.machine() != "x86_64":
        return ""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return ""
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags")
    return " ".join(fields.get(key, "") for key in keys)


def first_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache/index0")) -> int:
    """Bytes of data that the first CPU has closest to it; 0 where the kernel does not tell."""
    try:
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
    except OSError:
        return 0
    kib = re.fullmatch(r"(\d+)K", size)
    return int(kib[1]) * 1024 if kib and (level, kind) == ("1", "Data") else 0


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, one on the PATH, or the one that PyPI's `ziglang` brings.

    Raises LibraryUnavailable.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(chosen[0]) is None:
            raise LibraryUnavailable(f"CXX names {chosen[0]}, which is not there")
        return chosen
    for name in ("c++", "g++", "clang++"):
        if program := shutil.which(name):
            return [program]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise LibraryUnavailable("no C++ compiler; install g++, clang++ or the PyPI package ziglang")


def _flags() -> list[str]:
    return [*FLAGS, f"-DFIRST_LEVEL_CACHE={first_level_cache()}"]


def _digest(files: Sequence[Path], compiler: Sequence[str], cpu: str) -> str:
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=False).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryUnavailable(f"{compiler[0]} does not run: {error}") from error
    parts = [cpu.encode(), version, "\0".join([*compiler, *_flags()]).encode()]
    for file in files:
        parts += [file.name.encode(), file.read_bytes()]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _compile(compiler: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    """Compile beside `target`, all sources at once, and move it there whole, because a compiler may be killed. No
    other process may be compiling it."""
    for left in target.parent.glob("making-*"):  # by one that was
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="making-") as name, ThreadPoolExecutor() as pool:
        making = Path(name) / target.name
        objects = [making.with_name(f"{source.stem}.o") for source in sources]
        command = [*compiler, *_flags()]
        commands = [[*command, "-c", str(one), "-o", str(to)] for one, to in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
        _run([*command, *map(str, objects), "-o", str(making)])
        making.chmod(0o700)
        making.rename(target)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise LibraryUnavailable(f"{command[0]} took longer than {COMPILE_SECONDS} s") from error
    if done.returncode:
        errors = " | ".join(line for line in done.stderr.splitlines() if "error" in line)[:500]
        raise LibraryUnavailable(f"{command[0]} failed: {errors or done.stderr[:500]}")
