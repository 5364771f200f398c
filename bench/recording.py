"""Record a command in a terminal as an animated SVG: `python -m bench.recording FILE.svg -- make demo`.

The command runs once, for real. The picture plays what it wrote, at its own pace. Pauses of more than `PAUSE` seconds
are cut to that, and a spinner that turns is a pause, too. A reader that asks for less motion sees the last screen. The
colours suit light and dark pages.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import pyte
from pyte.screens import Char

COLUMNS, ROWS = 100, 30
FRAME = 0.2
"""Seconds between two frames at least."""
PAUSE = 1.0
END = 5.0
"""Seconds for which the last screen stands before the recording begins anew."""
MOST_BYTES = 300_000
_WIDTH, _HEIGHT, _MARGIN = 8.43, 18, 14  # of a character and around all, in pixels
_BACK, _TEXT = "#161b22", "#d5dbe1"
_COLOURS = {
    "black": "#6e7681", "red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341", "blue": "#79c0ff",
    "magenta": "#d2a8ff", "cyan": "#76e3ea", "white": "#d5dbe1",
}  # fmt: skip

Line = tuple[tuple[int, str, str], ...]
"""Runs of one style: their column, their text, and their attributes in SVG."""


@dataclass(frozen=True)
class Frame:
    """What the terminal shows from a time on, in seconds since the start."""

    at: float
    lines: tuple[Line, ...]


def record(command: Sequence[str], columns: int = COLUMNS, rows: int = ROWS) -> list[Frame]:
    """Run a command in a terminal to its end and return what that showed. Raises SystemExit if the command fails."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
        os.execvp(command[0], list(command))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    frames: list[Frame] = []
    begin = last = time.monotonic()
    for data in _read(terminal):
        now = time.monotonic()
        if data:
            stream.feed(data)
        if now - last >= FRAME and screen.dirty:
            lines = _lines(screen)
            if not frames or _still(lines) != _still(frames[-1].lines):
                frames.append(Frame(now - begin, lines))
            screen.dirty.clear()
            last = now
    frames.append(Frame(time.monotonic() - begin, _lines(screen)))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {status}; nothing is recorded")
    return frames


def _still(lines: tuple[Line, ...]) -> list[Line]:
    """Return the lines without those of a spinner, which begin with a braille character."""
    return [line for line in lines if not (line and "\u2800" <= line[0][1][0] <= "\u28ff")]


def _read(terminal: int) -> Iterator[bytes]:
    """Yield what a terminal shows, and nothing each time that a frame is due, until its last process has ended."""
    while True:
        if not select.select([terminal], [], [], FRAME)[0]:
            yield b""
            continue
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # Linux says so when the other end is closed
            data = b""
        if not data:
            os.close(terminal)
            return
        yield data


def _lines(screen: pyte.Screen) -> tuple[Line, ...]:
    return tuple(_runs([screen.buffer[row][column] for column in range(screen.columns)]) for row in range(screen.lines))


def _runs(characters: Sequence[Char]) -> Line:
    runs: list[tuple[int, str, str]] = []
    column = 0
    for style, group in groupby(characters, _style):
        text = "".join(character.data for character in group)
        if text.strip():
            start = len(text) - len(text.lstrip())
            runs.append((column + start, text.strip(), style))
        column += len(text)
    return tuple(runs)


def _style(character: Char) -> str:
    colour = _COLOURS.get(character.fg.removeprefix("bright"), f"#{character.fg}")
    style = "" if character.fg in ("default", "white") else f' fill="{colour}"'
    return style + (' font-weight="bold"' if character.bold else "")


def draw(frames: Sequence[Frame], title: str, columns: int = COLUMNS, rows: int = ROWS) -> str:
    """Return the SVG that plays these frames. A line that several frames show is in it once."""
    height = rows * _HEIGHT
    names: dict[Line, str] = {}
    shown = ""
    for number, frame in enumerate(frames):
        for row, line in enumerate(frame.lines):
            if line:
                name = names.setdefault(line, f"l{len(names)}")
                shown += f'<use href="#{name}" y="{number * height + (row + 1) * _HEIGHT - 5}"/>'
    texts = "".join(f'<g id="{name}">{"".join(map(_text, line))}</g>' for line, name in names.items())
    starts, whole = _starts(frames)
    steps = "".join(
        f"{100 * start / whole:.3f}%{{transform:translateY({-number * height}px)}}"
        for number, start in enumerate(starts)
    )
    last = f"transform:translateY({-(len(frames) - 1) * height}px)"
    outer = (columns * _WIDTH + 2 * _MARGIN, height + 2 * _MARGIN)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{outer[0]:.0f}" height="{outer[1]}" '
        f'viewBox="0 0 {outer[0]:.0f} {outer[1]}" role="img"><title>{escape(title)}</title>'
        f"<style>@keyframes play{{{steps}100%{{{last}}}}}"
        f".all{{{last};animation:play {whole:.1f}s steps(1,end) infinite}}"
        f"@media(prefers-reduced-motion:reduce){{.all{{animation:none}}}}"
        f"text{{white-space:pre}}</style><defs>{texts}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="{_BACK}" stroke="#57606a"/>'
        f'<svg x="{_MARGIN}" y="{_MARGIN}" width="{columns * _WIDTH:.0f}" height="{height}" fill="{_TEXT}" '
        'font-size="14" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace">'
        f'<g class="all">{shown}</g></svg></svg>\n'
    )


def _starts(frames: Sequence[Frame]) -> tuple[list[float], float]:
    """Return when each frame begins to show, pauses cut, and when the recording begins anew."""
    starts, before = [0.0], frames[0].at
    for frame in frames[1:]:
        starts.append(starts[-1] + min(PAUSE, frame.at - before))
        before = frame.at
    return starts, starts[-1] + END


def _text(run: tuple[int, str, str]) -> str:
    column, text, style = run
    length = f' textLength="{len(text) * _WIDTH:.0f}"' if len(text) > 1 else ""
    return f'<text x="{column * _WIDTH:.1f}"{length}{style}>{escape(text)}</text>'


def main() -> int:
    """Record and write; 1 if the picture is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("command", nargs="+", help="after --")
    given = parser.parse_args()
    picture = draw(record(given.command), " ".join(given.command))
    if len(picture.encode()) > MOST_BYTES:
        print(f"{len(picture.encode()):,} bytes are more than {MOST_BYTES:,}")
        return 1
    given.file.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
