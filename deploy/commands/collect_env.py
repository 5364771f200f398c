"""`baton collect-env`: what a bug report says about the machine and the software on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

import baton
from baton.system_memory import available_memory
from deploy.commands.terminal import Json, command, out, print_json, size
from engine.device.gpus import visible_gpus

_PACKAGES = (
    "torch", "ray", "numpy", "grpcio", "protobuf", "pyzmq", "msgspec", "starlette", "uvicorn", "tokenizers",
    "safetensors", "llguidance", "transformers", "prometheus-client", "xxhash", "vllm",
)  # fmt: skip
_VARIABLES = re.compile(r"(OMP|MKL|KMP|CUDA|NCCL|TORCH|PYTORCH|HF|RAY|OTEL|LD|PYTHON)_\w+|PATH|BATON_\w+")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|HEADERS|AUTH", re.IGNORECASE)
_LOGIN = re.compile(r"//[^/@\s]+@")  # the user and password of a URL
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
_PATIENCE = 10.0  # seconds, for each program that is asked


@command("baton collect-env", "baton collect-env --json > environment.json")
def collect_env(as_json: Json = False) -> None:
    """Show versions, processor, memory, GPUs and settings for a bug report. Secrets are left out."""
    found = collect()
    if as_json:
        print_json(found)
        return
    for section, values in found.items():
        out.print(f"[bold]{section}[/]")
        for name, value in values.items():
            out.print(f"  {escape(name):<18} {escape(str(value))}")


def collect() -> dict[str, dict[str, Any]]:
    """Return everything by section, as plain data. Nothing here raises: what can't be found is left out."""
    return {
        "baton": _baton(),
        "system": _system(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
        "torch": _torch(),
        "gpus": _gpus(),
        "environment": environment(os.environ),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a cluster runs. A secret and the login of a URL are replaced."""
    kept = {name: value for name, value in sorted(variables.items()) if _VARIABLES.fullmatch(name)}
    return {name: "(left out)" if _SECRET.search(name) else _LOGIN.sub("//", value) for name, value in kept.items()}


def _baton() -> dict[str, Any]:
    folder = Path(baton.__file__).parent.parent
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD") if (folder / ".git").exists() else ""
    found = {"version": baton.__version__, "commit": commit, "installed in": str(folder)}
    return {name: value for name, value in found.items() if value}


def _system() -> dict[str, Any]:
    room = available_memory()
    found = {
        "os": _os_name(),
        "kernel": platform.release(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "libc": " ".join(platform.libc_ver()),
        "compiler": _output("c++", "--version").partition("\n")[0],
        "processor": _processor("model name") or platform.machine(),
        "instructions": " ".join(flag for flag in _INSTRUCTIONS if flag in _processor("flags").split()),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}, {size(room.available)} left "
        f"({room.bound})",
        "shared memory": _shared_memory(),
    }
    return {name: value for name, value in found.items() if value}


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 a broken torch is what the report is about
        return {"error": f"{type(error).__name__}: {error}"}
    found = {"cpu capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    found |= {"cuda": torch.version.cuda or "none", "gpus for torch": str(visible_gpus())}
    return found


def _gpus() -> dict[str, Any]:
    rows = _output(
        "nvidia-smi", "--query-gpu=index,name,memory.total,driver_version,compute_cap", "--format=csv,noheader"
    )
    return {index: about for index, _, about in (row.partition(", ") for row in rows.splitlines()) if about}


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return platform.system()


def _processor(field: str) -> str:
    """Return the first value of a field of /proc/cpuinfo, "" if there is none."""
    found = re.search(rf"^{field}\s*:\s*(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1] if found else ""


def _shared_memory() -> str:
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 the file system is asked for its size
    except OSError:
        return ""
    return f"{size(found.f_bavail * found.f_frsize)} of {size(found.f_blocks * found.f_frsize)} left"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _output(*argv: str) -> str:
    """Return what a program prints, "" if it can't be run, fails or takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_PATIENCE, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
