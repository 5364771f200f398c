"""What is left after a crash, a bit flip or a stranger's hand: torn and corrupt files go, all others can be read."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.disk import listing
from kvstore.disk.file_names import FileNames, PageFile
from kvstore.disk.listing import Listing, list_pages
from tests.kvstore.chains import key
from tests.kvstore.disk_rig import LARGE, NAMESPACE, SMALL, Rig, prefixes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
NAMES = FileNames(NAMESPACE, SMALL)


def relist(folder: Path) -> Listing:
    listing = list_pages(folder, NAMES, lambda: False)
    assert listing is not None
    return listing


def words(listing: Listing) -> set[str]:
    return {page.key.lstrip(b".").decode() for page in listing.pages}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Files of a, ab, abc, b, bb, bbc."""
    rig = Rig(tmp_path_factory.mktemp("disk"))
    with rig:
        rig.write("abc", "bbc")
    assert len(rig.files()) == 6
    return rig


@pytest.fixture
def folder(written: Rig, tmp_path: Path) -> Path:
    copy = tmp_path / written.path.name / written.folder.name
    shutil.copytree(written.folder, copy)
    return copy


def test_cut_anywhere_a_file_is_lost_and_what_hangs_from_it(written: Rig, folder: Path) -> None:
    for length in range(0, SMALL, 37):
        shutil.copytree(written.folder, folder, dirs_exist_ok=True)
        file = folder / written.file("bb").relative_to(written.folder)
        os.truncate(file, length)
        listing = relist(folder)
        assert words(listing) == prefixes("abc", "b")
        assert (listing.torn, listing.corrupt, listing.orphans) == (1, 0, 1)
        assert not file.exists()
        again = relist(folder)
        assert words(again) == prefixes("abc", "b")
        assert (again.torn, again.orphans, again.stray_bytes) == (0, 0, 0)


def test_what_was_being_written_is_deleted_and_counted(written: Rig, folder: Path) -> None:
    file = folder / written.file("bbc").relative_to(written.folder)
    file.rename(f"{file}.tmp")
    listing = relist(folder)
    assert words(listing) == prefixes("abc", "bb")
    assert (listing.torn, listing.corrupt) == (1, 0)
    assert not Path(f"{file}.tmp").exists()


def test_torn_in_the_middle_of_a_page(written: Rig, folder: Path) -> None:
    """The file is long enough, but some blocks of it have not arrived. It is found when the page is read."""
    file = folder / written.file("bb").relative_to(written.folder)
    for begin in (0, 40, 500, SMALL - 1):
        shutil.copytree(written.folder, folder, dirs_exist_ok=True)
        content = file.read_bytes()
        file.write_bytes(content[:begin] + bytes(SMALL - begin))
        with Rig(folder.parent.parent) as rig:
            assert rig.read([key("b"), key("bb"), key("a")]) == {key("b"): True, key("bb"): False, key("a"): True}
            assert rig.readable() == prefixes("abc", "b")
            assert rig.index.stats().corrupt == 1
            rig.settle()
            assert not file.exists()


def test_a_flipped_bit_in_a_name_costs_a_page_and_what_hangs_from_it(written: Rig, folder: Path) -> None:
    """It may make another page's name, with other parents or another checksum: the check in the name tells."""
    file = folder / written.file("bb").relative_to(written.folder)
    for place, letter in enumerate(file.name):
        if letter in "-.kv":
            continue
        shutil.copytree(written.folder, folder, dirs_exist_ok=True)
        other = "0" if letter != "0" else "1"
        flipped = file.with_name(file.name[:place] + other + file.name[place + 1 :])
        file.rename(flipped)
        listing = relist(folder)
        assert words(listing) == prefixes("abc", "b"), flipped.name
        assert (listing.torn, listing.corrupt, listing.orphans) == (0, 1, 1)
        assert not flipped.exists()


def test_a_file_in_another_folder_or_namespace_is_none(written: Rig, folder: Path) -> None:
    file = written.file("a")
    (folder / "00" / file.name).write_bytes(file.read_bytes())
    listing = relist(folder)
    assert words(listing) == prefixes("abc", "bbc")
    assert listing.corrupt == 1
    for other in (FileNames(NAMESPACE[::-1], SMALL), FileNames(NAMESPACE, SMALL + 1)):
        with pytest.raises(ValueError, match="another namespace"):
            other.parse(file.parent.name, file.name)


def test_of_two_files_of_one_page_the_later_one_counts(folder: Path) -> None:
    """Its bits may differ, since a page's key names its input."""
    later = PageFile(key("ab"), key("a"), 7)
    (folder / NAMES.name(later)).write_bytes(bytes(SMALL))
    listing = relist(folder)
    assert listing.duplicates == 1
    assert later in listing.pages
    assert relist(folder).duplicates == 0


def test_chains_without_an_end_are_orphans(tmp_path: Path) -> None:
    ring = [(key("a"), key("b")), (key("b"), key("a")), (key("c"), key("c")), (key("ab"), key("x"))]
    for name, parent in ring:
        path = tmp_path / NAMES.name(PageFile(name, parent, 0))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(SMALL))
    listing = relist(tmp_path)
    assert not listing.pages
    assert listing.orphans == 4
    assert not list(tmp_path.glob("*/*"))


