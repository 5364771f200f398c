"""The operator's port: its services, which the public port lacks, and the users that may open its socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton import config as settings
from baton import operator_port
from baton.errors import ConfigError, PortInUse, StartupError
from baton.operator_address import operator_of_router, parse_operator
from baton.v1 import cache_pb2, cluster_pb2, cluster_pb2_grpc, generation_pb2
from router.service import serve
from tests.router.served import Served, served, settings_for

pytestmark = pytest.mark.slow

OPERATORS = {
    f"{service.full_name}/{method.name}": method
    for service in (
        cluster_pb2.DESCRIPTOR.services_by_name["Cluster"],
        cache_pb2.DESCRIPTOR.services_by_name["Cache"],
    )
    for method in service.methods
}


@contextlib.asynccontextmanager
async def router(config: settings.Config) -> AsyncIterator[tuple[Served, grpc.aio.Channel, grpc.aio.Channel]]:
    """A router, and channels to its public port and to its operator's."""
    async with (
        served(config) as running,
        grpc.aio.insecure_channel(running.addresses.grpc) as public,
        grpc.aio.insecure_channel(running.addresses.operator) as operator,
    ):
        yield running, public, operator


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 45))


async def status_of(channel: grpc.aio.Channel, path: str, method: MethodDescriptor) -> grpc.StatusCode:
    """What a call with an empty request comes to."""
    empty = message_factory.GetMessageClass(method.input_type)()
    call = channel.unary_unary(f"/{path}", request_serializer=lambda message: message.SerializeToString())
    try:
        await call(empty, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def services(channel: grpc.aio.Channel) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    await call.done_writing()
    return {name for name in listed if name.startswith("baton.")}


async def health(channel: grpc.aio.Channel, service: str) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status


# --- which port serves what ---


def test_the_public_port_has_no_method_of_the_operators(tmp_path: Path) -> None:
    async def test() -> None:
        async with router(settings_for(tmp_path)) as (_, public, operator):
            assert len(OPERATORS) >= 9
            for path, method in OPERATORS.items():
                assert await status_of(public, path, method) is grpc.StatusCode.UNIMPLEMENTED, path
                assert await status_of(operator, path, method) is not grpc.StatusCode.UNIMPLEMENTED, path
            generate = generation_pb2.DESCRIPTOR.services_by_name["Generation"].methods_by_name["Generate"]
            assert await status_of(operator, "baton.v1.Generation/Generate", generate) is grpc.StatusCode.UNIMPLEMENTED
            assert await services(public) == {"baton.v1.Generation"}
            assert await services(operator) == {"baton.v1.Cluster", "baton.v1.Cache"}

    run(test)


def test_health_on_both_ports(tmp_path: Path) -> None:
    async def test() -> None:
        async with router(settings_for(tmp_path)) as (_, public, operator):
            kinds = health_pb2.HealthCheckResponse
            assert await health(public, "") == await health(public, "baton.v1.Generation") == kinds.NOT_SERVING
            assert await health(operator, "") == await health(operator, "baton.v1.Cache") == kinds.NOT_SERVING
            assert await health(operator, "baton.v1.Cluster") == kinds.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health(public, "baton.v1.Cluster")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(test)


@pytest.mark.parametrize("setting", ["127.0.0.1:0", "[::1]:0"])
def test_a_port_on_loopback(tmp_path: Path, setting: str) -> None:
    async def test() -> None:
        async with router(settings_for(tmp_path, operator=setting)) as (running, public, operator):
            assert running.addresses.operator.startswith(setting.removesuffix("0"))
            assert running.addresses.operator != setting
            method = OPERATORS["baton.v1.Cluster/GetStatus"]
            assert await status_of(operator, "baton.v1.Cluster/GetStatus", method) is grpc.StatusCode.OK
            assert await status_of(public, "baton.v1.Cluster/GetStatus", method) is grpc.StatusCode.UNIMPLEMENTED

    if ":" in setting and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    run(test)


# --- the socket ---


def socket_of(folder: Path) -> Path:
    return folder / "run" / "router.sock"


def test_only_its_user_can_open_the_socket_and_it_ends_with_the_router(tmp_path: Path) -> None:
    path = socket_of(tmp_path)

    async def test() -> None:
        async with router(settings_for(tmp_path)) as (running, _, _):
            assert running.addresses.operator == f"unix:{path}"
            assert stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert not path.exists()

    run(test)


STRANGER = """
    import os, socket, sys
    import grpc
    from baton.v1 import cluster_pb2, cluster_pb2_grpc
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    try:
        socket.socket(socket.AF_UNIX).connect(sys.argv[1])
        print("connected")
    except OSError as error:
        print(type(error).__name__)
    with grpc.insecure_channel(f"unix:{sys.argv[1]}") as channel:
        try:
            cluster_pb2_grpc.ClusterStub(channel).GetStatus(cluster_pb2.GetStatusRequest(), timeout=10)
            print("answered")
        except grpc.RpcError as error:
            print(error.code().name)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("opened", [False, True], ids=["as made", "folders opened"])
def test_another_user_can_not(opened: bool) -> None:
    """The folder keeps another user out, and where a mistake has opened all folders, so does the socket."""

    async def test(home: Path) -> None:
        path = socket_of(home)
        async with router(settings_for(home)):
            for folder in (home, path.parent) if opened else (home,):
                folder.chmod(0o755)
            command = [sys.executable, "-c", textwrap.dedent(STRANGER), str(path)]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.stdout.split() == ["PermissionError", "UNAVAILABLE"], done.stderr

    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # unlike tmp_path, below no folder that is closed to others
        run(lambda: test(Path(home)))


def test_a_socket_that_a_dead_router_has_left_is_removed(tmp_path: Path) -> None:
    path = socket_of(tmp_path)
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))

    async def test() -> None:
        async with router(settings_for(tmp_path)) as (_, _, operator):
            stub: Any = cluster_pb2_grpc.ClusterStub(operator)
            assert (await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=10)).cluster == "baton"

    run(test)


def test_a_socket_at_which_a_process_listens_is_left_alone(tmp_path: Path) -> None:
    path = socket_of(tmp_path)
    path.parent.mkdir(mode=0o700)

    async def test() -> None:
        async with router(settings_for(tmp_path)):
            pass

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as alive:
        alive.bind(str(path))
        alive.listen(1)
        with pytest.raises(PortInUse, match="another router listens"):
            run(test)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def a_file(folder: Path) -> None:
    folder.touch()


def a_strangers(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)


def an_open_one(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


def one_with_a_file(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "router.sock").touch()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (a_link, "is a link"),
        (a_file, "is no folder"),
        (an_open_one, "has mode 0750.*chmod 700"),
        (one_with_a_file, "is no socket; remove it"),
        pytest.param(
            a_strangers,
            "belongs to uid 65534",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away"),
        ),
    ],
)
def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path: Path, make: Callable[[Path], None], said: str) -> None:
    make(tmp_path / "run")

    async def test() -> None:
        async with router(settings_for(tmp_path)):
            pass

    with pytest.raises(StartupError, match=said):
        run(test)


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / "router.sock"
    with pytest.raises(StartupError, match=f"{len(str(path))} bytes, and Linux takes 107"):
        operator_port.prepare(path, is_default=False)


# --- the setting ---


@pytest.mark.parametrize("setting", ["0.0.0.0:50054", "[::]:1", "10.1.2.3:50054", "example.org:50054", ":50054"])
def test_a_port_that_others_reach_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="could drain and profile the cluster") as caught:
        settings.load(overrides={"router.operator": setting})
    assert setting in str(caught.value)


@pytest.mark.parametrize(
    "setting", ["50054", "127.0.0.1", "127.0.0.1:65536", "127.0.0.1:x", "run/router.sock", "unix:"]
)
def test_a_setting_that_names_no_place_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="write the absolute path of a Unix socket"):
        settings.load(overrides={"router.operator": setting})


def test_what_gRPC_can_not_tell_apart_is_refused() -> None:  # noqa: N802
    with pytest.raises(ConfigError, match="splits an address at its commas"):
        settings.load(overrides={"router.operator": "/run/a,b.sock"})


def test_its_port_is_another_than_the_public_one() -> None:
    with pytest.raises(ConfigError, match="must differ"):
        settings.load(overrides={"router.operator": "127.0.0.1:50051"})


def test_paths_become_targets_and_back() -> None:
    assert parse_operator("unix:/run/a%20b.sock") == parse_operator("/run/a b.sock") == Path("/run/a b.sock")
    targets = [operator_port.target(Path("/run/a b%.sock")), "127.0.0.1:5"]
    assert targets[0] == "unix:/run/a%20b%25.sock"
    assert operator_port.paths(targets) == [Path("/run/a b%.sock")]


def test_other_routers_have_ports_of_their_own() -> None:
    of_router = operator_of_router
    assert of_router("", "router-1") == ""
    assert of_router("/run/x/router.sock", "router-1") == "/run/x/router.router-1.sock"
    assert of_router("[::1]:50054", "router-1") == ""
    assert of_router("[::1]:50054", "router") == "[::1]:50054"
    assert of_router("/run/x/router.sock", "router") == "/run/x/router.sock"


def test_the_default_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path(f"/tmp/baton-{os.geteuid()}/mine/router.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert operator_port.default_path("mine", "router") == shared
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert operator_port.default_path("mine", "router") == tmp_path / "baton" / "mine" / "router.sock"
    tmp_path.chmod(0o770)  # others could exchange what is in it
    assert operator_port.default_path("mine", "router") == shared
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert operator_port.default_path("mine", "router") == shared
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert operator_port.default_path("mine", "router") == shared


def test_at_the_default_path_both_folders_are_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "baton" / "baton"

    async def test() -> None:
        async with router(settings_for(tmp_path, operator="")) as (running, _, _):
            assert running.addresses.operator == f"unix:{folder}/router.sock"
            assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {0o700}
            operator_port.clear(folder)
            assert (folder / "router.sock").exists()  # its router lives
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(folder / "router.sock"))
        operator_port.clear(folder)
        assert not folder.parent.exists()
        folder.parent.mkdir()
        folder.parent.chmod(0o777)
        async with router(settings_for(tmp_path, operator="")):
            pass

    with pytest.raises(StartupError, match="baton has mode 0777"):
        run(test)


def test_a_socket_whose_file_is_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder goes with $XDG_RUNTIME_DIR when its user logs out, and the cluster stays."""
    home = tmp_path / "runtime"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    monkeypatch.setattr("baton.operator_port._SHARED", tmp_path)
    elsewhere = tmp_path / f"baton-{os.geteuid()}" / "baton" / "router.sock"

    async def test() -> None:
        said: asyncio.Queue[str] = asyncio.Queue()
        stop, config = asyncio.Event(), settings_for(tmp_path, operator="")
        serving = asyncio.create_task(serve(config, "router", "a", stop, lambda found: said.put_nowait(found.operator)))
        here = await said.get()
        request = cluster_pb2.GetStatusRequest()
        async with grpc.aio.insecure_channel(here) as before:
            first: Any = cluster_pb2_grpc.ClusterStub(before)
            await first.GetStatus(request, timeout=10)
            shutil.rmtree(home)
            there = await said.get()
            async with grpc.aio.insecure_channel(there) as after:
                second: Any = cluster_pb2_grpc.ClusterStub(after)
                await second.GetStatus(request, timeout=10)
            await first.GetStatus(request, timeout=10)
        stop.set()
        await serving
        assert (here, there) == (f"unix:{home}/baton/baton/router.sock", f"unix:{elsewhere}")
        assert not elsewhere.exists()

    run(test)
