"""Fixed ports: what holds one is named, a connection is waited for, and an address of elsewhere is told at once."""

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from baton import ports
from baton.errors import PortInUse, StartupError
from baton.operator_port import target
from baton.ports import FixedPort, Patience
from tests.support.outgoing import outgoing

AT_ONCE = Patience(0.0, 0.0, 0.0, 0.0)


def door(port: int, host: str = "127.0.0.1", patience: Patience = AT_ONCE) -> FixedPort:
    return FixedPort("router.grpc_port", host, port, "api.host", patience=patience)


def held(port: int, host: str = "127.0.0.1") -> str:
    with pytest.raises(PortInUse) as caught:
        list(door(port, host).waits())
    assert f"{host}:{port} (router.grpc_port)" in str(caught.value)
    assert "--set router.grpc_port=0" in str(caught.value)
    return str(caught.value)


def test_what_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"process {os.getpid()} (" in held(port)
        assert "listens there" in held(port, "0.0.0.0")
    list(door(port).waits())


def test_what_listens_at_ipv4_by_a_socket_of_ipv6_is_named_as_with_grpc() -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("::ffff:127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert f"process {os.getpid()} (" in held(port)
        with pytest.raises(PortInUse, match="listens there"):
            list(replace(door(port), partners=["unix:/nothing.sock"]).waits())


def test_an_outgoing_connection_is_named_with_its_peer() -> None:
    with outgoing() as connection:
        message = held(connection.port)
        assert f"process {os.getpid()} (" in message
        assert "to 127.0.0.1:" in message
        assert "ESTABLISHED" in message
        assert f"ip_local_reserved_ports={connection.port}" in message


def test_a_connection_that_has_ended_is_named() -> None:
    with outgoing() as connection:
        connection.end()
        assert "TIME_WAIT" in held(connection.port)


def test_a_socket_that_is_bound_and_does_not_listen() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert "does not listen" in held(bound.getsockname()[1])


def test_a_port_is_waited_for_while_a_connection_holds_it() -> None:
    with outgoing() as connection:
        waits = door(connection.port, patience=Patience()).waits()
        for _ in range(3):
            assert next(waits) > 0
        connection.reset()
        assert list(waits) == []


def test_a_connection_that_ends_while_it_is_looked_at_is_no_reason_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held the port at the bind, for long already, and nothing can be seen of it a moment later."""
    with outgoing() as connection:
        now = 0.0
        monkeypatch.setattr(ports.time, "monotonic", lambda: now)
        waits = door(connection.port, patience=Patience()).waits()
        assert next(waits) > 0
        now, holder = 60.0, ports._holder

        def gone(fixed: FixedPort) -> ports._Holder:
            connection.reset()
            return holder(fixed)

        monkeypatch.setattr(ports, "_holder", gone)
        assert len(list(waits)) <= 1


def test_a_connection_that_comes_between_the_look_and_the_bind_is_waited_for() -> None:
    tries = 0

    async def listen() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise PortInUse("taken meanwhile")
        return "listening"

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert asyncio.run(door(port).claim(listen)) == "listening"


@pytest.mark.parametrize("port", [0, 1234])
def test_a_host_that_is_not_of_this_machine(port: int) -> None:
    with pytest.raises(StartupError, match=r"api\.host is 192\.0\.2\.1, which is no address of this machine"):
        list(door(port, "192.0.2.1").waits())


def test_routers_share_a_port_with_one_another_and_with_no_stranger(tmp_path: Path) -> None:
    """A process is a router of the cluster if it holds the operator's address of one."""
    operator = tmp_path / "router.sock"
    shared = replace(door(0), partners=[target(tmp_path / "nothing.sock"), target(operator)])
    with asyncio.run(shared.listener()) as listener, socket.socket(socket.AF_UNIX) as mine:
        shared = replace(shared, port=listener.getsockname()[1])
        with pytest.raises(PortInUse, match=rf"process {os.getpid()} \(.*listens there"):
            list(shared.waits())
        mine.bind(str(operator))
        mine.listen()
        with asyncio.run(shared.listener()) as other:
            assert other.getsockname() == listener.getsockname()
        held(shared.port)  # a port that is not shared
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(PortInUse):  # it lacks the option
        list(replace(shared, port=server.getsockname()[1]).waits())
