"""Dashboards, alerts and Prometheus' configuration, without any of the programs that read them.

`tests/processes/test_dashboards.py` puts every query to a real Prometheus that scrapes a real cluster.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.metrics import TABLE
from deploy.grafana import __main__ as grafana
from deploy.grafana.board import Board, Panel
from deploy.grafana.boards import BOARDS
from deploy.grafana.dashboard_json import dashboard, text_of
from tests.support.prometheus import program
from tests.support.promql import filled, grouping, selectors

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "grafana" / "prometheus"
RULE_TESTS = [Path(__file__).parent / name for name in ("alerts.test.yml", "alerts-of-days.test.yml")]
RUNBOOKS = ROOT / "docs" / "operations.md"

VARIABLES = {"job": ".*", "name": ".*", "__rate_interval": "1m"}
OF_TARGETS = {"job", "instance", "role", "node", "name"}  # labels that /discovery and Prometheus add
SUFFIXES = {
    "gauge": ("",),
    "counter": ("_total",),
    "seconds": ("_bucket", "_sum", "_count"),
    "sizes": ("_bucket", "_sum", "_count"),
}
OF_PROCESSES = {
    "process_cpu_seconds_total", "process_max_fds", "process_open_fds", "process_resident_memory_bytes",
    "process_start_time_seconds",
}  # fmt: skip

LABELS: Mapping[str, set[str]] = {
    **{
        f"baton_{name}{suffix}": {*spec.labels, *OF_TARGETS, *(["le"] if suffix == "_bucket" else [])}
        for name, spec in TABLE.items()
        for suffix in SUFFIXES[spec.kind]
    },
    **dict.fromkeys((*OF_PROCESSES, "up"), OF_TARGETS),
    "ALERTS": {*OF_TARGETS, "alertname", "alertstate"},
}
"""The labels of every metric that there is."""


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(board: Board) -> list[dict[str, Any]]:
    return [dict(panel) for panel in dashboard(board)["panels"]]


def expressions() -> Iterator[tuple[str, str, set[str]]]:
    """Every query: where it stands, what it says, and the labels that its text shows."""
    for board in BOARDS:
        for item in board.items:
            for query in item.queries if isinstance(item, Panel) else ():
                yield f"{board.uid}: {item.title}", query.expr, set(re.findall(r"{{(\w+)}}", query.legend))
        if board.names:
            yield f"{board.uid}: names", board.names, {"name"}
    for rule in alerts():
        shown = json.dumps(rule["annotations"])
        yield rule["alert"], rule["expr"], set(re.findall(r"\$labels\.(\w+)", shown))


def test_no_metric_has_a_label_that_discovery_gives_to_processes() -> None:
    """Prometheus would rename it to exported_…, and whatever asks for it would get the router's."""
    assert not {name for name, spec in TABLE.items() if set(spec.labels) & OF_TARGETS}


boards = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


def test_the_committed_dashboards_are_what_the_generator_makes() -> None:
    committed = {path.name: path.read_text() for path in grafana.FOLDER.glob("*")}
    assert committed == {f"{board.uid}.json": text_of(board) for board in BOARDS}, "run python -m deploy.grafana"


def test_every_metric_and_label_of_every_query_exists() -> None:
    """Also those that its legend, or an alert's text, shows."""
    for place, expression, shown in expressions():
        text = filled(expression, VARIABLES)
        found = selectors(text)
        assert found, place
        for selector in found:
            assert selector.metric in LABELS, f"{place}: {selector.metric}"
            strange = {label for _, label, _ in selector.matchers} - LABELS[selector.metric]
            assert not strange, f"{place}: {selector.text} has {strange}"
        known = set().union(*(LABELS[selector.metric] for selector in found))
        assert grouping(text) | shown <= known, place


def test_a_label_that_a_legend_shows_outlives_the_aggregation() -> None:
    for place, expression, shown in expressions():
        if (by := grouping(filled(expression, VARIABLES))) and "up{" not in expression:
            assert shown <= by, f"{place} shows {shown - by}"


@boards
def test_every_panel_is_explained_and_has_a_unit_and_a_place_of_its_own(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(board):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken, f"{panel['title']} overlaps"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), panel["title"]
    titles = [panel["title"] for panel in panels(board)]
    ids = [panel["id"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)
    assert len(set(ids)) == len(ids)


@boards
def test_a_dashboard_defines_every_variable_that_it_uses(board: Board) -> None:
    made = dashboard(board)
    defined = {variable["name"] for variable in made["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps([*made["panels"], *made["templating"]["list"]])))
    assert used <= defined
    assert made["schemaVersion"] >= 39
    assert made["description"]
    assert re.fullmatch(r"baton-[a-z]+", made["uid"])


def test_dashboards_have_names_of_their_own() -> None:
    assert len({board.uid for board in BOARDS}) == len({board.title for board in BOARDS}) == len(BOARDS)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    headings = set(re.findall(r"^### (Baton\w+)$", RUNBOOKS.read_text(), re.MULTILINE))
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert headings == set(names)
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_an_alert_is_about_baton_alone_and_tells_of_which_cluster() -> None:
    for rule in alerts():
        found = selectors(rule["expr"])
        assert all(("=~", "job", "baton.*") in selector.matchers for selector in found), rule["alert"]
        assert not (by := grouping(rule["expr"])) or "job" in by, rule["alert"]


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tests = [test for file in RULE_TESTS for test in yaml.safe_load(file.read_text())["tests"]]
    cases = [(case["alertname"], bool(case.get("exp_alerts"))) for test in tests for case in test["alert_rule_test"]]
    assert set(cases) == {(rule["alert"], fires) for rule in alerts() for fires in (True, False)}


def test_provisioning_names_what_is_here() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    assert [(PROMETHEUS / file).exists() for file in config["rule_files"]] == [True]
    (provider,) = yaml.safe_load((folder / "dashboards" / "baton.yml").read_text())["providers"]
    assert provider["type"] == "file"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "files"),
    [
        ("check rules", [PROMETHEUS / "alerts.yml"]),
        ("check config", [PROMETHEUS / "prometheus.yml"]),
        ("test rules", RULE_TESTS),
    ],
)
def test_promtool_finds_no_fault(what: str, files: list[Path]) -> None:
    command = [str(program("promtool")), *what.split(), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
