"""The operator's port: its services, which the public port lacks, and the users that may open its socket."""

import asyncio
import contextlib
import io
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton import config as settings
from baton import operator_port
from baton.client import AsyncClient
from baton.errors import ConfigError, PortInUse, StartupError
from baton.operator_address import operator_of_router, parse_operator
from baton.operator_api import Drain, GetStatus, ListPins, Unpin
from router.frontend.api import operator_server, server
from router.frontend.api.operator_server import OperatorCalls
from router.service import serve
from tests.router.served import Served, served, settings_for
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def router(config: settings.Config) -> AsyncIterator[tuple[Served, grpc.aio.Channel, AsyncClient]]:
    """A router, a channel to its public port, and a client of its operator's."""
    async with (
        served(config) as running,
        grpc.aio.insecure_channel(running.addresses.grpc) as public,
        AsyncClient(operator=running.addresses.operator) as operator,
    ):
        yield running, public, operator


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


async def test_the_public_ports_have_no_call_of_the_operators(tmp_path: Path) -> None:
    async with router(settings_for(tmp_path)) as (running, public, _):
        assert await services(public) == {"baton.v1.Generation"}
        for port in (running.addresses.grpc, running.addresses.api, running.addresses.http):
            async with AsyncClient(operator=port) as stranger:
                for call in (GetStatus(), ListPins(), Drain("decode-0"), Unpin("a")):
                    with pytest.raises(ConfigError, match="does not serve that"):
                        await stranger.ask(call, 10)


async def test_health_on_both_ports(tmp_path: Path) -> None:
    async with router(settings_for(tmp_path)) as (running, public, operator):
        kinds = health_pb2.HealthCheckResponse
        assert await health(public, "") == await health(public, "baton.v1.Generation") == kinds.NOT_SERVING
        assert await operator.answers()
        assert not await operator.serving()
        running.start("decode", "decode-0")
        await eventually_async(operator.serving)


@pytest.mark.parametrize("setting", ["127.0.0.1:0", "[::1]:0"])
async def test_a_port_on_loopback(tmp_path: Path, setting: str) -> None:
    if ":" in setting and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    async with router(settings_for(tmp_path, operator=setting)) as (running, _, operator):
        assert running.addresses.operator.startswith(setting.removesuffix("0"))
        assert running.addresses.operator != setting
        assert (await operator.status()).cluster == "baton"


# --- what it refuses ---


async def ask(
    operator: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Status, error and headers of a request to the operator's socket."""
    connector = aiohttp.UnixConnector(operator.removeprefix("unix:"))
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.request(method, f"http://localhost{path}", data=body and io.BytesIO(body), headers=headers) as answer,
    ):
        content = await answer.json()
        error = content["error"]["message"] if answer.status != 200 else ""
        return answer.status, error, {name.lower(): value for name, value in answer.headers.items()}


REFUSED: list[tuple[str, str, bytes | None, int, str, str]] = [
    ("POST", "/drain", b"{", 400, "invalid_request", "is no JSON"),
    ("POST", "/drain", b'{"worker": 5}', 400, "invalid_request", "Expected `str`, got `int`"),
    ("POST", "/drain", b'{"worker": "a", "soon": true}', 400, "invalid_request", "unknown field `soon`"),
    ("POST", "/drain", b'{"worker": "decode-9"}', 404, "process_not_found", "'decode-9'"),
    ("POST", "/drain", b'{"worker": "%s"}' % (b"x" * 20_000), 404, "process_not_found", "..."),
    ("POST", "/role", b'{"worker": "decode-9", "role": "decode"}', 404, "process_not_found", "'decode-9'"),
    ("POST", "/role", b'{"worker": "decode-9", "role": "store"}', 400, "invalid_request", "Invalid enum value 'store'"),
    ("POST", "/profile", b'{"process": "a", "steps": 10001}', 400, "invalid_request", "<= 10000"),
    ("POST", "/profile", b'{"process": "a", "steps": 1, "stop": true}', 400, "invalid_request", "not for both"),
    ("POST", "/pin", b'{"text": "x", "model": "large"}', 404, "model_mismatch", "'large'"),
    ("POST", "/pin", b'{"text": "%s"}' % (b"x" * 2**21), 413, "payload_too_large", "send less"),
    ("POST", "/pin", b'{"token_ids": [1, 2, 3]}', 400, "invalid_request", "no full page"),
    ("POST", "/unpin", b'{"id": "a"}', 404, "pin_not_found", "'a'"),
    ("GET", "/explain", None, 400, "invalid_request", "missing required field `request_id`"),
    ("GET", "/explain?request_id=none", None, 404, "request_not_found", "'none'"),
    ("GET", "/requests?last=-1", None, 400, "invalid_request", ">= 0"),
    ("GET", "/nothing", None, 404, "invalid_request", "POST /drain"),
    ("GET", "/drain", None, 405, "invalid_request", "POST /drain"),
]


