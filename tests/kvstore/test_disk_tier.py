"""The disk tier on real files: written, read back, restarted, and everything that a disk can do to it."""

import errno
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.disk import files
from kvstore.disk.files import PageFiles
from kvstore.disk.index import RETRY_SECONDS
from kvstore.disk.orders import WriteEnded
from tests.kvstore.chains import key, keys
from tests.kvstore.disk_rig import KV_HEADS, LARGE, NAMESPACE, SMALL, Rig, prefixes

pytestmark = pytest.mark.slow

SIZES = pytest.mark.parametrize("page_bytes", [SMALL, LARGE, LARGE + 8, 2**20])


@SIZES
def test_what_is_written_is_read_back_also_by_the_next_store(tmp_path: Path, page_bytes: int) -> None:
    with Rig(tmp_path, page_bytes) as rig:
        for word in ("abcabc", "abb", "cc"):
            ended = sorted(rig.write(word), key=lambda each: each.slot)
            assert ended == [WriteEnded(each, slot) for slot, each in enumerate(keys(word))]
        assert rig.readable() == prefixes("abcabc", "abb", "cc")
    with Rig(tmp_path, page_bytes) as rig:
        assert rig.state == "on"
        assert rig.readable() == prefixes("abcabc", "abb", "cc")
        rig.write("abba")
        stats = rig.index.stats()
        assert (stats.torn, stats.corrupt, stats.orphans, stats.duplicates) == (0, 0, 0, 0)
    with Rig(tmp_path, page_bytes) as rig:
        assert rig.readable() == prefixes("abcabc", "abba", "cc")


def test_without_direct_io_it_works_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = os.open
    refused: list[str] = []

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    monkeypatch.setattr(files.os, "open", refusing)
    with Rig(tmp_path, 2**20) as rig:
        rig.write("abc")
        assert rig.reads_all_of("abc")
    assert len(refused) == 6


def test_memory_that_direct_io_refuses_is_written_the_usual_way(tmp_path: Path) -> None:
    with Rig(tmp_path, 2**20) as rig:
        rig._memory = memoryview(bytearray(64 * 2**20 + 1))[1:]
        rig.write("abc")
        assert rig.reads_all_of("abc")


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with Rig(tmp_path / "deep" / "er") as rig:
            rig.write("abc")
            for path in [rig.path, *rig.path.rglob("*")]:
                mode = stat.S_IMODE(path.stat().st_mode)
                assert mode == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(old)


def test_a_directory_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir(mode=0o755)
    with Rig(tmp_path) as rig:
        assert stat.S_IMODE(rig.path.stat().st_mode) == 0o700


def test_one_store_at_a_time(tmp_path: Path) -> None:
    with Rig(tmp_path) as first:
        first.write("abc")
        second = Rig(tmp_path).open()
        assert second.state.startswith("failed: ")
        assert "in use by another store" in second.state
        assert second.index.prefix(keys("abc")) == 0
        first.tier.close()
        second.follow(second.index.tick(0.0))
        second.follow(second.index.tick(RETRY_SECONDS))
        second.until(lambda: second.state == "on")
        assert second.reads_all_of("abc")
        second.tier.close()


