"""What a dashboard is made of, without what Grafana needs besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["timeseries", "stat", "heatmap"]
Unit: TypeAlias = Literal[
    "s", "bytes", "Bps", "percentunit", "reqps", "ops", "tokens/s", "pages/s", "tokens", "pages", "short", "bool_on_off"
]
"""Grafana's names, and texts of our own, which it shows as they are."""


@dataclass(frozen=True)
class Query:
    """One line of PromQL, or several series of it. `legend` may name labels, as in "{{role}}"."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One picture. `width` is in columns of 24. `stack` puts the series on top of each other, or makes them shares of
    100 %."""

    title: str
    description: str
    unit: Unit
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stack: Literal["none", "normal", "percent"] = "none"
    largest: float | None = None  # of the axis


@dataclass(frozen=True)
class Row:
    """A heading between panels."""

    title: str


@dataclass(frozen=True)
class Board:
    """A dashboard. `uid` is also its file's name. `names` is a selector whose label `name` the reader may choose from;
    empty: the board is about the cluster as a whole."""

    uid: str
    title: str
    description: str
    items: Sequence[Panel | Row]
    names: str = ""
