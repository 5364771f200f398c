"""Virtual environments of the suites, one each, kept between runs.

They lie below ~/.cache/baton-interop, or below $BATON_INTEROP_CACHE. An environment is made anew when its
requirements change.
"""

import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_INSTALL_SECONDS = 900.0
_PIP = ("-m", "pip")
_PATIENCE = ("--retries", "1", "--timeout", "15")
_SILENCE = re.compile(
    r"from versions: none|connection broken by|Max retries exceeded|timed out|IncompleteRead|Connection (aborted|reset)"
    r"|Server Error|Too Many Requests"
)
"""What pip says where no index has answered, or has broken off."""


class SuiteTimeout(Exception):
    """A suite's process did not end in time, and was killed."""


class InstallError(Exception):
    """pip could not make an environment."""


class IndexUnreachable(InstallError):
    """No package index has answered, or not in time."""


@dataclass(frozen=True)
class Ran:
    """A process that has ended."""

    code: int
    output: str

    @property
    def tail(self) -> str:
        return "\n".join(self.output.strip().splitlines()[-15:])


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and a folder of its suite for results. `seconds` bounds each process."""

    folder: Path
    scratch: Path
    seconds: float

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def program(self, name: str) -> str:
        """The path of a program that a package has installed."""
        return str(self.folder / "bin" / name)

    def run(self, *argv: str, cwd: Path | None = None, **more: str) -> Ran:
        """Run a process to its end. `more` is added to its environment. Raises SuiteTimeout."""
        return run_bounded(argv, self.seconds, cwd or self.scratch, self.variables(more))

    @contextlib.contextmanager
    def running(self, log: Path, *argv: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a process in the background, with its output in a file, and end all that it has started."""
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv, cwd=self.scratch, env=self.variables(more), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                yield process
            finally:
                end_session(process)

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        """Environment variables without this project's path, and with nothing that reaches a network."""
        base = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = f"{self.folder / 'bin'}{os.pathsep}{base.get('PATH', '')}"
        return base | {"PATH": path, "NO_PROXY": "127.0.0.1,localhost", **more}

    def versions(self, names: Sequence[str]) -> list[str]:
        """The installed versions of packages, as "name version"."""
        code = "import sys; from importlib.metadata import version\nfor n in sys.argv[1:]: print(n, version(n))"
        return self.run(self.python, "-c", code, *names).output.strip().splitlines()


def cache() -> Path:
    """Where environments and fetched packages lie."""
    return Path(os.environ.get("BATON_INTEROP_CACHE") or Path.home() / ".cache" / "baton-interop")


def here(requirements: Sequence[str], scratch: Path, seconds: float) -> Environment | None:
    """Return the environment that this process runs in, if it has the packages in the versions that are required."""
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        try:
            version_here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None
        if version_here != version:
            return None
    scratch.mkdir(parents=True, exist_ok=True)
    return Environment(Path(sys.prefix), scratch, seconds)


def make(
    name: str,
    requirements: Sequence[str],
    scratch: Path,
    seconds: float,
    *,
    needs_torch: bool = False,
    patience: float = _INSTALL_SECONDS,
) -> Environment:
    """Return the environment of a suite, made if it is not there as required. `patience`: seconds of all
    installations together. Raises InstallError."""
    until = time.monotonic() + patience
    environment = Environment(cache() / name, scratch, seconds)
    scratch.mkdir(parents=True, exist_ok=True)
    stamp, text = environment.folder / "requirements.txt", "\n".join(requirements) + "\n"
    if stamp.is_file() and stamp.read_text() == text:
        return environment
    shutil.rmtree(environment.folder, ignore_errors=True)
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    pip = [environment.python, *_PIP, "install", "--quiet", "--disable-pip-version-check", *_PATIENCE]
    steps = [[sys.executable, "-m", "venv", str(environment.folder)]]
    if needs_torch:
        # As `make setup` does: PyPI's newest torch brings gigabytes of CUDA, and this build for CPUs does not.
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        constraints = scratch / "constraints.txt"
        constraints.write_text("\n".join(line for line in pins if line.startswith("torch==")) + "\n")
        steps.append([*pip, "--no-deps", "--extra-index-url", _TORCH_INDEX, "-c", str(constraints), "torch"])
        pip += ["-c", str(constraints)]
    for argv in (*steps, [*pip, *requirements]):
        _install(argv, scratch, environment, until)
    stamp.write_text(text)
    return environment


def fetch_sdist(environment: Environment, package: str) -> Path:
    """Download a package's source distribution, unpack it into the cache and return its folder. Raises InstallError."""
    name, _, version = package.partition("==")
    folder = cache() / "sdists" / f"{name}-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        argv = [
            environment.python,
            *_PIP,
            "download",
            "--quiet",
            *_PATIENCE,
            "--no-deps",
            "--no-binary",
            ":all:",
            package,
        ]
        _install(argv, folder.parent, environment, time.monotonic() + environment.seconds)
        archive = folder.parent / f"{folder.name}.tar.gz"
        shutil.unpack_archive(archive, folder.parent, filter="data")
    return folder


def npm_folder(name: str) -> Path:
    """Return the folder of a suite's packages from npm."""
    return cache() / "npm" / name / "node_modules"


def install_npm(name: str, packages: Sequence[str], environment: Environment) -> None:
    """Install a suite's packages from npm, if they are not there as required. Raises IndexUnreachable where npm is
    missing, or does not bring them in time."""
    folder, text = npm_folder(name).parent, "\n".join(packages) + "\n"
    stamp = folder / "packages.txt"
    if stamp.is_file() and stamp.read_text() == text:
        return
    if (npm := shutil.which("npm")) is None:
        raise IndexUnreachable("there is no npm here")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    argv = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--foreground-scripts", *packages]
    try:
        ran = run_bounded(argv, environment.seconds, folder, environment.variables({}))
        if ran.code:
            raise IndexUnreachable(f"npm could not install {text}: {ran.tail}")
        for script in folder.glob("node_modules/@anthropic-ai/claude-code/install.cjs"):  # npm may leave it out
            run_bounded(["node", str(script)], environment.seconds, script.parent, environment.variables({}))
    except SuiteTimeout as error:
        raise IndexUnreachable(str(error)) from None
    stamp.write_text(text)


def _install(argv: Sequence[str], cwd: Path, environment: Environment, until: float) -> None:
    """Run pip, a second time if it fails although an index answers; `until` is a time of the monotonic clock. Raises
    InstallError."""
    message = ""
    for _ in range(2):
        try:
            ran = run_bounded(argv, max(0.0, until - time.monotonic()), cwd, environment.variables({}))
        except SuiteTimeout as error:
            raise IndexUnreachable(str(error)) from None
        if not ran.code:
            return
        message = f"{' '.join(argv[1:4])} … ended with {ran.code}: {ran.tail}"
        if _SILENCE.search(ran.output):
            raise IndexUnreachable(message)
    raise InstallError(message)


def run_bounded(argv: Sequence[str], seconds: float, cwd: Path, variables: Mapping[str, str]) -> Ran:
    """Run a process to its end, and end all that it has started. Raises SuiteTimeout."""
    output = cwd / f"output-{time.monotonic_ns()}.log"
    with output.open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=cwd, env=dict(variables), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise SuiteTimeout(f"{Path(argv[0]).name} did not end within {seconds:g} s") from None
        finally:
            end_session(process)
    text = output.read_text(errors="replace")
    output.unlink()
    return Ran(code, text)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session of its own, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
