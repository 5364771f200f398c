"""A fresh machine for each test; skipped, with the reason, where the kernel does not let us have one. And a second
network in it, for a second node."""

from collections.abc import Iterator
from functools import cache

import pytest

from engine.cpu import build
from tests.cluster.machine import ONE, TWO, Machine, unavailable

_unavailable = cache(unavailable)


@pytest.fixture
def machine() -> Iterator[Machine]:
    if reason := _unavailable():
        pytest.skip(reason)
    build.library()  # compiled here, not while a cluster is timed
    with Machine() as one:
        one.make_model()
        yield one


@pytest.fixture
def there(machine: Machine) -> Iterator[list[str]]:
    """Another network, joined to the machine's own by a cable: how a command is started in it."""
    with machine.start("unshare", "--net", "sleep", "infinity") as holder:
        yield connect(machine)
        holder.kill()


def connect(machine: Machine) -> list[str]:
    machine.wait("the other network is there", lambda: bool(machine.run("pgrep", "-x", "sleep").out))
    pid = machine.run("pgrep", "-x", "sleep").out.strip()
    there = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    machine.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", pid)
    for enter, address in (([], ONE), (there, TWO)):
        for command in (
            "ip link set lo up",
            f"ip addr add {address}/24 dev cable",
            "ip link set cable up",
            "ip route add default dev cable",  # without one Ray does not find its own address
        ):
            assert machine.run(*enter, *command.split()).status == 0, command
    return there
