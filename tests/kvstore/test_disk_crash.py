"""What is left after a crash, a bit flip or a stranger's hand: torn and corrupt records go, all others can be read."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.disk.files import segment_files
from kvstore.disk.record_format import (
    HEADER_FIELDS,
    RecordFormat,
    RecordHeader,
    RecordLayout,
    is_segment,
    segment_header,
)
from kvstore.disk.recovery_scan import Scan, scan
from tests.kvstore.chains import key
from tests.kvstore.disk_rig import KV_HEADS, LARGE, NAMESPACE, SMALL, Rig, prefixes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
LAYOUT = RecordLayout(SMALL, KV_HEADS)


def rescan(folder: Path, layout: RecordLayout = LAYOUT) -> Scan:
    found = scan(folder, layout, NAMESPACE, 2**30, lambda: False)
    assert found is not None
    return found


def words(found: Scan) -> set[str]:
    return {record.key.lstrip(b".").decode() for record in found.records}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Two segments: a, ab, abc, b │ bb, bbc."""
    rig = Rig(tmp_path_factory.mktemp("disk"))
    with rig:
        rig.write("abc", "bbc")
    assert len(rig.segments()) == 2
    return rig


@pytest.fixture
def folder(written: Rig, tmp_path: Path) -> Path:
    copy = tmp_path / written.path.name / written.folder.name
    shutil.copytree(written.folder, copy)
    return copy


def last(folder: Path) -> Path:
    return max(folder.iterdir())


def test_cut_anywhere_only_what_is_cut_is_lost(folder: Path) -> None:
    path = last(folder)
    whole = path.read_bytes()
    for length in range(len(whole) - 1, -1, -1):
        os.truncate(path, length)
        found = rescan(folder)
        complete = max(0, length - LAYOUT.header_bytes) // LAYOUT.record_bytes
        assert words(found) == prefixes("abc", *("b", "bb", "bbc")[: 1 + complete])
        # A file without a whole header was being made.
        assert found.corrupt == 0
        assert found.torn == (length < LAYOUT.header_bytes or length > LAYOUT.offset(complete))


def test_torn_in_the_middle_of_a_page(folder: Path) -> None:
    """The file is long enough, but some blocks of the last write have not arrived."""
    path = last(folder)
    for begin in (0, 40, LAYOUT.header_bytes, LAYOUT.header_bytes + 500, LAYOUT.record_bytes - 1):
        copy = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(LAYOUT.offset(1) + begin)
            file.write(bytes(LAYOUT.record_bytes - begin))
        found = rescan(folder)
        assert words(found) == prefixes("abc", "bb")
        assert (found.torn, found.corrupt) == (1, 0)
        path.write_bytes(copy)


def test_a_torn_record_is_marked_and_counted_once(written: Rig, folder: Path) -> None:
    path = last(folder)
    flip(path, LAYOUT.offset(1) + LAYOUT.header_bytes + 3)
    for torn in (1, 0):
        with Rig(folder.parent.parent) as rig:
            assert rig.readable() == prefixes("abc", "bb")
            assert rig.index.stats().torn == torn


def test_a_flipped_bit_costs_a_page_and_what_hangs_from_it(folder: Path) -> None:
    """In a header, or in a page of the last segment: found at start. In an earlier page: when it is read."""
    first, second = sorted(folder.iterdir())
    rng = random.Random(1)
    for path, record, lost in ((second, 0, {"bb", "bbc"}), (second, 1, {"bbc"}), (first, 1, {"ab", "abc"})):
        for place in [*range(HEADER_FIELDS), *(LAYOUT.header_bytes + rng.randrange(SMALL) for _ in range(20))]:
            if path == first and place >= LAYOUT.header_bytes:
                continue
            flip(path, LAYOUT.offset(record) + place)
            found = rescan(folder)
            assert words(found) == prefixes("abc", "bbc") - lost
            assert found.torn + found.corrupt == 1
            assert found.orphans == len(lost) - 1
            flip(path, LAYOUT.offset(record) + place)


def test_a_segment_with_a_damaged_header_is_none(folder: Path) -> None:
    for place in range(LAYOUT.header_bytes):
        flip(last(folder), place)
        found = rescan(folder)
        assert words(found) == prefixes("abc", "b")
        assert found.corrupt == 1
        assert found.segments[-1].records == 0, "the index will delete it"
        flip(last(folder), place)


def test_of_two_records_of_one_page_the_sound_one_counts(folder: Path) -> None:
    """A crash while cleaning: the original is still there, the copy was cut off."""
    first, second = sorted(folder.iterdir())
    with first.open("rb") as source, second.open("r+b") as target:
        source.seek(LAYOUT.offset(1))
        raw = bytearray(source.read(LAYOUT.record_bytes))
        form = RecordFormat(LAYOUT, NAMESPACE)
        header = form.parse(raw)
        assert header is not None
        form.pack_into(memoryview(raw), header._replace(sequence=1_000))
        target.seek(0, os.SEEK_END)
        target.write(raw)
    found = rescan(folder)
    assert found.duplicates == 1
    assert {record.segment for record in found.records if record.key == key("ab")} == {1}
    assert found.next_sequence == 1_001
    flip(second, second.stat().st_size - 1)
    found = rescan(folder)
    assert (found.duplicates, found.torn) == (0, 1)
    assert words(found) == prefixes("abc", "bbc")
    assert {record.segment for record in found.records if record.key == key("ab")} == {0}


