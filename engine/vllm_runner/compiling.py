"""How vLLM compiles a model: whether it can here, and where the result is kept."""

# pyright: strict

import sysconfig
from pathlib import Path

from baton import private_folder
from engine.cpu.build import LibraryUnavailable, find_compiler


def problem(device: str) -> str:
    """Return why a model can't be compiled for this device, "" if it can. On a CPU torch needs a C++ compiler and the
    headers of Python."""
    if device != "cpu":
        return ""
    try:
        if len(command := find_compiler()) > 1:
            return f"torch takes no compiler of several words, as {' '.join(command)}; install g++ or clang++"
    except LibraryUnavailable as reason:
        return str(reason)
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of Python are not installed (Debian: python3-dev)"
    return ""


def environment(device: str) -> dict[str, str]:
    """Return the variables of a process that compiles. What it keeps is run by later ones, so it lies in a folder that
    is this user's alone. torch's own choice is below /tmp. Raises FolderUntrusted and OSError."""
    folder = private_folder.cache_root() / "vllm"
    private_folder.make(folder)
    variables = {"VLLM_CACHE_ROOT": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    if device != "cpu":
        return variables
    # vLLM 0.32 compiles again what its "AOT" cache has kept for a CPU, which takes 20 s; torch's own cache is read.
    return variables | {"CXX": find_compiler()[0], "VLLM_USE_AOT_COMPILE": "0"}