def test_what_can_not_be_deleted_is_counted_as_used(
    written: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(listing, "remove", refusing)
    os.truncate(folder / written.file("bb").relative_to(written.folder), 10)
    with Rig(folder.parent.parent) as rig:
        assert rig.readable() == prefixes("abc", "b")
        assert rig.index.stats().bytes == 6 * 4_096


@given(
    st.one_of(st.text(max_size=120), st.from_regex(r"[0-9a-f]{32}-([0-9a-f]{32}|start)-[0-9a-f]{16}-[0-9a-f]{16}\.kv"))
)
def test_random_text_is_no_name(name: str) -> None:
    with pytest.raises(ValueError):
        NAMES.parse(name[30:32], name)


@given(
    key=st.binary(min_size=16, max_size=16),
    parent=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
    checksum=st.integers(0, 2**64 - 1),
)
def test_a_name_says_what_was_written(key: bytes, parent: bytes, checksum: int) -> None:
    page = PageFile(key, parent, checksum)
    folder, name = NAMES.name(page).split("/")
    assert NAMES.parse(folder, name) == page
    assert len(name) + len(".tmp") <= 255


@settings(deadline=None, max_examples=50)
@given(contents=st.lists(st.one_of(st.binary(max_size=300), st.just(bytes(SMALL))), max_size=6), cut=st.integers(1, 16))
def test_whatever_lies_there_is_survived(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], cut: int
) -> None:
    base = tmp_path_factory.mktemp("hostile")
    folder = base / "node" / f"{NAMESPACE.hex()}-{SMALL}"
    for number, content in enumerate(contents):
        path = folder / NAMES.name(PageFile(bytes([number]) * 16, b"", cut))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.with_name(path.name[:-cut]).write_bytes(content)
    with Rig(base) as rig:
        assert not any(rig.read([name for name, _ in rig.index.pages()]).values())
        rig.write("abc")
        assert rig.readable() == prefixes("abc")
    shutil.rmtree(base)


def test_things_that_are_no_files_are_left_alone(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.write("abc")
        strange, link, inner = rig.file("bbb"), rig.file("c"), rig.file("cc")
    os.mkfifo(strange)
    link.symlink_to(rig.file("a"))
    inner.mkdir()
    with Rig(tmp_path) as rig:
        assert rig.readable() == prefixes("abc")
        rig.write("bb")
        assert rig.readable() == prefixes("abc", "bb")
    assert strange.is_fifo()
    assert link.is_symlink()
    assert inner.is_dir()


def test_a_file_larger_than_a_page_is_none(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.write("abc")
    os.truncate(rig.file("a"), 2**40)
    with Rig(tmp_path) as rig:
        assert rig.readable() == set()
        assert not rig.files()
        assert (rig.index.stats().torn, rig.index.stats().orphans) == (1, 2)


# --- a real store is killed -------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from tests.kvstore.disk_rig import Rig

rig = Rig(Path(sys.argv[1]), int(sys.argv[2]), room=96).open()
number = int(sys.argv[3])
while True:
    word = "".join("abc"[number // 3**place % 3] for place in range(4))
    for each in rig.write(word + word[::-1]):
        pass
    rig.index.touch([])
    print(len(rig.ended), flush=True)
    number += 7
"""


@pytest.mark.parametrize("page_bytes", [SMALL, LARGE, 2**20])
def test_killed_at_any_moment_it_starts_with_what_was_whole(tmp_path: Path, page_bytes: int) -> None:
    """It writes and evicts all the time. Every page that is found is the one that its key names."""
    rng = random.Random(page_bytes)
    total = 0
    for number in range(4):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(page_bytes), str(number)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
            for _ in range(rng.randrange(2, 40)):
                assert child.stdout.readline(), "the child has ended"
            time.sleep(rng.random() / 200)
            child.send_signal(signal.SIGKILL)
        with Rig(tmp_path, page_bytes, room=96) as rig:
            assert rig.state == "on"
            here = rig.readable()
            total += len(here)
            stats = rig.index.stats()
            assert (stats.corrupt, stats.duplicates) == (0, 0)
            assert sum(file.stat().st_size for file in rig.files()) <= rig.settings.max_bytes
    assert total > 20


def test_cut_off_between_any_two_steps_it_starts_with_what_was_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes a file is the last one of some store."""
    real: dict[str, Callable[..., object]] = {name: getattr(os, name) for name in ("open", "write", "rename", "unlink")}
    for last in range(40):
        left = [last]

        def stepping(name: str, *args: object, left: list[int] = left) -> object:
            changes = name != "open" or ".kv" in str(args[0])
            left[0] -= changes
            if changes and left[0] < 0:
                raise OSError(errno.EIO, "killed")
            return real[name](*args)

        with monkeypatch.context() as patch:
            base = tmp_path / str(last)
            with Rig(base, room=32) as rig:
                rig.write("ab", "bb")
                for name in real:
                    patch.setattr(os, name, lambda *args, name=name: stepping(name, *args))
                rig.write("abca", "bbc")
        with Rig(base, room=32) as rig:
            here = rig.readable()
            assert prefixes("ab", "bb") <= here <= prefixes("abca", "bbc")
            assert rig.index.stats().corrupt == 0