def test_room_is_made_and_what_is_used_stays(tmp_path: Path) -> None:
    with Rig(tmp_path, room=32) as rig:
        rig.write("abc")
        spares: set[int] = set()
        for number in range(60):
            rig.write("".join("abc"[number // 3**place % 3] for place in range(4)) + "ab")
            rig.index.touch(keys("abc"))
            rig.settle()
            assert len(rig.files()) == rig.index.stats().pages
            assert rig.index.stats().bytes == 4_096 * len(rig.files())
            spares = {file.stat().st_ino for file in rig.folder.glob("*/*.old")}
            assert 4_096 * (len(rig.files()) + len(spares)) <= rig.settings.max_bytes
        assert rig.index.stats().evictions > 50
        rig.write("ccc")
        assert spares & {file.stat().st_ino for file in rig.files()}, "no file of an evicted page was written over"
        here = rig.readable()
        assert prefixes("abc") <= here
    with Rig(tmp_path, room=32) as rig:
        assert here == rig.readable(), "a page that was written has not been found again"


def test_a_page_that_is_deleted_while_it_is_read_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.readv

    def readv(fd: int, buffers: list[memoryview]) -> int:
        Path(os.readlink(f"/proc/self/fd/{fd}")).unlink(missing_ok=True)  # noqa: PTH115
        return real(fd, buffers)

    with Rig(tmp_path, LARGE) as rig:
        rig.write("abc")
        monkeypatch.setattr(files.os, "readv", readv)
        assert rig.reads_all_of("abc")
        assert not rig.files()
        assert rig.read([key("a")]) == {key("a"): False}
        assert rig.index.stats().pages == 0


def test_no_file_stays_open(tmp_path: Path) -> None:
    with Rig(tmp_path, LARGE, room=20) as rig:
        for number in range(12):
            rig.write("abc"[number % 3] + "abc"[number // 3 % 3] + "abc"[number // 9])
            rig.readable()
            rig.settle()
        # The descriptor that lists the folder is gone by the time it is looked at.
        names = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]  # noqa: PTH115
        assert [name for name in names if name.startswith(str(rig.path))] == [str(rig.path / "lock")]


def test_without_a_descriptor_no_page_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(tmp_path) as rig:
        rig.write("abc")
        with monkeypatch.context() as patch:
            fail_opening(patch, errno.EMFILE, os.O_RDONLY)
            assert not any(rig.read(keys("abc")).values())
        assert rig.reads_all_of("abc")


def test_other_namespaces_are_deleted_when_room_is_needed_and_foreign_files_never(tmp_path: Path) -> None:
    with Rig(tmp_path, room=32) as rig:
        rig.write("abcabc", "bbb")
        page = f"00/{rig.file('a').name}"
    with Rig(tmp_path, SMALL + KV_HEADS, room=32) as other:
        names = ["notes.txt", "aabb-7/notes.txt", "aabb-7/00/notes.kv", f"aabb/{page}", f"AABB-7/{page}"]
        foreign = [other.path / name for name in names] + [other.folder / "00" / "notes.kv.tmp", other.folder / "0.kv"]
        for path in foreign:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")
        assert other.index.stats().bytes == 0 or rig.folder.exists()
        for number in range(40):
            other.write("".join("abc"[number // 3**place % 3] for place in range(4)))
            other.settle()
        assert not rig.folder.exists()
        assert all(path.read_text() == "mine" for path in foreign)
        assert other.index.stats().evictions > 0


@SIZES
def test_a_page_that_rots_is_found_dropped_and_not_found_again(tmp_path: Path, page_bytes: int) -> None:
    with Rig(tmp_path, page_bytes) as rig:
        rig.write("abcabc")
        flip(rig.file("ab"), page_bytes // 2)
        came = rig.read(keys("abcabc"))  # those that hang from "ab" come, or have been deleted before they were read
        assert (came[key("a")], came[key("ab")]) == (True, False)
        assert rig.index.prefix(keys("abcabc")) == 1
        assert rig.index.stats().corrupt == 1
        rig.settle()
        assert rig.files() == [rig.file("a")]
    with Rig(tmp_path, page_bytes) as rig:
        assert rig.readable() == {"a"}
        stats = rig.index.stats()
        assert (stats.corrupt, stats.orphans) == (0, 0)
        rig.write("abcabc")
        assert rig.readable() == prefixes("abcabc")


def test_a_page_that_is_rubbish_in_the_arena_is_not_written(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        pages = rig.pages("abc")
        rig.slot(1)[5] ^= 1
        rig.follow(rig.index.write(pages))
        rig.until(lambda: len(rig.ended) == 3)
        assert rig.ended[1] == WriteEnded(key("ab"), 1, intact=False)
        assert rig.readable() == {"a"}
        assert rig.index.stats().damaged == 1
        rig.settle()
    with Rig(tmp_path) as rig:
        assert rig.readable() == {"a"}
        assert (rig.index.stats().orphans, rig.index.stats().corrupt, rig.index.stats().torn) == (0, 0, 0)


class Faulty:
    """Writing fails, after part of it has been done, for as long as this is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.number = number
        self._write = os.write
        monkeypatch.setattr(files.os, "write", self.write)

    def write(self, fd: int, content: memoryview) -> int:
        if not self.number:
            return self._write(fd, content)
        self._write(fd, content[: len(content) // 2 & -512])
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@SIZES
def test_a_disk_that_can_not_be_written_is_read_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int, number: int
) -> None:
    faulty = Faulty(monkeypatch, 0)
    with Rig(tmp_path, page_bytes, room=128) as rig:
        rig.write("abc")
        faulty.number = number
        assert [ended.intact for ended in rig.write("bcabca")] == [True] * 6
        assert rig.state == f"failed: {os.strerror(number)}"
        assert rig.reads_all_of("abc")
        assert not rig.index.wants(key("b"))
        assert not list(rig.folder.glob("*/*.tmp"))
        faulty.number = 0
        rig.follow(rig.index.tick(0.0))
        rig.follow(rig.index.tick(RETRY_SECONDS))
        rig.write("bcabca")
        assert rig.state == "on"
        assert rig.readable() == prefixes("abc", "bcabca")
    with Rig(tmp_path, page_bytes) as rig:
        assert rig.readable() == prefixes("abc", "bcabca")


def test_a_file_size_limit_of_the_process_is_a_failure_like_any_other(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    with Rig(tmp_path) as rig:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        rig.write("abc")
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL // 2, old[1]))
        try:
            rig.write("bcb")
            assert rig.state == f"failed: {os.strerror(errno.EFBIG)}"
            assert rig.readable() == prefixes("abc")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_directory_that_can_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(tmp_path) as rig:
        rig.write("abc")
    read_only(monkeypatch)
    with Rig(tmp_path) as rig:
        assert rig.state == f"failed: {os.strerror(errno.EROFS)}"
        assert rig.reads_all_of("abc")
        assert not rig.index.wants(key("b"))


def test_a_directory_that_can_not_be_made_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Rig(tmp_path / "file") as rig:
        assert rig.state.startswith("failed: can't use")
        assert rig.write("ab") == [WriteEnded(key("a"), 0), WriteEnded(key("ab"), 1)]


def test_a_directory_that_is_removed_is_made_again(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.write("abcabc")
        for path in sorted(rig.path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        rig.path.rmdir()
        rig.write("bb", "cc")
        rig.follow(rig.index.tick(0.0))
        rig.follow(rig.index.tick(RETRY_SECONDS))
        rig.write("aacc")
        assert rig.state == "on"
        assert stat.S_IMODE(rig.path.stat().st_mode) == 0o700
        assert (rig.path / "lock").exists()
        rig.settle()
        rig.read([name for name, _ in rig.index.pages()])
        rig.settle()
        rig.write("aacc")
        assert rig.readable() <= prefixes("aacc", "bb", "cc", "abcabc")
        assert rig.reads_all_of("aacc")


def test_a_hung_disk_delays_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    real = os.write
    rig = Rig(tmp_path).open()

    def write(fd: int, content: memoryview) -> int:
        hangs.wait()
        return real(fd, content)

    monkeypatch.setattr(files.os, "write", write)
    began = time.monotonic()
    for number in range(27):
        rig.follow(rig.index.write(rig.pages("".join("abc"[number // 3**place % 3] for place in range(3)))))
    assert rig.index.stats().writing == 32
    assert rig.index.stats().dropped_writes > 0
    rig.tier.close()
    assert time.monotonic() - began < 5
    hangs.set()
    for thread in threading.enumerate():
        if thread.name.startswith("disk-"):
            thread.join()


@pytest.mark.parametrize("deed", ["write", "read"])
def test_what_a_thread_dies_of_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str) -> None:
    """No disk can bring that about; a store that went on with fewer hands would hold pages for ever."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError(deed)

    with Rig(tmp_path) as rig:
        rig.write("ab")
        monkeypatch.setattr(PageFiles, f"{deed}_page", fails)
        act = (lambda: rig.write("abc")) if deed == "write" else (lambda: rig.read(keys("ab")))
        with pytest.raises(ZeroDivisionError, match=deed):
            act()


def test_an_index_of_many_pages_comes_in_parts(tmp_path: Path) -> None:
    words = ["".join("abc"[number // 3**place % 3] for place in range(6)) for number in range(3**6)]
    with Rig(tmp_path, page_bytes=64, room=2_000) as rig:
        rig.write(*words)
        assert rig.index.stats().pages == 1_092
    rig = Rig(tmp_path, page_bytes=64, room=2_000)
    rig.follow(rig.index.open(NAMESPACE, 64, KV_HEADS))
    parts: list[int] = []
    while rig.state == "opening":
        select.select([rig.tier.fileno()], [], [])
        for event in rig.tier.poll():
            rig.follow(rig.index.handle(event))
        parts.append(rig.index.stats().pages)
    assert {1_024, 1_092} <= set(parts)
    assert rig.readable() == prefixes(*words)
    rig.tier.close()


def test_orders_of_another_opening_are_ignored(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.write("abc")
        late = rig.index.read_pages([(each, slot) for slot, each in enumerate(keys("abc"))])
        rig.index = type(rig.index)(rig.settings)
        rig.index._epoch = 10
        rig.open()
        rig.follow(late)
        assert rig.reads_all_of("abc")


@SIZES
def test_a_large_read_comes_in_parts_the_first_one_soon(tmp_path: Path, page_bytes: int) -> None:
    with Rig(tmp_path, page_bytes) as rig:
        words = ["".join("abc"[number // 3**place % 3] for place in range(3)) for number in range(27)]
        rig.write(*words)
        assert rig.readable() == prefixes(*words)
        rig.until(lambda: rig.index.speed.measured)
        assert rig.index.stats().read == 39


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 16]))


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system is mounted so that it can only be read."""
    fail_opening(monkeypatch, errno.EROFS, os.O_WRONLY, os.O_RDWR, os.O_CREAT)


def fail_opening(monkeypatch: pytest.MonkeyPatch, number: int, *kinds: int) -> None:
    """No file can be opened with any of these flags, or (0, O_RDONLY) at all."""
    real: Callable[..., int] = os.open

    def failing(path: object, flags: int, mode: int = 0o777) -> int:
        if any(flags & kind or not kind for kind in kinds):
            raise OSError(number, os.strerror(number))
        return real(path, flags, mode)

    monkeypatch.setattr(files.os, "open", failing)
