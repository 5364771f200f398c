"""What the command lines of all processes have in common: `python -m router|kvstore|worker`."""

import argparse
import contextlib
import ctypes
import gc
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton import config, logs
from baton.config import Config
from baton.errors import BatonError, ConfigError, KeysUnusable
from baton.hosts import LOOPBACK, host_of, is_loopback, is_wildcard, normal, problem
from baton.wire import ClusterKeys, use_keys

_M_ARENA_MAX = -8  # of mallopt(3)
_DESCRIPTORS = 65_536


@dataclass(frozen=True)
class Arguments:
    """How to start one process."""

    config: Config
    name: str
    node: str
    routers: tuple[str, ...]  # their ZMQ endpoints; none for a router itself
    host: str = LOOPBACK  # the node's own address, on which the process binds its own sockets


def parse(program: str, argv: Sequence[str] | None, needs_router: bool) -> Arguments:
    """Read a process's command line, configuration and keys and send its log to its file.
    Raises ConfigError or KeysUnusable; a wrong flag ends the process with a usage line, as everywhere."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--config", type=Path, required=True, help="YAML configuration file")
    parser.add_argument("--name", required=True, help="name of this process in the cluster, such as decode-0")
    parser.add_argument("--node", default="local", help="name of the machine: its processes share one store")
    parser.add_argument("--host", default=LOOPBACK, help="address at which the other nodes reach this one")
    if needs_router:
        text = "ZMQ endpoint of a router, tcp://host:port; may be given more than once"
        parser.add_argument("--router", action="append", required=True, help=text)
    options = parser.parse_args(argv)
    settings, host = config.load(options.config), normal(options.host)
    if why := problem(host):
        raise ConfigError(f"--host: {why}")
    raise_descriptor_limit()
    share_heaps()
    logs.configure(options.name, settings.cluster)
    routers = tuple(options.router) if needs_router else ()
    use_keys(cluster_keys(settings, host, routers))
    return Arguments(settings, options.name, options.node, routers, host)


def cluster_keys(settings: Config, host: str = LOOPBACK, routers: Sequence[str] = ()) -> ClusterKeys:
    """Return the cluster's keys for a process on `host` behind those routers. A cluster on one machine needs no
    cluster.key_file: its first process makes the default file. Raises KeysUnusable."""
    if settings.cluster.key_file:
        return ClusterKeys.read_file(settings.cluster.key_path)
    inner = host if is_wildcard(settings.router.host) else settings.router.host
    for address in (host, inner, *map(host_of, routers)):
        if not is_loopback(address):
            raise KeysUnusable(
                f"{address} is not on loopback, so every node needs the same keys: make them with `baton keys cluster "
                "FILE`, copy that file to every node and set cluster.key_file to it there"
            )
    try:
        path = settings.cluster.key_path
    except ConfigError:
        raise KeysUnusable(
            "there is no home directory for the cluster's keys: make them with `baton keys cluster FILE` and set "
            "cluster.key_file to that file"
        ) from None
    return ClusterKeys.read_or_make(path)


Run = Callable[[Config, str, str, tuple[str, ...], threading.Event, str], None]


def main(program: str, run: Run, argv: Sequence[str] | None = None) -> int:
    """Run a process behind its routers until SIGTERM or SIGINT; 0, or 1 with the reason on stderr."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        arguments = parse(program, argv, needs_router=True)
        run(arguments.config, arguments.name, arguments.node, arguments.routers, stop, arguments.host)
    except BatonError as error:
        print(f"{program}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def raise_descriptor_limit() -> int:
    """Let this process open as many descriptors as its hard limit allows, 65,536 at most; returns the limit. The usual
    soft limit of 1,024 is for programs that use select, and few idle connections reach it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it: then as many as before
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def share_heaps() -> None:
    """Have all threads share two of glibc's heaps. Else each thread gets one of its own, in which what it frees stays:
    a router with 30 threads kept 70 MiB in them, and more from minute to minute."""
    with contextlib.suppress(AttributeError, OSError):  # another C library: it has no such heaps
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def settle() -> None:
    """To be called once everything is loaded and before the first request: what is there by then stays, and Python's
    collector need never look at it again. In a process that has imported torch it would hold everything up for 0.1 s
    at a time."""
    gc.collect()
    gc.freeze()
