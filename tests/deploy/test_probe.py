"""Finding out how a Ray wants to be spoken to, against a stand-in that answers as Ray's head does."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.errors import RayUnusable
from deploy.control_plane.probe import PATIENCE, RayAnswer, ask_ray, find, link, token


class _Head(grpc.GenericRpcHandler):
    def __init__(self, token: str | None) -> None:
        self._token = token

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        assert getattr(details, "method") == "/ray.rpc.NodeInfoGcsService/GetClusterId"  # noqa: B009
        sent = dict(getattr(details, "invocation_metadata")).get("authorization")  # noqa: B009
        return grpc.unary_unary_rpc_method_handler(self._answer(sent))

    def _answer(self, sent: str | None) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._token is not None and sent != f"Bearer {self._token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return answer


@contextmanager
def head(token: str | None) -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[_Head(token)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("HOME", str(tmp_path))
    return {}


def test_a_ray_without_authentication(environment: dict[str, str]):
    with head(None) as address:
        assert link(address, environment).mode == "disabled"


def test_a_ray_with_a_token_of_ours(environment: dict[str, str], tmp_path: Path):
    file = tmp_path / "somewhere"
    file.write_text("secret\n")
    environment["RAY_AUTH_TOKEN_PATH"] = str(file)
    with head("secret") as address:
        ray = link(address, environment)
    assert (ray.mode, ray.token_path) == ("token", str(file))


def test_the_default_token_file(environment: dict[str, str], tmp_path: Path):
    assert token(environment) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("one")
    secret = token(environment)
    assert secret.text == "one"
    both = token(environment | {"RAY_AUTH_TOKEN": "two"})
    assert both.text == "two"


@pytest.mark.parametrize(("ours", "says"), [(None, "ray get-auth-token"), ("wrong", "refuses the token")])
def test_a_ray_whose_token_we_lack(environment: dict[str, str], ours: str | None, says: str):
    if ours is not None:
        environment["RAY_AUTH_TOKEN"] = ours
    with head("secret") as address, pytest.raises(RayUnusable, match=says):
        link(address, environment)


def test_an_address_without_a_ray(environment: dict[str, str]):
    with pytest.raises(RayUnusable, match="ray start --head"):
        link("127.0.0.1:1", environment)


def test_a_ray_that_never_answers():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        begin = time.monotonic()
        assert ask_ray("127.0.0.1:%d" % listener.getsockname()[1], None, 0.5) is RayAnswer.SILENT  # noqa: UP031
        assert time.monotonic() - begin < PATIENCE


def test_the_users_word_counts_most():
    assert find({"RAY_ADDRESS": "10.0.0.1:6379"}) == "10.0.0.1:6379"
    with pytest.raises(RayUnusable, match="host:port"):
        find({"RAY_ADDRESS": "ray://10.0.0.1:10001"})