async def test_bad_calls_get_typed_errors(tmp_path: Path) -> None:
    async with router(settings_for(tmp_path)) as (running, _, operator):
        for method, path, body, status, reason, says in REFUSED:
            seen, error, headers = await ask(running.addresses.operator, method, path, body)
            assert (seen, headers["baton-reason"]) == (status, reason), (path, body and body[:80], error)
            assert says in error
            assert len(error) < 2_100
        assert await operator.answers()


async def test_web_pages_are_refused(tmp_path: Path) -> None:
    """A browser may reach the socket through ssh, and a name may point to loopback."""
    async with router(settings_for(tmp_path)) as (running, _, _):
        target = running.addresses.operator
        for page in ({"Origin": "http://localhost"}, {"Sec-Fetch-Site": "none"}, {"Host": "example.org"}):
            for method, path in (("GET", "/status"), ("POST", "/drain")):
                status, _, headers = await ask(target, method, path, b"{}", **page)
                assert (status, headers["baton-reason"]) == (403, "permission_denied")


async def test_a_call_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(operator_server, "_SECONDS", 0.05)
    monkeypatch.setattr(OperatorCalls, "answer", forever)
    async with router(settings_for(tmp_path)) as (running, _, _):
        status, error, _ = await ask(running.addresses.operator, "GET", "/status")
        assert (status, "within 0.05 s" in error) == (504, True)


async def test_connections_are_bounded_and_silent_ones_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_server, "_CALLS_AT_ONCE", 4)
    monkeypatch.setattr(server, "SPARE", 4)
    async with router(settings_for(tmp_path)) as (_, _, operator):
        path = socket_of(tmp_path)
        silent = [await asyncio.open_unix_connection(path) for _ in range(20)]
        assert (await operator.status(timeout=10)).cluster == "baton"
        ended = [asyncio.wait_for(reader.read(), 10) for reader, _ in silent[:12]]
        assert await asyncio.gather(*ended) == [b""] * 12
        for _, writer in silent:
            writer.close()


# --- the socket ---


def socket_of(folder: Path) -> Path:
    return folder / "run" / "router.sock"


async def test_only_its_user_can_open_the_socket_and_it_ends_with_the_router(tmp_path: Path) -> None:
    path = socket_of(tmp_path)
    async with router(settings_for(tmp_path)) as (running, _, _):
        assert running.addresses.operator == f"unix:{path}"
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


