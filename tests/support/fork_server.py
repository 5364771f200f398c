"""Processes of test clusters, forked from one that has imported all they need: torch alone takes a core for a second,
and vLLM more than ten.

A server per test worker imports the modules once and starts no thread. It forks a process for each order. That process
goes on as `deploy.child` does: it runs a module as `__main__`, with its own arguments, output and environment, and dies
with the server. The server ends with the test worker. Tests of a command line or an environment use
`deploy.local.launch`, and so do processes behind a command prefix. `tests/cluster` starts all processes as users do.

Where vLLM is installed the server has imported it, too. It forks vLLM processes for runners of the test worker itself.
Each worker of a cluster forks processes at its own start that wait to become its vLLM: children of the worker, as
outside of tests.
"""

import contextlib
import gc
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from baton.unix import readable
from deploy import child
from deploy.local import Child, launch

_VLLM_CHILD = "engine.vllm_runner.child"
_HAS_VLLM = importlib.util.find_spec("vllm") is not None
_VLLM = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn", "vllm.plugins")
"""What takes vLLM ten seconds to import."""
LOADS = "BATON_TEST_LOADS"  # variable of the environment: how often a worker loads a model with vLLM; else once
_MESSAGE = 1 << 20  # bytes of an order at most


class ForkedProcess:
    """A forked process, with the methods of `subprocess.Popen`. `reap` waits for its end and returns its code."""

    def __init__(self, pid: int, reap: Callable[[int], int]) -> None:
        self.pid = pid
        self._reap = reap
        self._descriptor = os.pidfd_open(pid)
        self._code: int | None = None

    def __del__(self) -> None:
        os.close(self._descriptor)

    def poll(self) -> int | None:
        if self._code is None and readable(self._descriptor, 0):
            self._code = self._reap(self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        seconds = 1e6 if timeout is None else timeout
        if not readable(self._descriptor, seconds):
            raise subprocess.TimeoutExpired([str(self.pid)], seconds)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, as `subprocess.Popen.kill` takes it
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class ForkServer:
    """The server, as the tests use it."""

    def __init__(self) -> None:
        self._link, theirs = _pair()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._lock = Lock()

    def ask(self, order: Mapping[str, Any], fds: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._link, [json.dumps(order).encode()], fds)
            return int(self._link.recv(_MESSAGE))

    def launch(self, argv: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]) -> ForkedProcess:
        """Fork a process with the first two of `fds` for its output and errors. Its last arguments are the numbers of
        the others."""
        order = {"argv": argv, "environ": dict(environment), "folder": str(Path.cwd())}
        return ForkedProcess(self.ask(order, fds), lambda pid: self.ask({"reap": pid}))


_server = cache(ForkServer)


def forked(enter: Sequence[str], argv: Sequence[str], out: BinaryIO, err: BinaryIO) -> Child:
    """Start a process as `deploy.local.launch` does, sooner."""
    return launch(enter, argv, out, err) if enter else _server().launch(argv, [out.fileno(), err.fileno()], os.environ)


def forked_vllm(fd: int, environment: Mapping[str, str]) -> ForkedProcess:
    """Start a process as `engine.vllm_runner.runner.launch_child` does, sooner."""
    return _server().launch([_VLLM_CHILD], [1, 2, fd], environment)


# --- within the server --------------------------------------------------------------------------------------------


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends between which orders and their descriptors pass whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _order(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next order. Ends the process when the other end has closed."""
    content, fds, _, _ = socket.recv_fds(link, _MESSAGE, 8)
    if not content:
        sys.exit()
    return json.loads(content), fds


def _serve(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Carry out orders until the test worker ends. Return the order in a forked process."""
    while True:
        order, fds = _order(link)
        if (ended := order.get("reap")) is not None:
            link.send(str(_reap(ended)).encode())
        elif pid := os.fork():
            link.send(str(pid).encode())
            for fd in fds:
                os.close(fd)
        else:
            link.close()
            return order, fds


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become(parent: int, order: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Go on as the process that was ordered."""
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["folder"])
    tempfile.tempdir = None  # the environment may name another than the server's
    argv = [*order["argv"], *map(str, fds)]
    child.run(parent, argv)


def _prepare_vllm(loads: int) -> None:
    """Fork the processes that this worker will run vLLM in, and have the worker take them."""
    from engine.vllm_runner.runner import VllmRunner

    worker = os.getpid()
    waiting: list[tuple[socket.socket, int]] = []
    for _ in range(loads):
        ours, theirs = _pair()
        pid = os.fork()
        if not pid:
            for link in (ours, *(link for link, _ in waiting)):
                link.close()
            order, fds = _order(theirs)
            theirs.close()
            _become(worker, order, fds)
            sys.exit()
        theirs.close()
        waiting.append((ours, pid))
    VllmRunner.launch_child = staticmethod(partial(_wake_vllm, waiting))


def _wake_vllm(waiting: list[tuple[socket.socket, int]], fd: int, environment: Mapping[str, str]) -> ForkedProcess:
    link, pid = waiting.pop()
    order = {"argv": [_VLLM_CHILD], "environ": dict(environment), "folder": str(Path.cwd())}
    with link:
        socket.send_fds(link, [json.dumps(order).encode()], [fd])
    return ForkedProcess(pid, _reap)


def _main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    for module in ("worker.process", *(_VLLM if _HAS_VLLM else ())):
        importlib.import_module(module)
    gc.freeze()
    server = os.getpid()
    order, (out, err, *fds) = _serve(link)
    for number, opened in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(opened, number)
        os.close(opened)
    if order["argv"][0] == "worker" and _HAS_VLLM:
        _prepare_vllm(int(order["environ"].get(LOADS, 1)))
    _become(server, order, fds)


if __name__ == "__main__":
    _main()
