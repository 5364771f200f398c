import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from baton.config import ClusterConfig, Config, dump
from baton.errors import KeysUnusable
from baton.process import Arguments, parse, settle
from baton.wire import ClusterKeys


class _Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thaw():
    yield
    gc.unfreeze()


def test_what_is_there_by_then_is_never_looked_at_again() -> None:
    rings = [_Ring()]
    settle()
    assert not any(each is rings[0] for each in gc.get_objects())  # the collector's list of what it looks through
    assert gc.get_freeze_count() > 0


def test_garbage_is_not_kept_for_ever() -> None:
    ring = _Ring()
    gone = weakref.ref(ring)
    del ring
    settle()
    assert gone() is None


def test_what_comes_later_is_collected_as_ever() -> None:
    settle()
    ring = _Ring()
    gone = weakref.ref(ring)
    del ring
    gc.collect()
    assert gone() is None


def started(folder: Path, *arguments: str, **cluster: str) -> Arguments:
    """What a store makes of a configuration and a command line."""
    file = folder / "baton.yaml"
    file.write_text(dump(Config(cluster=ClusterConfig(log_dir=str(folder / "logs"), **cluster))))
    routers = () if "--router" in arguments else ("--router", "tcp://127.0.0.1:1")
    return parse("kvstore", ["--config", str(file), "--name", "store-0", *routers, *arguments], needs_router=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("baton.logs.configure", lambda *_: None)  # the log of the tests stays where it is
    return tmp_path / "home"


def test_the_first_process_of_a_cluster_makes_its_keys(tmp_path: Path, home: Path) -> None:
    started(tmp_path, name="one")
    path = home / ".local" / "state" / "baton" / "one" / "cluster.key"
    keys = ClusterKeys.read_file(path)
    started(tmp_path, name="one")
    assert ClusterKeys.read_file(path) == keys
    started(tmp_path, name="two")
    assert ClusterKeys.read_file(path.parents[1] / "two" / "cluster.key") != keys


def test_a_key_file_that_is_named_is_read_and_never_made(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "mine.key"
    with pytest.raises(KeysUnusable, match=f"baton keys cluster {path}"):
        started(tmp_path, key_file=str(path))
    ClusterKeys.generate().write(path)
    started(tmp_path, "--host", "192.0.2.1", key_file=str(path))
    assert not home.exists()


@pytest.mark.parametrize("arguments", [("--host", "192.0.2.1"), ("--router", "tcp://192.0.2.1:20052")])
def test_processes_on_several_nodes_need_a_key_file(tmp_path: Path, home: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(
        KeysUnusable, match=r"192\.0\.2\.1 is not on loopback.*`baton keys cluster FILE`.*cluster\.key_file"
    ):
        started(tmp_path, *arguments)
    assert not home.exists()


@pytest.mark.usefixtures("home")
def test_without_a_home_the_key_file_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(KeysUnusable, match=r"no home directory.*cluster\.key_file"):
        started(tmp_path)


LIMITS = """
import resource
from baton.process import raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
wanted = 65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard)
assert raise_descriptor_limit() == wanted
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
assert raise_descriptor_limit() == 300
"""


def test_a_process_may_open_as_many_descriptors_as_its_hard_limit_allows() -> None:
    subprocess.run([sys.executable, "-c", LIMITS], check=True, timeout=60)
