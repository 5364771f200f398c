"""Traces: what is recorded, when it ends, and the file that it becomes."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from baton.trace import MAX_STEPS, Recording, Tracer, new_mark, trace_path


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


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
    path = tmp_path / "new" / "trace.json"
    tracer = Tracer("decode-0")
    run(tracer, 1)
    tracer.start(path, 2)
    run(tracer, 1)
    assert tracer.on
    assert not path.exists()
    run(tracer, 5)
    assert not tracer.on
    assert [span["name"] for span in spans(path)] == ["step", "turn"] * 2
    assert json.loads(path.read_text())["otherData"] == {"steps": 2}


def test_the_file_is_its_owners_alone_and_no_other_is_left(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "trace.json"
    tracer = Tracer("decode-0")
    tracer.start(path, 1)
    run(tracer, 1)
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_trace_that_ends_early_is_written_as_far_as_it_came(tmp_path: Path) -> None:
    tracer = Tracer("decode-0")
    tracer.start(tmp_path / "first.json", 100)
    run(tracer, 3)
    tracer.start(tmp_path / "second.json", 100)
    run(tracer, 1)
    tracer.close()
    assert len(spans(tmp_path / "first.json")) == 6
    assert len(spans(tmp_path / "second.json")) == 2


def test_a_span_that_ends_in_an_error_is_recorded(tmp_path: Path) -> None:
    tracer = Tracer("decode-0")
    tracer.start(tmp_path / "trace.json", 1)
    with pytest.raises(KeyError), tracer.turn(), tracer.span("bad", "loop"):
        raise KeyError
    tracer.close()
    assert [span["name"] for span in spans(tmp_path / "trace.json")] == ["bad", "turn"]


def test_a_place_that_takes_no_file_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    tracer = Tracer("decode-0")
    tracer.start(tmp_path / "file" / "trace.json", 1)
    run(tracer, 2)
    assert not tracer.on
    assert "can't write the trace" in caplog.text


def test_spans_are_bounded() -> None:
    recording = Recording(steps=10, most=3)
    for instant in range(5):
        assert recording.complete == (instant >= 3)
        recording.add("a", "b", instant, instant + 1, {})
    assert len(recording) == 3


@pytest.mark.parametrize("steps", [-1, 0, MAX_STEPS + 1])
def test_steps_are_bounded(steps: int) -> None:
    with pytest.raises(ValueError, match="steps"):
        Tracer().start(Path("never"), steps)


def test_a_trace_begins_with_a_whole_turn(tmp_path: Path) -> None:
    tracer = Tracer("decode-0")
    with tracer.turn(), tracer.span("handle", "scheduler"):
        tracer.start(tmp_path / "trace.json", 1)
        assert tracer.span("late", "scheduler") is tracer.span("later", "scheduler")
    run(tracer, 1)
    assert [span["name"] for span in spans(tmp_path / "trace.json")] == ["step", "turn"]


def test_the_document() -> None:
    recording = Recording(steps=1)
    recording.add("step", "engine", 5_000, 7_500, {"tokens": 3})
    recording.add("wait", "sockets", 8_000, 8_000, {})
    recording.counted = 1
    document = recording.document("decode-0", 11, 12)
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
