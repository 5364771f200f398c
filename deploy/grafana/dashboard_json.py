"""A board as the JSON that Grafana 10 and later reads (schema 39).

The datasource is a variable, so a board can be imported anywhere. Panels flow from left to right into lines of 24
columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from deploy.grafana.board import Board, Panel, Query, Row

_COLUMNS = 24
_SOURCE: Mapping[str, str] = {"type": "prometheus", "uid": "${datasource}"}
_OWN_UNITS = ("tokens/s", "pages/s", "tokens", "pages")


def text_of(board: Board) -> str:
    """The file's text."""
    return json.dumps(dashboard(board), indent=1, ensure_ascii=False) + "\n"


def dashboard(board: Board) -> Mapping[str, Any]:
    """The whole dashboard."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Baton",
                "tags": ["baton"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": list(_variables(board))},
        "panels": list(_panels(board)),
    }


def _variables(board: Board) -> Iterator[Mapping[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    yield _choice("job", "Cluster", "label_values(baton_peers, job)")
    if board.names:
        yield _choice("name", "Process", f"label_values({board.names}, name)")


def _choice(name: str, label: str, query: str) -> Mapping[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(board: Board) -> Iterator[Mapping[str, Any]]:
    numbers = count(1)
    x = y = tallest = 0
    for item in board.items:
        width, height = (_COLUMNS, 1) if isinstance(item, Row) else (item.width, item.height)
        if x + width > _COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        place = {"h": height, "w": width, "x": x, "y": y}
        x, tallest = x + width, max(tallest, height)
        yield _row(item, next(numbers), place) if isinstance(item, Row) else _panel(item, next(numbers), place)


def _row(row: Row, number: int, place: Mapping[str, int]) -> Mapping[str, Any]:
    return {"id": number, "type": "row", "title": row.title, "gridPos": place, "collapsed": False, "panels": []}


def _panel(panel: Panel, number: int, place: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [_target(query, chr(ord("A") + at), panel) for at, query in enumerate(panel.queries)],
    }


def _target(query: Query, name: str, panel: Panel) -> Mapping[str, Any]:
    return {
        "refId": name,
        "datasource": _SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": True,
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
    }


def _defaults(panel: Panel) -> Mapping[str, Any]:
    unit = f"suffix: {panel.unit}" if panel.unit in _OWN_UNITS else panel.unit
    defaults: dict[str, Any] = {"unit": unit, "min": 0}
    if panel.largest is not None:
        defaults["max"] = panel.largest
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 10 if panel.stack == "none" else 60,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": panel.stack, "group": "A"},
        }
    return defaults


def _options(panel: Panel) -> Mapping[str, Any]:
    match panel.kind:
        case "stat":
            return {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "value",
                "graphMode": "area",
                "textMode": "auto",
            }
        case "heatmap":
            return {
                "calculate": False,
                "yAxis": {"unit": panel.unit},
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                "tooltip": {"mode": "single", "yHistogram": True},
                "legend": {"show": True},
            }
        case "timeseries":
            return {
                "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max"]},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
