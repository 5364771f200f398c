"""Dashboards, alerts and Prometheus' configuration, without any of the programs that read them.

`tests/processes/test_dashboards.py` puts every query to a real Prometheus that scrapes a real cluster.
"""

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
from tests.support.prometheus import program
from tests.support.promql import filled, grouping, selectors

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
PROMETHEUS = GRAFANA / "prometheus"
RULE_TESTS = [Path(__file__).parent / name for name in ("alerts.test.yml", "alerts-of-days.test.yml")]
RUNBOOKS = ROOT / "docs" / "fail.md"

Board = Mapping[str, Any]
BOARDS: list[Board] = [json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))]
VARIABLES = {"job": ".*", "role": "prefill|decode", "name": ".*", "__rate_interval": "1m"}
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
    """The panels that show something, without the headings between them."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def choices(board: Board) -> list[tuple[str, str]]:
    """What a dashboard lets its reader choose from: queries, and the label whose values they give."""
    queries = [each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return [re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups() for query in queries]  # type: ignore[union-attr]


def expressions() -> Iterator[tuple[str, str, set[str]]]:
    """Every query: where it stands, what it says, and the labels that its text shows."""
    for board in BOARDS:
        for panel in panels(board):
            for target in panel["targets"]:
                shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                yield f"{board['uid']}: {panel['title']}: {target['refId']}", target["expr"], shown
        for query, label in choices(board):
            yield f"{board['uid']}: choice of {label}", query, {label}
    for rule in alerts():
        shown = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        yield rule["alert"], rule["expr"], shown


def test_no_metric_has_a_label_that_discovery_gives_to_processes() -> None:
    """Prometheus would rename it to exported_…, and whatever asks for it would get the router's."""
    assert not {name for name, spec in TABLE.items() if set(spec.labels) & OF_TARGETS}


boards = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])


def test_every_metric_and_label_of_every_query_exists() -> None:
    """Also those that its legend, or an alert's text, shows."""
    for place, expression, shown in expressions():
        text = filled(expression, VARIABLES)
        queries = selectors(text)
        assert queries, place
        for selector in queries:
            assert selector.metric in LABELS, f"{place}: {selector.metric}"
            strange = {label for _, label, _ in selector.matchers} - LABELS[selector.metric]
            assert not strange, f"{place}: {selector.text} has {strange}"
        known = set().union(*(LABELS[selector.metric] for selector in queries))
        assert grouping(text) | shown <= known, place


def test_a_label_that_a_legend_shows_outlives_the_aggregation() -> None:
    for place, expression, shown in expressions():
        if (by := grouping(filled(expression, VARIABLES))) and "up{" not in expression:
            assert shown <= by, f"{place} shows {shown - by}"


@boards
def test_every_panel_is_explained_and_has_a_unit_and_a_place_of_its_own(board: Board) -> None:
    occupied: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & occupied, f"{panel['title']} overlaps"
        occupied |= cells
    for panel in panels(board):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0, panel["title"]
        sources = [part["datasource"] for part in (panel, *panel["targets"]) if "datasource" in part]
        assert sources, panel["title"]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), panel["title"]
    for field in ("title", "id"):
        values = [panel[field] for panel in board["panels"]]
        assert len(set(values)) == len(values), field


@boards
def test_a_dashboard_defines_every_variable_that_it_uses(board: Board) -> None:
    defined = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps([*board["panels"], *board["templating"]["list"]])))
    assert used <= defined
    assert board["schemaVersion"] >= 39
    assert board["description"]


def test_a_choice_of_all_is_what_the_tests_put_into_the_queries() -> None:
    for board in BOARDS:
        for variable in board["templating"]["list"]:
            assert variable["type"] == "datasource" or variable["allValue"] == VARIABLES[variable["name"]], variable


def test_dashboards_have_names_of_their_own() -> None:
    assert {f"{board['uid']}.json" for board in BOARDS} == {path.name for path in (GRAFANA / "dashboards").iterdir()}
    assert len({board["uid"] for board in BOARDS}) == len({board["title"] for board in BOARDS}) == len(BOARDS) > 0


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    headings = set(re.findall(r"^### (Baton\w+)$", RUNBOOKS.read_text(), re.MULTILINE))
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert headings == set(names)
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"docs/fail.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_an_alert_is_about_baton_alone_and_tells_of_which_cluster() -> None:
    for rule in alerts():
        queries = selectors(rule["expr"])
        assert all(("=~", "job", "baton.*") in selector.matchers for selector in queries), rule["alert"]
        assert not (by := grouping(rule["expr"])) or "job" in by, rule["alert"]


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tests = [test for file in RULE_TESTS for test in yaml.safe_load(file.read_text())["tests"]]
    cases = [(case["alertname"], bool(case.get("exp_alerts"))) for test in tests for case in test["alert_rule_test"]]
    assert set(cases) == {(rule["alert"], fires) for rule in alerts() for fires in (True, False)}


def test_provisioning_names_what_is_here() -> None:
    folder = GRAFANA / "provisioning"
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
