"""API keys: the file with their hashes, and a router's view of it."""

import threading
from pathlib import Path

import pytest

from baton.api_keys import Identity, KeyRing, add_key, hash_of, read_keys, remove
from baton.errors import InvalidRequest, KeyNotFound, KeysUnusable


def new_key(path: Path, name: str = "one", **more: object) -> str:
    return add_key(path, Identity(**{"name": name, "tenant": "acme", **more}), "2026-01-01T00:00:00+00:00")  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "api-keys.json"


def test_the_file_is_for_its_owner_and_holds_no_key(path: Path) -> None:
    key = new_key(path, max_streams=3)
    assert len(key) > 40
    assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    assert key.removeprefix("baton-") not in path.read_text()
    (entry,) = read_keys(path) or ()
    assert (entry.name, entry.tenant, entry.sha256, entry.max_streams) == ("one", "acme", hash_of(key), 3)
    assert new_key(path, "two") != key


def test_a_key_finds_its_client_and_nothing_else_does(path: Path) -> None:
    key = new_key(path)
    ring = KeyRing(path)
    identity = ring.find(key)
    assert (identity.name, identity.tenant, identity.operator) == ("one", "acme", False)
    for wrong in ("", "x", key[:-1], key + "x", key.upper(), hash_of(key), "é" * 10, "x" * 100_000):
        assert ring.find(wrong) is None


def test_a_ring_follows_the_file(path: Path) -> None:
    ring = KeyRing(path)
    assert not ring.required
    first = new_key(path)
    assert ring.find(first) is None, "only refresh looks at the file"
    ring.refresh()
    assert ring.required
    assert ring.find(first) is not None
    second = new_key(path, "two", operator=True)
    remove(path, "one")
    ring.refresh()
    assert ring.find(first) is None
    assert (identity := ring.find(second)) is not None
    assert identity.operator


def test_without_the_last_key_or_the_file_every_client_is_refused(path: Path) -> None:
    key = new_key(path)
    ring = KeyRing(path)
    assert remove(path, "one") == 0
    ring.refresh()
    assert ring.required
    assert ring.find(key) is None
    assert KeyRing(path).required
    path.unlink()
    ring.refresh()
    assert ring.required
    assert ring.find(key) is None
    assert not KeyRing(path).required


def test_a_file_that_breaks_while_a_router_runs_changes_nothing(path: Path) -> None:
    key = new_key(path)
    ring = KeyRing(path)
    path.write_text("{")
    ring.refresh()
    assert ring.find(key) is not None
    path.write_text('{"keys": [{"name": "one", "sha256": "short"}]}')
    with pytest.raises(KeysUnusable, match="holds no API keys"):
        KeyRing(path)


def test_a_file_that_others_can_read_is_refused(path: Path) -> None:
    new_key(path)
    path.chmod(0o640)
    with pytest.raises(KeysUnusable, match="chmod 600"):
        KeyRing(path)
    with pytest.raises(KeysUnusable, match="chmod 600"):
        new_key(path, "two")


def test_a_folder_in_place_of_the_file(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(KeysUnusable):
        read_keys(path)
    with pytest.raises(KeysUnusable):
        new_key(path)


@pytest.mark.parametrize("name", ["", "a b", "*", "-x", "ä", "x" * 65, "a\nb"])
def test_names_and_tenants_are_plain_words(path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="name is"):
        new_key(path, name)
    if name:
        with pytest.raises(InvalidRequest, match="tenant is"):
            new_key(path, tenant=name)
    assert not path.exists()


def test_a_name_is_used_once_and_only_an_operator_may_lack_a_tenant(path: Path) -> None:
    new_key(path)
    with pytest.raises(InvalidRequest, match="already"):
        new_key(path)
    with pytest.raises(InvalidRequest, match="needs a tenant"):
        new_key(path, "two", tenant="")
    new_key(path, "two", tenant="", operator=True)
    with pytest.raises(KeyNotFound, match="no key named 'three'"):
        remove(path, "three")


def test_no_key_is_lost_when_several_are_added_at_once(path: Path) -> None:
    threads = [threading.Thread(target=new_key, args=(path, f"key-{number}")) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_keys(path) or ()) == 12
    assert [file.name for file in path.parent.iterdir() if file.name.endswith("json")] == [path.name]


def test_the_clusters_own_key_is_an_operators(path: Path) -> None:
    ring = KeyRing(path, required=True, operator_key="secret")
    assert (identity := ring.find("secret")) is not None
    assert identity.operator
