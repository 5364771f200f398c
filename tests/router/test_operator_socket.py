"""The operator's socket: this user's alone, and never another router's."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from baton.errors import ConfigError, PortInUse, StartupError
from router.operator_socket import bind_address, remove


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_the_folders_are_for_this_user_alone(runtime: Path) -> None:
    before = os.umask(0)
    try:
        assert bind_address("", "mine", "router") == f"unix:{runtime}/baton/mine/router.sock"
    finally:
        os.umask(before)
    for folder in ("baton", "baton/mine"):
        assert stat.S_IMODE((runtime / folder).stat().st_mode) == 0o700


def test_a_folder_that_others_may_enter_is_refused(runtime: Path) -> None:
    (runtime / "baton").mkdir()
    (runtime / "baton").chmod(0o755)
    with pytest.raises(StartupError, match="mode 755"):
        bind_address("", "mine", "router")


def test_a_link_is_refused(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (runtime / "baton").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="is no directory of user"):
        bind_address("", "mine", "router")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(runtime: Path) -> None:
    (runtime / "baton").mkdir(mode=0o700)
    os.chown(runtime / "baton", 65_534, 65_534)
    with pytest.raises(StartupError, match="owner 65534"):
        bind_address("", "mine", "router")


def test_without_a_runtime_directory_the_folder_has_the_users_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    address = bind_address("", "test-operator-socket", "router")
    assert address == f"unix:/tmp/baton-{os.getuid()}/test-operator-socket/router.sock"
    remove(address)
    assert not Path(f"/tmp/baton-{os.getuid()}/test-operator-socket").exists()


def test_the_socket_of_a_dead_router_gives_way_and_that_of_a_live_one_does_not(runtime: Path) -> None:
    path = bind_address("", "mine", "router").removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(PortInUse, match="another router listens"):
            bind_address("", "mine", "router")
    assert bind_address("", "mine", "router") == f"unix:{path}"
    assert not Path(path).exists()


def test_a_path_that_no_socket_may_have(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    deep = runtime / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(StartupError, match="too long for a Unix socket"):
        bind_address("", "mine", "router")


@pytest.mark.parametrize("address", ["0.0.0.0:1", "10.0.0.1:50054", "somewhere:1", "127.0.0.1", "[::]:1"])
def test_only_loopback_may_be_named(address: str) -> None:
    with pytest.raises(ConfigError, match=r"must be host:port on loopback"):
        bind_address(address, "mine", "router")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:50054", "localhost:1"])
def test_loopback_is_taken_as_it_is(address: str) -> None:
    assert bind_address(address, "mine", "router") == address