def test_chains_without_an_end_are_orphans(tmp_path: Path) -> None:
    ring = [(key("a"), key("b")), (key("b"), key("a")), (key("c"), key("c")), (key("ab"), key("x"))]
    with (tmp_path / "segment-00000000.kv").open("wb") as file:
        file.write(segment_header(LAYOUT, NAMESPACE))
        for sequence, (name, parent) in enumerate(ring):
            header = bytearray(LAYOUT.header_bytes)
            RecordFormat(LAYOUT, NAMESPACE).pack_into(memoryview(header), RecordHeader(name, parent, 0, sequence))
            file.write(header + bytes(SMALL))
    found = rescan(tmp_path)
    assert not found.records
    assert found.torn == 4, "their pages do not match either"


@given(st.binary(max_size=HEADER_FIELDS + 20))
def test_random_bytes_are_no_header(raw: bytes) -> None:
    with pytest.raises(ValueError):
        RecordFormat(LAYOUT, NAMESPACE).parse(raw)
    assert not is_segment(raw, LAYOUT, NAMESPACE)


@given(
    key=st.binary(min_size=16, max_size=16),
    parent=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
    checksum=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**62),
)
def test_a_header_says_what_was_written(key: bytes, parent: bytes, checksum: int, sequence: int) -> None:
    buffer = memoryview(bytearray(LAYOUT.header_bytes))
    form = RecordFormat(LAYOUT, NAMESPACE)
    form.pack_into(buffer, RecordHeader(key, parent, checksum, sequence))
    assert form.parse(buffer) == RecordHeader(key, parent, checksum, sequence)
    for other in (RecordFormat(LAYOUT, NAMESPACE[::-1]), RecordFormat(RecordLayout(SMALL + 1, KV_HEADS), NAMESPACE)):
        with pytest.raises(ValueError):
            other.parse(buffer)


@settings(deadline=None, max_examples=100)
@given(
    blocks=st.lists(
        st.one_of(
            st.binary(max_size=300),
            st.integers(0, 5_000).map(bytes),
            st.just(segment_header(LAYOUT, NAMESPACE)),
            st.just(b"BATONREC" * 20),
        ),
        max_size=12,
    ),
    begin=st.booleans(),
)
def test_whatever_lies_there_is_survived(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[bytes], begin: bool
) -> None:
    base = tmp_path_factory.mktemp("hostile")
    rig = Rig(base)
    rig.tier.close()
    rig.folder.mkdir(parents=True)
    head = segment_header(LAYOUT, NAMESPACE) if begin else b""
    (rig.folder / "segment-00000003.kv").write_bytes(head + b"".join(blocks))
    with Rig(base) as fresh:
        assert not fresh.readable()
        fresh.write("abc")
        assert fresh.readable() == prefixes("abc")
    shutil.rmtree(base)


def test_things_that_are_no_segments_are_left_alone(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.write("abc")
    strange = rig.folder / "segment-00000005.kv"
    (rig.folder / "segment-00000006.kv").symlink_to(rig.segments()[0])
    (rig.folder / "segment-00000007.kv").mkdir()
    os.mkfifo(strange)
    with Rig(tmp_path) as rig:
        assert rig.readable() == prefixes("abc")
        rig.write("bbb")
        assert rig.readable() == prefixes("abc", "bbb")
    assert strange.is_fifo()


def test_a_file_larger_than_all_that_is_allowed_is_not_looked_through(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.write("abc")
    os.truncate(rig.segments()[0], 2**40)
    began = time.monotonic()
    with Rig(tmp_path) as rig:
        assert rig.readable() == set()
        rig.until(lambda: not rig.segments())
        assert rig.index.stats().corrupt == 1
    assert time.monotonic() - began < 5


def test_the_highest_number_there_can_be_is_followed_by_another(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.write("abc")
    rig.segments()[0].rename(rig.folder / "segment-99999999.kv")
    with Rig(tmp_path) as rig:
        rig.write("bbb")
        assert rig.readable() == prefixes("abc", "bbb")
    with Rig(tmp_path) as rig:
        assert rig.readable() == prefixes("abc", "bbb")


# --- a real store is killed -------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from tests.kvstore.disk_rig import Rig

rig = Rig(Path(sys.argv[1]), int(sys.argv[2]), records=8, segments=12).open()
number = int(sys.argv[3])
while True:
    word = "".join("abc"[number // 3**place % 3] for place in range(4))
    for each in rig.write(word + word[::-1]):
        pass
    rig.index.touch([])
    print(len(rig.ended), flush=True)
    number += 7
"""


@pytest.mark.parametrize("page_bytes", [SMALL, LARGE])
def test_killed_at_any_moment_it_starts_with_what_was_whole(tmp_path: Path, page_bytes: int) -> None:
    """It writes, evicts and cleans all the time. Every page that is found is the one that its key names."""
    rng = random.Random(page_bytes)
    found = 0
    for number in range(4):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(page_bytes), str(number)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(rng.randrange(2, 40)):
                assert child.stdout.readline(), "the child has ended"
            time.sleep(rng.random() / 200)
            child.send_signal(signal.SIGKILL)
        with Rig(tmp_path, page_bytes, records=8, segments=12) as rig:
            assert rig.state == "on"
            here = rig.readable()
            found += len(here)
            assert rig.index.stats().corrupt == 0
            sizes = segment_files(rig.folder)  # while segments are still being deleted
            assert sum(size for _, size in sizes) <= rig.settings.max_bytes
    assert found > 20


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
