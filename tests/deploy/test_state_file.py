"""The state file, the overview file, and the lock."""

import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from baton.addresses import ServiceAddresses
from baton.errors import RayUnusable, StartupError
from deploy.control_plane import cluster, state_file
from deploy.control_plane.preflight import check_name_free
from deploy.control_plane.state_file import OwnRay, RayLink, State
from deploy.control_plane.teardown import tear_down
from deploy.processes import ProcessIdentity

ME = ProcessIdentity.mine()
ROUTERS = {"router": ServiceAddresses("127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4")}
DEAD = ProcessIdentity(ME.pid, ME.started - 1)


def state(**more: object) -> State:
    own = OwnRay(DEAD, "/tmp/baton-ray-x")
    fields = {"name": "baton", "ray": RayLink("127.0.0.1:1", "token", "/t", own), "log_dir": "/l", "routers": ROUTERS}
    return State(**(fields | more))  # pyright: ignore[reportArgumentType]


def test_it_comes_back_as_it_was_and_is_private(tmp_path: Path):
    written = state(supervisor=ME)
    state_file.write(tmp_path / "baton", written)
    assert state_file.read_state(tmp_path / "baton") == written
    path = state_file.path(tmp_path / "baton")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    state_file.remove(tmp_path / "baton")
    assert state_file.read_state(tmp_path / "baton") is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"name": 3}', "\x00"])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, content: str):
    state_file.path(tmp_path).write_text(content)
    with pytest.raises(StartupError, match="remove it"):
        state_file.read_state(tmp_path)


def test_a_name_is_free_when_its_cluster_has_died(tmp_path: Path):
    check_name_free(tmp_path)
    state_file.write(tmp_path, state(supervisor=DEAD))
    check_name_free(tmp_path)
    state_file.write(tmp_path, state(supervisor=ME, routers={}))  # an `up` that was killed
    check_name_free(tmp_path)
    state_file.write(tmp_path, state(supervisor=ME))
    with pytest.raises(StartupError, match="is up already"):
        check_name_free(tmp_path)


def test_one_command_at_a_time(tmp_path: Path):
    holder = (
        "import sys, pathlib; from deploy.control_plane.state_file import locked\n"
        f"with locked(pathlib.Path({str(tmp_path)!r})): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(StartupError, match="another baton command"), state_file.locked(tmp_path):
            pass
        other.kill()
    with state_file.locked(tmp_path):
        pass


def test_a_cluster_on_a_ray_that_runs_and_can_not_be_asked_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would restore what is ended behind its back. Once it has gone, the rest can be cleared away."""

    def refused(*_: object) -> None:
        raise RayUnusable("refuses our token")

    monkeypatch.setattr(cluster, "connect", refused)
    with socket.create_server(("127.0.0.1", 0)) as ray:
        state = State("kept", RayLink(f"127.0.0.1:{ray.getsockname()[1]}", "token"), "/logs")
        state_file.write(tmp_path, state)
        with pytest.raises(RayUnusable, match="refuses our token"):
            tear_down(tmp_path, state, lambda _: None)
        assert state_file.read_state(tmp_path) == state
    tear_down(tmp_path, state, lambda _: None)
    assert state_file.read_state(tmp_path) is None
