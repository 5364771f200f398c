"""Traces: what is recorded, when it ends, and the file that it becomes."""

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from baton.config import TraceLimits
from baton.messages import MAX_TRACE_STEPS
from baton.trace import Recording, Tracer, new_mark, trace_path


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


MARKS = ("aaaaaaaa", "bbbbbbbb")


def written(tracer: Tracer) -> None:
    """Wait until its last trace is on disk."""
    deadline = time.monotonic() + 30
    while tracer.mark:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run(tracer: Tracer, turns: int) -> None:
    for _ in range(turns):
        with tracer.turn(), tracer.span("step", "engine", tokens=3):
            tracer.count()


def test_a_tracer_that_is_off_records_and_writes_nothing(tmp_path: Path) -> None:
    tracer = Tracer("decode-0")
    run(tracer, 3)
    assert not tracer.on
    assert tracer.span("a", "b") is tracer.span("c", "d")
    tracer.close()
    assert not list(tmp_path.iterdir())


def test_so_many_steps_and_then_no_more(tmp_path: Path) -> None:
    path = tmp_path / "new" / "decode-0-aaaaaaaa.json"
    tracer = Tracer("decode-0")
    run(tracer, 1)
    tracer.start(path.parent, MARKS[0], 2)
    run(tracer, 1)
    assert tracer.on
    assert not path.exists()
    run(tracer, 5)
    assert not tracer.on
    written(tracer)
    assert [span["name"] for span in spans(path)] == ["step", "turn"] * 2
    assert json.loads(path.read_text())["otherData"] == {"steps": 2}


