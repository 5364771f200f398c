"""Processes of test clusters, forked from one that has imported all they need: torch alone takes a core for a second.

A server per test worker imports the modules once and starts no thread. It forks a process for each order. That process
goes on as `deploy.child` does: it runs a module as `__main__`, with its own arguments, output and environment, and dies
with the server. The server ends with the test worker. Tests of a command line or an environment use
`deploy.local.launch`, and so do processes behind a command prefix. `tests/cluster` starts all processes as users do.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from baton.unix import readable
from deploy import child
from deploy.local import Child, launch


class ForkedProcess:
    """A process of the server's, with the methods of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._descriptor = os.pidfd_open(pid)
        self._code: int | None = None

    def __del__(self) -> None:
        os.close(self._descriptor)

    def poll(self) -> int | None:
        if self._code is None and readable(self._descriptor, 0):
            self._code = self._server.ask({"reap": self.pid})
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        seconds = 1e6 if timeout is None else timeout
        if not readable(self._descriptor, seconds):
            raise subprocess.TimeoutExpired([str(self.pid)], seconds)
        code = self.poll()
        assert code is not None
        return code


class ForkServer:
    """The server, as the tests use it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._lock = Lock()

    def ask(self, order: dict[str, Any]) -> int:
        with self._lock:
            assert self._server.stdin
            assert self._server.stdout
            self._server.stdin.write(json.dumps(order) + "\n")
            return int(self._server.stdout.readline())

    def launch(self, argv: Sequence[str], out: BinaryIO, err: BinaryIO) -> ForkedProcess:
        order = {"argv": argv, "out": out.name, "err": err.name, "environ": dict(os.environ), "folder": str(Path.cwd())}
        return ForkedProcess(self, self.ask(order))


_server = cache(ForkServer)


def forked(enter: Sequence[str], argv: Sequence[str], out: BinaryIO, err: BinaryIO) -> Child:
    """Start a process as `deploy.local.launch` does, sooner."""
    return launch(enter, argv, out, err) if enter else _server().launch(argv, out, err)


def _serve() -> dict[str, Any]:
    """Carry out orders until stdin ends. Return the order in a forked process."""
    for line in sys.stdin:
        order = json.loads(line)
        if (ended := order.get("reap")) is not None:
            print(os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1]), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            return order
    sys.exit()


def _main() -> None:
    import worker.process  # noqa: F401

    gc.freeze()
    server = os.getpid()
    order = _serve()
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["folder"])
    for number, path in enumerate((os.devnull, order["out"], order["err"])):
        opened = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    child.run(server, order["argv"])


if __name__ == "__main__":
    _main()
