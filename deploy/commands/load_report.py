"""The report of a load as one HTML file: no script, no font, nothing from elsewhere. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from deploy.commands.chart import ChartLine, svg
from deploy.load.figures import Figure, Outcome

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem 1rem .2rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr + tr td { border-top: 1px solid color-mix(in srgb, currentColor 15%, transparent); }
svg { max-width: 100%; height: auto; background: white; border-radius: 6px; }
"""
_POINTS = 60  # of each curve
_WIDTH, _ROW, _MOST_ROWS = 720, 14, 64  # pixels, and users, of the picture of all requests


def render(title: str, facts: Mapping[str, str], figures: Sequence[Figure], users: Sequence[Sequence[Outcome]]) -> str:
    """Return the whole page: the load's `facts`, its figures, the distributions of its latencies, and each request."""
    finished = [one for own in users for one in own if not one.failed]
    latencies = {
        "TTFT": [one.ttft for one in finished if one.ttft is not None],
        "time between messages with tokens": [gap for one in finished for gap in one.gaps],
        "whole request": [one.e2e for one in finished],
    }
    plots = (f"<h2>{escape(name)}</h2>{_distribution(name, values)}" for name, values in latencies.items() if values)
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>',
        f"<h1>{escape(title)}</h1>",
        _table((name, value) for name, value in facts.items()),
        "<h2>Figures</h2>",
        _table(((figure.name, str(figure)) for figure in figures), number=True),
        *plots,
        "<h2>Requests by user</h2>",
        "<p>Grey: until the first token. Blue: tokens. Red: failed.</p>",
        _requests(users),
        "</html>\n",
    ]
    return "\n".join(parts)


def _table(rows: Iterator[tuple[str, str]], number: bool = False) -> str:
    kind = ' class="number"' if number else ""
    cells = "".join(f"<tr><td>{escape(name)}</td><td{kind}>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _distribution(name: str, seconds: Sequence[float]) -> str:
    """Draw which share of the values is at most so large."""
    shares = np.linspace(0, 1, _POINTS)
    values = np.quantile(seconds, shares) * 1_000
    points = list(zip(values.tolist(), shares.tolist(), strict=True))
    return svg([ChartLine(name, points)], 0.99, "ms", "share at most so long")


def _requests(users: Sequence[Sequence[Outcome]]) -> str:
    shown = users[:_MOST_ROWS]
    end = max((one.ended for own in shown for one in own), default=0.0) or 1.0

    def bar(row: int, begin: float, until: float, colour: str) -> str:
        x, width = begin / end * _WIDTH, max(0.5, (until - begin) / end * _WIDTH)
        return f'<rect x="{x:.1f}" y="{row * _ROW + 2}" width="{width:.1f}" height="{_ROW - 4}" fill="{colour}"/>'

    bars: list[str] = []
    for row, own in enumerate(shown):
        for one in own:
            first = one.tokens[0] if one.tokens else one.ended
            bars.append(bar(row, one.sent, first, "#c33" if one.failed else "#bbb"))
            if one.tokens:
                bars.append(bar(row, first, one.ended, "#c33" if one.failed else "#1b6ca8"))
    height = len(shown) * _ROW + 20
    axis = f'<text x="{_WIDTH}" y="{height - 4}" text-anchor="end" font-size="12">{end:.1f} s</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">'
        f"{''.join(bars)}{axis}</svg>"
    )
