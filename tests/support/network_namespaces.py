"""Two hosts on one machine: network namespaces with an address each and a cable (veth) between them.

    with Hosts() as hosts:
        hosts.one.run("ip", "addr")
        LocalCluster(config, folder, nodes=hosts.nodes, reach=hosts.reach)
        hosts.cut(); hosts.restore()

They share files and process numbers with the test, and nothing of the network; abstract Unix sockets belong to the
network too. Each namespace lives as long as a process that holds it, which ends when its standard input does: so when
the test ends, however it ends. What is started in one dies with the test as well.
"""

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from deploy.local import LocalNode

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_ROOT = Path(__file__).parents[2]
_LINK = "cable"  # the name of either end
_UNSHARE = ["unshare", "--net"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
_HOLD = "import sys; print('ready', flush=True); sys.stdin.read()"
# The command that follows dies with the process that started it, whose number comes first.
_DIE_TOO = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started it has gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def unavailable() -> str:
    """Why no such hosts can be had here, or nothing."""
    try:
        script = f"ip link set lo up && ip link add {_LINK} type veth peer name other"
        probe = subprocess.run([*_UNSHARE, "sh", "-c", script], capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        return f"there is no {error.filename}"
    return "" if probe.returncode == 0 else f"network namespaces are not permitted here: {probe.stderr.strip()}"


@dataclass(frozen=True)
class Host:
    address: str
    enter: tuple[str, ...]  # the beginning of a command that runs the rest in there

    def start(self, *command: object, **popen: Any) -> subprocess.Popen[str]:
        """Run a command beside the test. The process is the command itself."""
        whole = [*self.enter, sys.executable, "-c", _DIE_TOO, str(os.getpid()), *map(str, command)]
        return subprocess.Popen(whole, text=True, cwd=_ROOT, **popen)

    def run(self, *command: object, timeout: float = 30) -> str:
        """Run a command to its end, which must be a good one; what it wrote."""
        done = subprocess.run([*self.enter, *map(str, command)], capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout


class Hosts:
    """Owns both namespaces, the cable, and the ways in from here."""

    def __init__(self) -> None:
        self._cleanup = contextlib.ExitStack()
        self._ways: dict[str, str] = {}
        with contextlib.ExitStack() as cleanup:
            first = cleanup.enter_context(_holder([*_UNSHARE]))
            self.one = Host(ADDRESSES[0], _entering(first.pid))
            second = cleanup.enter_context(_holder([*self.one.enter, "unshare", "--net"]))
            self.two = Host(ADDRESSES[1], _entering(second.pid))
            self.one.run("ip", "link", "add", _LINK, "type", "veth", "peer", "name", _LINK, "netns", second.pid)
            for host in (self.one, self.two):
                host.run("ip", "link", "set", "lo", "up")
                host.run("ip", "addr", "add", f"{host.address}/24", "dev", _LINK)
                host.run("ip", "link", "set", _LINK, "up")
            # Not below pytest's own folders: the path of a Unix socket is short.
            self._folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
            self._cleanup = cleanup.pop_all()

    def close(self) -> None:
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for LocalCluster -------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[LocalNode]:
        """Both as the nodes of a cluster, "one" and "two"."""
        return [LocalNode(name, host.address, host.enter) for name, host in (("one", self.one), ("two", self.two))]

    def reach(self, address: str) -> str:
        """Where this process reaches host:port of either: at a Unix socket, which something in there forwards."""
        if address not in self._ways:
            ip, _, port = address.rpartition(":")
            host = self.one if ip == self.one.address else self.two
            path = self._folder / secrets.token_hex(4)
            command = (sys.executable, "-m", "tests.support.network_namespaces", path, ip, port)
            forwarder = self._cleanup.enter_context(_ended(host.start(*command, stdout=subprocess.PIPE)))
            assert forwarder.stdout.readline() == "ready\n"
            self._ways[address] = f"unix:{path}"
        return self._ways[address]

    # --- the cable --------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """From now on nothing passes between the two; neither is told."""
        self.one.run("ip", "link", "set", _LINK, "down")

    def restore(self) -> None:
        self.one.run("ip", "link", "set", _LINK, "up")


@contextlib.contextmanager
def _holder(unshare: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process in new namespaces, which ends with its standard input."""
    process = subprocess.Popen(
        [*unshare, sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout.readline() == "ready\n", "can't make a namespace"
            yield process
        finally:
            process.stdin.close()


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def _entering(pid: int) -> tuple[str, ...]:
    user = [] if os.getuid() == 0 else ["--user", "--preserve-credentials"]
    return ("nsenter", f"--target={pid}", "--net", *user, "--")


async def _forward(path: str, host: str, port: int) -> None:
    """Carry every connection to the Unix socket `path` on to host:port."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, back), carry(there, writer))

    server = await asyncio.start_unix_server(accept, path)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_forward(sys.argv[1], sys.argv[2], int(sys.argv[3])))
