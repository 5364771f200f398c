"""A recording shows what a command wrote to its terminal, in its order and colours."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from bench import recording
from bench.recording import Frame

SCRIPT = r"""
import os
assert os.isatty(1)
print("\x1b[1;31mred\x1b[0m and <plain>")
print("second")
"""


def texts(frame: Frame) -> list[str]:
    return [" ".join(text for _, text, _ in line) for line in frame.lines if line]


def test_a_command_is_recorded_as_its_terminal_shows_it():
    made = recording.record([sys.executable, "-c", SCRIPT])
    assert texts(made[-1]) == ["red and <plain>", "second"]
    assert made[-1].lines[0] == ((0, "red", ' fill="#ff7b72" font-weight="bold"'), (4, "and <plain>", ""))


def test_a_spinner_is_a_pause():
    turn = r"import time; [print(f'\r\x1b[32m{c}\x1b[0m wait', end='', flush=True) or time.sleep(0.3) for c in '⠋⠙⠹⠸']"
    made = recording.record([sys.executable, "-c", turn])
    assert len(made) <= 3, "the empty screen, the first turn and the end"


def test_a_command_that_fails_is_not_recorded():
    with pytest.raises(SystemExit, match="status 3"):
        recording.record(["sh", "-c", "exit 3"])


def test_a_picture_plays_its_frames_at_their_times():
    line = ((0, "a < b", ""),)
    frames = [Frame(1.0, (line, ())), Frame(1.5, (line, line)), Frame(61.5, ((), line))]
    picture = recording.draw(frames, "x & y", columns=10, rows=2)
    root = ElementTree.fromstring(picture)
    assert [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")] == ["a < b"], "it is there once"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}use"))) == 4
    whole = 0.5 + recording.PAUSE + recording.END
    starts = [float(share) for share in re.findall(r"([\d.]+)%\{", picture)]
    assert starts == pytest.approx([0, 50 / whole, 150 / whole, 100], abs=0.001)
    assert f"animation:play {whole:.1f}s" in picture
