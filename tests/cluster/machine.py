"""A machine of its own for one test: its own processes, network, /tmp, /dev/shm and home, in Linux namespaces.

`ray stop` ends every Ray that it can see; in here it sees the test's only. And what is left behind can be counted: at
the end of a test, everything that runs in here was started by it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine.cpu import build

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
HOME = "/tmp/home"
MODEL = "/tmp/model"
ONE, TWO = "10.77.0.1", "10.77.0.2"
"""Addresses of two nodes, where a test asks for a second one."""
_UNSHARE = ["unshare", "--pid", "--fork", "--mount", "--net", "--mount-proc", "--kill-child"]


def _needed_paths() -> list[Path]:
    """What the tests themselves need of the /tmp outside, when the project or its Python lies there."""
    needed = {ROOT.resolve(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    below = sorted(path for path in needed if path.is_relative_to("/tmp"))
    return [path for path in below if not any(path != other and path.is_relative_to(other) for other in below)]


# The first process of the new namespaces; it must reap the orphans that every process of a pid namespace leaves to it.
_INIT = f"""
import os, signal, subprocess
def run(*command):
    subprocess.run(command, check=True)
run("ip", "link", "set", "lo", "up")
with open("/proc/sys/net/ipv4/ip_local_reserved_ports", "w") as reserved:
    reserved.write("50051")  # the router's: no connection of Ray's shall have it
run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
run("mount", "-t", "tmpfs", "tmpfs", "/mnt")
for path in {[str(path) for path in _needed_paths()]}:
    inside = "/mnt" + path.removeprefix("/tmp")
    os.makedirs(inside)
    run("mount", "--bind", path, inside)
run("mount", "--move", "/mnt", "/tmp")
os.mkdir("{HOME}")
os.chmod("/tmp", 0o1777)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
"""


def unavailable() -> str:
    """Why no such machine can be had here, or nothing."""
    try:
        probe = subprocess.run([*_UNSHARE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        return f"there is no {error.filename}"
    return "" if probe.returncode == 0 else f"namespaces are not permitted here: {probe.stderr.strip()}"


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, f"not one line of JSON: {self.out!r}; stderr: {self.err}"
        return json.loads(self.out)


class Machine:
    """Runs commands in namespaces of its own; everything in them ends with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*_UNSHARE, sys.executable, "-c", _INIT], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout.readline() == "ready\n"
        # The first process inside, as it is called outside: unshare's only child.
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._init = int(children[0])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- running things ----------------------------------------------------------------------------------------------

    def run(self, *command: object, timeout: float = 60, **environment: str) -> Done:
        done = subprocess.run(
            self._inside(command), env=self._environment(environment), capture_output=True, text=True, timeout=timeout
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, *command: object, **environment: str) -> subprocess.Popen[str]:
        """Run a command beside the test."""
        return subprocess.Popen(
            self._inside(command),
            env=self._environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def without_models(self) -> dict[str, str]:
        """Return an environment whose cache has the compiled kernels and no model. There is no network to fetch one."""
        kernels = build.cache_root()
        if self.run("test", "-d", f"/tmp/cache/baton/{kernels.name}").status:
            assert self.run("mkdir", "-p", "/tmp/cache/baton").status == 0
            assert self.run("cp", "-r", kernels, f"/tmp/cache/baton/{kernels.name}").status == 0
        return {"XDG_CACHE_HOME": "/tmp/cache"}

    def baton(self, *arguments: object, timeout: float = 90, **environment: str) -> Done:
        return self.run(sys.executable, "-m", "deploy", *arguments, timeout=timeout, **environment)

    def up(self, *arguments: object, timeout: float = 90, **environment: str) -> Done:
        """`baton up` on the small model, with pools that suit it."""
        small = ["store.host_cache_bytes=32MiB", "prefill.kv_cache_bytes=32MiB", "decode.kv_cache_bytes=32MiB"]
        small += ["prefill.threads=1", "decode.threads=1"]
        settings = [part for setting in small for part in ("--set", setting)]
        patience = ["--timeout", timeout - 30, "--json"]
        return self.baton("up", "--model", MODEL, *settings, *arguments, *patience, timeout=timeout, **environment)

    def make_model(self) -> None:
        script = f"import pathlib; from bench import random_model; random_model.write(pathlib.Path('{MODEL}'))"
        assert self.run(sys.executable, "-c", script).status == 0

    def status(self) -> dict[str, Any]:
        """What `baton status` says, whether or not the cluster serves."""
        return self.baton("status", "--json").json

    def generate(self, *arguments: object) -> dict[str, Any]:
        done = self.baton("generate", *arguments, "--json")
        assert done.status == 0, done
        return done.json

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        assert self.run("kill", f"-{number}", pid).status == 0

    # --- looking -----------------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Everything that runs in here, besides the first process and the one that looks; zombies run no more."""
        commands: dict[int, str] = {}
        for line in self.run("ps", "-eo", "pid=,stat=,args=").out.splitlines():
            pid, stat, command = line.split(None, 2)
            if int(pid) != 1 and "Z" not in stat and not command.startswith("ps -eo"):
                commands[int(pid)] = command
        return commands

    def left_behind(self) -> list[str]:
        """Processes, sockets, shared memory and files that should not be here once every cluster and Ray is down."""
        left = [f"process {pid}: {command[:120]}" for pid, command in self.processes().items()]
        left += [f"in /dev/shm: {name}" for name in self.run("ls", "-A", "/dev/shm").out.split()]
        left += [f"socket {name}" for name in self.unix_sockets()]
        ours = {path.relative_to("/tmp").parts[0] for path in _needed_paths()}
        names = set(self.run("ls", "-A", "/tmp").out.split()) - ours
        left += [f"in /tmp: {name}" for name in sorted(names) if name.startswith("baton")]
        state = f"{HOME}/.local/state/baton"
        files = self.run("find", state, "-name", "*.json", "-o", "-name", "*.key").out.split()
        return left + [f"file {name}" for name in files]

    def unix_sockets(self) -> list[str]:
        """The names of all Unix sockets that have one, abstract ones with an @."""
        lines = self.run("cat", "/proc/net/unix").out.splitlines()[1:]
        return sorted({match[1] for line in lines if (match := re.search(r"\s([@/]\S+)$", line))})

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 40.0) -> None:
        """Wait until `condition` holds; fail, saying `what` did not happen, when it does not in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.1)
        logs = self.run("sh", "-c", f"tail -n 15 {HOME}/.local/state/baton/*/logs/*.log").out
        raise AssertionError(f"not within {seconds} s: {what}\n{logs}")

    # --- internals ---------------------------------------------------------------------------------------------------

    def _inside(self, command: tuple[object, ...]) -> list[str]:
        enter = ["nsenter", f"--target={self._init}", "--pid", "--mount", "--net", f"--wd={ROOT}"]
        return [*enter, *(str(part) for part in command)]

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k != "PYTEST_CURRENT_TEST"}
        # What is compiled for this CPU is the same in every such machine.
        shared = {"XDG_CACHE_HOME": str(build.cache_root().parents[1])}
        return base | shared | {"HOME": HOME, "PATH": f"{BIN}:{os.environ['PATH']}"} | more
