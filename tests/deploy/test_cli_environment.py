"""`baton config show`, `collect-env` and the pieces of `logs` and `top` that need no cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from baton.config import Config, load
from baton.v1 import cluster_pb2
from deploy.cli import app
from deploy.commands.collect_env import environment
from deploy.commands.logs import Filter, Level, LogFile, last
from deploy.commands.top import History, sparkline


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_whole_configuration_can_be_loaded_again(tmp_path: Path):
    file = tmp_path / "all.yaml"
    file.write_text(shown("config", "show", "--set", "router.grpc_port=1234"))
    assert load(file) == load(None, {"router.grpc_port": 1234})


def test_only_what_was_changed():
    changed = yaml.safe_load(shown("config", "show", "--changed", "--set", "store.host_cache_bytes=1GiB"))
    assert changed == {"store": {"host_cache_bytes": 2**30}}
    assert shown("config", "show", "--changed") == ""


def test_one_section():
    found = json.loads(shown("config", "show", "pages", "--json"))
    assert found == {"pages": {"page_size": Config().pages.page_size}}
    result = CliRunner().invoke(app, ["config", "show", "nothing"])
    assert result.exit_code == 1
    assert "there is no section 'nothing'" in result.output


def test_an_environment_without_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATON_API_KEY", "sk-very-secret")
    found = json.loads(shown("collect-env", "--json"))
    assert found["packages"]["ray"]
    assert "sk-very-secret" not in json.dumps(found)
    kept = environment({"HF_TOKEN": "t", "OMP_NUM_THREADS": "2", "MY_NAME": "x", "OTEL_EXPORTER_OTLP_HEADERS": "h"})
    assert kept == {"HF_TOKEN": "(left out)", "OMP_NUM_THREADS": "2", "OTEL_EXPORTER_OTLP_HEADERS": "(left out)"}


def line(second: int, text: str, level: str = "INFO") -> str:
    return f"2026-01-01T00:00:{second:02}.000 decode-0 {level} worker.loop {text}\n"


def test_a_traceback_belongs_to_its_record_and_a_rotated_file_is_read_anew(tmp_path: Path):
    path, other = tmp_path / "a.log", tmp_path / "b.log"
    path.write_text(line(1, "one") + line(3, "broken", "ERROR") + "Traceback\n  at x\n" + "2026-01-01T00:00:04.000 dec")
    other.write_text(line(2, "two"))
    files = [LogFile(path), LogFile(other)]
    texts = [record.text.splitlines()[0][-6:] for record in last(files, 10, Filter())]
    assert [text.split()[-1] for text in texts] == ["one", "two", "broken"]
    with path.open("a") as file:
        file.write("ode-0 INFO worker.loop whole\n")
    assert [record.text[-5:] for record in files[0].new()] == ["whole"]
    path.rename(tmp_path / "a.log.1")
    assert files[0].new() == []
    path.write_text(line(5, "new"))
    assert [record.text[-3:] for record in files[0].new()] == ["new"]
    errors = last([LogFile(tmp_path / "a.log.1")], 10, Filter(level=Level.ERROR))
    assert [record.text.splitlines()[-1] for record in errors] == ["  at x"]


def test_rates_between_two_looks():
    history = History()
    for at, finished in ((0.0, 10), (2.0, 14), (3.0, 0)):
        history.add(at, cluster_pb2.Counts(finished=finished))
    assert list(history.rates["requests"]) == [2.0, 0.0]
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█"
    assert sparkline([0.0]) == "▁"


def test_the_login_of_a_url_is_left_out():
    assert environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:pass@host:4318/v1"}) == {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:4318/v1"
    }
