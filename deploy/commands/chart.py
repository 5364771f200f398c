"""Lines over two axes, drawn with characters and as SVG. The vertical axis goes from 0 to 100 %."""

# pyright: strict

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_MARKS = "*o+x#@%&"
_ROWS, _COLUMNS = 11, 64
_COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b", "#5f6b6d", "#d6589f", "#2a9d8f")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 400, 60, 20, 170, 50  # pixels: the picture and its margins


@dataclass(frozen=True)
class ChartLine:
    """Points (x, share), x from 0 on; a line goes through them in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


def text(lines: Sequence[ChartLine], target: float, x_name: str) -> str:
    """Draw for a terminal. A row of dots marks the `wanted` share. Where lines meet, the first covers the others."""
    most = _most(lines)
    grid = [[" "] * (_COLUMNS + 1) for _ in range(_ROWS)]
    grid[_row(target)] = ["·"] * (_COLUMNS + 1)
    for number, line in reversed(list(enumerate(lines))):
        for x, share in line.points:
            grid[_row(share)][round(x / most * _COLUMNS)] = _MARKS[number % len(_MARKS)]
    rows = [
        f"{100 * (_ROWS - 1 - number) // (_ROWS - 1):>4} % │{''.join(row).rstrip()}" for number, row in enumerate(grid)
    ]
    axis = f"{'':7}└{'─' * (_COLUMNS + 1)}"
    scale = f"{'':8}0{f'{most:.3g} {x_name}':>{_COLUMNS}}"
    legend = "   ".join(f"{_MARKS[number % len(_MARKS)]} {line.name}" for number, line in enumerate(lines))
    return "\n".join([*rows, axis, scale, f"{'':8}{legend}"])


def svg(lines: Sequence[ChartLine], target: float, x_name: str, y_name: str) -> str:
    """Draw a self-contained SVG: no script, no font, no style sheet."""
    most = _most(lines)

    def x(value: float) -> float:
        return round(_LEFT + value / most * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(share: float) -> float:
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def words(at: float, level: float, content: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{at}" y="{level}" text-anchor="{anchor}"{more}>{escape(content)}</text>'

    def drawn(number: int, line: ChartLine) -> Iterable[str]:
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x(at)},{y(share)}" for at, share in sorted(line.points))
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x(at)}" cy="{y(share)}" r="3" fill="{colour}"/>' for at, share in line.points)
        yield words(_WIDTH - _RIGHT + 20, _TOP + 20 * number + 10, line.name, "start", f' fill="{colour}"')

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{x(0)} {y(1)}V{y(0)}H{x(most)}" fill="none" stroke="black"/>',
        f'<path d="M{x(0)} {y(target)}H{x(most)}" stroke="gray" stroke-dasharray="4"/>',
    ]
    for tick in range(6):
        parts.append(words(x(most * tick / 5), y(0) + 18, f"{most * tick / 5:.3g}"))
        parts.append(words(x(0) - 8, y(tick / 5) + 4, f"{20 * tick} %", "end"))
    parts.append(words(x(most / 2), _HEIGHT - 12, x_name))
    parts.append(words(16, y(0.5), y_name, more=f' transform="rotate(-90 16 {y(0.5)})"'))
    for number, line in enumerate(lines):
        parts.extend(drawn(number, line))
    return "\n".join([*parts, "</svg>\n"])


def _most(lines: Sequence[ChartLine]) -> float:
    return max((x for line in lines for x, _ in line.points), default=1.0) or 1.0


def _row(share: float) -> int:
    return round((1 - share) * (_ROWS - 1))
