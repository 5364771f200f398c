"""`baton collect-env`: what a bug report says about the machine and the software on it."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

import baton
from baton.system_memory import available_memory
from deploy.commands.terminal import Json, command, out, print_json, size
from deploy.control_plane.preflight import version_of
from engine.device.gpus import visible_gpus

_PACKAGES = (
    "torch", "ray", "numpy", "grpcio", "protobuf", "pyzmq", "msgspec", "starlette", "uvicorn", "tokenizers",
    "safetensors", "llguidance", "transformers", "prometheus-client", "xxhash", "vllm",
)  # fmt: skip
_VARIABLES = re.compile(r"(OMP|MKL|KMP|CUDA|NCCL|TORCH|PYTORCH|HF|RAY|OTEL|LD|PYTHON)_\w+|PATH|BATON_\w+")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|HEADERS|AUTH", re.IGNORECASE)
_LOGIN = re.compile(r"//[^/@\s]+@")  # the user and password of a URL
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
_GPU = ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version,compute_cap", "--format=csv,noheader")
_PATIENCE = 10.0  # seconds, for each program that is asked


@command("baton collect-env", "baton collect-env --json > environment.json")
def collect_env(as_json: Json = False) -> None:
    """Show versions, processor, memory, GPUs and settings for a bug report. Secrets are left out."""
    sections = collect()
    if as_json:
        print_json(sections)
        return
    for section, values in sections.items():
        out.print(f"[bold]{section}[/]")
        for name, value in values.items():
            out.print(f"  {escape(name):<18} {escape(str(value))}")


def collect() -> dict[str, dict[str, Any]]:
    """Return everything by section, as plain data. Nothing here raises: what can't be found is left out."""
    folder = Path(baton.__file__).parent.parent
    rows = _available({"gpus": lambda: _output(*_GPU)}).get("gpus", "").splitlines()
    return {
        "baton": _available(
            {
                "version": lambda: baton.__version__,
                "commit": lambda: _output("git", f"--git-dir={folder / '.git'}", "rev-parse", "HEAD"),
                "installed in": lambda: str(folder),
            }
        ),
        "system": _available(_SYSTEM),
        "packages": _available({name: partial(version_of, name) for name in _PACKAGES}),
        "torch": _torch(),
        "gpus": {index: about for index, _, about in (row.partition(", ") for row in rows) if about},
        "environment": environment(os.environ),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a cluster runs. A secret and the login of a URL are replaced."""
    ours = {name: value for name, value in sorted(variables.items()) if _VARIABLES.fullmatch(name)}
    return {name: "(left out)" if _SECRET.search(name) else _LOGIN.sub("//", value) for name, value in ours.items()}


def _available(facts: Mapping[str, Callable[[], str | None]]) -> dict[str, Any]:
    """Look each fact up, and leave out what this machine does not tell."""
    known: dict[str, Any] = {}
    for name, look in facts.items():
        with suppress(OSError, subprocess.SubprocessError):
            if value := look():
                known[name] = value
    return known


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 a broken torch is what the report is about
        return {"error": f"{type(error).__name__}: {error}"}
    facts = {"cpu capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    facts |= {"cuda": torch.version.cuda or "none", "gpus for torch": str(visible_gpus())}
    return facts


def _processor(field: str) -> str:
    """Return the first value of a field of /proc/cpuinfo, "" if there is none."""
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    match = re.search(rf"^{field}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1] if match else ""


def _memory() -> str:
    room = available_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{size(total)}, {size(room.available)} left ({room.bound})"


def _shared_memory() -> str:
    usage = os.statvfs("/dev/shm")  # noqa: S108 the file system is asked for its size
    return f"{size(usage.f_bavail * usage.f_frsize)} of {size(usage.f_blocks * usage.f_frsize)} left"


def _output(*argv: str) -> str:
    """Return what a program prints. Raises OSError and SubprocessError if it can't run, fails or takes too long."""
    return subprocess.check_output(argv, text=True, timeout=_PATIENCE, stderr=subprocess.DEVNULL).strip()  # noqa: S603


_SYSTEM: Mapping[str, Callable[[], str]] = {
    "os": lambda: platform.freedesktop_os_release().get("PRETTY_NAME", ""),
    "kernel": lambda: f"{platform.system()} {platform.release()}",
    "python": lambda: f"{platform.python_version()} ({sys.executable})",
    "libc": lambda: " ".join(platform.libc_ver()),
    "compiler": lambda: _output("c++", "--version").partition("\n")[0],
    "processor": lambda: _processor("model name") or platform.machine(),
    "instructions": lambda: " ".join(flag for flag in _INSTRUCTIONS if flag in _processor("flags").split()),
    "cores": lambda: f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
    "memory": _memory,
    "shared memory": _shared_memory,
}