def test_the_file_is_its_owners_alone_and_no_other_is_left(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "decode-0-aaaaaaaa.json"
    tracer = Tracer("decode-0")
    tracer.start(path.parent, MARKS[0], 1)
    run(tracer, 1)
    written(tracer)
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_second_trace_is_refused_until_the_first_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer("decode-0")
    tracer.start(tmp_path, MARKS[0], 100)
    assert tracer.mark == MARKS[0]
    tracer.start(tmp_path, MARKS[1], 100)
    run(tracer, 3)
    tracer.start(tmp_path, MARKS[1], 100)
    assert caplog.text.count("the trace aaaaaaaa is under way") == 2
    tracer.stop(MARKS[1])  # of another one
    assert tracer.on
    tracer.stop(MARKS[0])
    assert not tracer.on
    written(tracer)
    assert len(spans(tmp_path / "decode-0-aaaaaaaa.json")) == 6
    tracer.start(tmp_path, MARKS[1], 100)
    run(tracer, 1)
    tracer.close()
    assert not tracer.mark
    assert len(spans(tmp_path / "decode-0-bbbbbbbb.json")) == 2


def test_a_trace_that_has_not_begun_is_written_empty(tmp_path: Path) -> None:
    tracer = Tracer("decode-0")
    tracer.start(tmp_path, MARKS[0], 5)
    tracer.stop(MARKS[0])
    written(tracer)
    assert spans(tmp_path / "decode-0-aaaaaaaa.json") == []


def test_the_loop_goes_on_while_a_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def hanging(path: Path) -> Iterator[BinaryIO]:
        reached.set()
        assert gate.wait(60)
        with path.open("wb") as file:
            yield file

    monkeypatch.setattr("baton.private_folder.replacing", hanging)
    tracer = Tracer("decode-0")
    tracer.start(tmp_path, MARKS[0], 1)
    run(tracer, 100)
    assert reached.wait(60)
    assert tracer.mark == MARKS[0]
    gate.set()
    written(tracer)
    assert len(spans(tmp_path / "decode-0-aaaaaaaa.json")) == 2


def test_a_span_that_ends_in_an_error_is_recorded(tmp_path: Path) -> None:
    tracer = Tracer("decode-0")
    tracer.start(tmp_path, MARKS[0], 1)
    with pytest.raises(KeyError), tracer.turn(), tracer.span("bad", "loop"):
        raise KeyError
    tracer.close()
    assert [span["name"] for span in spans(tmp_path / "decode-0-aaaaaaaa.json")] == ["bad", "turn"]


def test_a_place_that_takes_no_file_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    tracer = Tracer("decode-0")
    tracer.start(tmp_path / "file", MARKS[0], 1)
    run(tracer, 2)
    assert not tracer.on
    written(tracer)
    assert "can't write the trace" in caplog.text


def test_spans_are_bounded() -> None:
    recording = Recording(steps=10, most=3)
    for instant in range(5):
        assert recording.complete == (instant >= 3)
        recording.add_span("a", "b", instant, instant + 1, {})
    assert len(recording) == 3


def trace(folder: Path, mark: str, keep: TraceLimits, steps: int = 1) -> Path:
    tracer = Tracer("decode-0", keep)
    tracer.start(folder, mark, steps)
    run(tracer, steps)
    tracer.close()
    return folder / f"decode-0-{mark}.json"


def test_a_folder_keeps_the_newest_traces(tmp_path: Path) -> None:
    others = [tmp_path / "mine.json", tmp_path / "decode-0-aaaaaaaa.json.bak", tmp_path / "store-0-123.json"]
    for number, path in enumerate(others):
        path.touch()
        os.utime(path, (number, number))
    paths: list[Path] = []
    for number in range(6):
        path = trace(tmp_path, f"{number:08x}", TraceLimits(files=3))
        os.utime(path, (100 + number, 100 + number))
        paths.append(path)
    assert [path.exists() for path in paths] == [False, False, False, True, True, True]
    assert all(path.exists() for path in others)


def test_a_folder_keeps_so_many_bytes_and_the_newest_trace_at_least(tmp_path: Path) -> None:
    first = trace(tmp_path, MARKS[0], TraceLimits())
    os.utime(first, (100, 100))
    size = first.stat().st_size
    second = trace(tmp_path, MARKS[1], TraceLimits(size=3 * size))
    assert first.exists()
    assert second.exists()
    os.utime(second, (200, 200))
    third = trace(tmp_path, "cccccccc", TraceLimits(size=3 * size), steps=200)
    assert third.stat().st_size > 3 * size
    assert list(tmp_path.iterdir()) == [third]


def test_what_a_writer_that_was_killed_has_left_is_removed(tmp_path: Path) -> None:
    left, underway = tmp_path / ".decode-1-aaaaaaaa.json.12345678", tmp_path / ".decode-1-bbbbbbbb.json.12345678"
    for path in (left, underway):
        path.touch()
    os.utime(left, (100, 100))
    trace(tmp_path, MARKS[0], TraceLimits())
    assert not left.exists()
    assert underway.exists()


@pytest.mark.parametrize("steps", [-1, 0, MAX_TRACE_STEPS + 1])
def test_steps_are_bounded(steps: int) -> None:
    with pytest.raises(ValueError, match="steps"):
        Tracer().start(Path("never"), MARKS[0], steps)


def test_a_trace_begins_with_a_whole_turn(tmp_path: Path) -> None:
    tracer = Tracer("decode-0")
    with tracer.turn(), tracer.span("handle", "scheduler"):
        tracer.start(tmp_path, MARKS[0], 1)
        assert tracer.span("late", "scheduler") is tracer.span("later", "scheduler")
    run(tracer, 1)
    written(tracer)
    assert [span["name"] for span in spans(tmp_path / "decode-0-aaaaaaaa.json")] == ["step", "turn"]


def test_the_document() -> None:
    recording = Recording(steps=1)
    recording.add_span("step", "engine", 5_000, 7_500, {"tokens": 3})
    recording.add_span("wait", "sockets", 8_000, 8_000, {})
    recording.counted = 1
    document = json.loads(b"".join(recording.parts("decode-0", 11, 12)))
    assert document == {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 11, "tid": 12, "args": {"name": "decode-0"}},
            {"ph": "M", "name": "thread_name", "pid": 11, "tid": 12, "args": {"name": "loop"}},
            {
                "ph": "X",
                "name": "step",
                "cat": "engine",
                "pid": 11,
                "tid": 12,
                "ts": 5.0,
                "dur": 2.5,
                "args": {"tokens": 3},
            },
            {"ph": "X", "name": "wait", "cat": "sockets", "pid": 11, "tid": 12, "ts": 8.0, "dur": 0.0},
        ],
        "displayTimeUnit": "ms",
        "otherData": {"steps": 1},
    }


def test_marks_tell_traces_apart() -> None:
    first, second = (trace_path(Path("traces"), "decode-0", new_mark()) for _ in range(2))
    assert first != second
    assert first.parent == Path("traces")