STRANGER = """
    import os, socket, sys, aiohttp
    from baton.client import Client
    from baton.errors import BatonError
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    try:
        socket.socket(socket.AF_UNIX).connect(sys.argv[1])
        print("connected")
    except OSError as error:
        print(type(error).__name__)
    with Client(operator=f"unix:{sys.argv[1]}") as client:
        try:
            client.status(timeout=10)
            print("answered")
        except BatonError as error:
            print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("opened", [False, True], ids=["as made", "folders opened"])
async def test_another_user_can_not(opened: bool) -> None:
    """The folder keeps another user out, and where a mistake has opened all folders, so does the socket."""

    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # unlike tmp_path, below no folder that is closed to others
        path = socket_of(Path(home))
        async with router(settings_for(Path(home))):
            for folder in (Path(home), path.parent) if opened else (Path(home),):
                folder.chmod(0o755)
            command = [sys.executable, "-c", textwrap.dedent(STRANGER), str(path)]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.stdout.split() == ["PermissionError", "Unavailable"], done.stderr


async def test_a_socket_that_a_dead_router_has_left_is_removed(tmp_path: Path) -> None:
    path = socket_of(tmp_path)
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    async with router(settings_for(tmp_path)) as (_, _, operator):
        assert (await operator.status(timeout=10)).cluster == "baton"


async def test_a_socket_at_which_a_process_listens_is_left_alone(tmp_path: Path) -> None:
    path = socket_of(tmp_path)
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as alive:
        alive.bind(str(path))
        alive.listen(1)
        with pytest.raises(PortInUse, match="another router listens"):
            async with router(settings_for(tmp_path)):
                pass
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
    ("make", "text"),
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
async def test_a_folder_that_is_not_ours_alone_is_refused(
    tmp_path: Path, make: Callable[[Path], None], text: str
) -> None:
    make(tmp_path / "run")
    with pytest.raises(StartupError, match=text):
        async with router(settings_for(tmp_path)):
            pass


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / "router.sock"
    with pytest.raises(StartupError, match=f"{len(str(path))} bytes, and Linux takes 107"):
        operator_port.prepare(path, is_default=False)


# --- the setting ---


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("0.0.0.0:1 [::]:1 10.1.2.3:1 example.org:1 :1", "%s.*could drain and profile the cluster"),
        ("50054 127.0.0.1 127.0.0.1:65536 127.0.0.1:x run/router.sock unix:", "absolute path of a Unix socket"),
        ("/run/a,b.sock", "commas stand between the addresses"),
        ("127.0.0.1:50051", "must differ"),
    ],
)
def test_settings_that_are_refused(wrong: str, says: str) -> None:
    for setting in wrong.split():
        with pytest.raises(ConfigError, match=says.replace("%s", re.escape(setting))):
            settings.load(overrides={"router.operator": setting})


def test_paths_become_targets_and_back() -> None:
    assert parse_operator("unix:/run/a%20b.sock") == parse_operator("/run/a b.sock") == Path("/run/a b.sock")
    targets = [operator_port.target(Path("/run/a b%.sock")), "127.0.0.1:5", "unix:/run/c.sock,/run/d.sock"]
    assert targets[0] == "unix:/run/a%20b%25.sock"
    assert operator_port.paths(targets) == [Path("/run/a b%.sock"), Path("/run/c.sock"), Path("/run/d.sock")]


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


async def test_at_the_default_path_both_folders_are_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "baton" / "baton"
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
    with pytest.raises(StartupError, match="baton has mode 0777"):
        async with router(settings_for(tmp_path, operator="")):
            pass


async def test_a_socket_whose_file_is_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder goes with $XDG_RUNTIME_DIR when its user logs out, and the cluster stays."""
    home = tmp_path / "runtime"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    monkeypatch.setattr("baton.operator_port._SHARED", tmp_path)
    elsewhere = tmp_path / f"baton-{os.geteuid()}" / "baton" / "router.sock"
    paths: asyncio.Queue[str] = asyncio.Queue()
    stop, config = asyncio.Event(), settings_for(tmp_path, operator="")
    serving = asyncio.create_task(serve(config, "router", "a", stop, lambda one: paths.put_nowait(one.operator)))
    here = await paths.get()
    connector = aiohttp.UnixConnector(here.removeprefix("unix:"))
    async with aiohttp.ClientSession(connector=connector) as before:
        assert (await before.get("http://localhost/status")).status == 200
        shutil.rmtree(home)
        there = await paths.get()
        async with AsyncClient(operator=there) as after:
            await after.status(timeout=10)
        assert (await before.get("http://localhost/status")).status == 200
    stop.set()
    await serving
    assert (here, there) == (f"unix:{home}/baton/baton/router.sock", f"unix:{elsewhere}")
    assert not elsewhere.exists()
