"""`baton config show`, `collect-env` and the pieces of `logs` and `top` that need no cluster."""

import json
import logging
from contextlib import closing
from logging.handlers import RotatingFileHandler
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from baton.config import Config, load
from baton.operator_api import Counts
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
    sections = json.loads(shown("config", "show", "pages", "--json"))
    assert sections["pages"]["page_size"] == Config().pages.page_size
    assert list(sections) == ["pages"]
    result = CliRunner().invoke(app, ["config", "show", "nothing"])
    assert result.exit_code == 1
    assert "there is no section 'nothing'" in result.output


def test_an_environment_without_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATON_API_KEY", "sk-very-secret")
    sections = json.loads(shown("collect-env", "--json"))
    assert sections["packages"]["ray"]
    assert "sk-very-secret" not in json.dumps(sections)
    variables = environment(
        {"HF_TOKEN": "t", "OMP_NUM_THREADS": "2", "MY_NAME": "x", "OTEL_EXPORTER_OTLP_HEADERS": "h"}
    )
    assert variables == {"HF_TOKEN": "(left out)", "OMP_NUM_THREADS": "2", "OTEL_EXPORTER_OTLP_HEADERS": "(left out)"}


def line(second: int, text: str, level: str = "INFO") -> str:
    return f"2026-01-01T00:00:{second:02}.000 decode-0 {level} worker.loop {text}\n"


def words(file: LogFile) -> list[str]:
    """The last word of each new record's first line."""
    return [record.text.splitlines()[0].split()[-1] for record in file.new()]


def test_a_traceback_belongs_to_its_record_and_a_line_is_shown_once_it_is_whole(tmp_path: Path):
    path, other = tmp_path / "a.log", tmp_path / "b.log"
    path.write_text(line(1, "one") + line(3, "broken", "ERROR") + "Traceback\n  at x\n" + "2026-01-01T00:00:04.000 dec")
    other.write_text(line(2, "two"))
    with LogFile(path) as first, LogFile(other) as second:
        texts = [record.text.splitlines()[0].split()[-1] for record in last([first, second], 10, Filter())]
        assert texts == ["one", "two", "broken"]
        with path.open("a") as file:
            file.write("ode-0 INFO worker.loop whole\n")
        assert words(first) == ["whole"]
    with LogFile(path) as again:
        errors = last([again], 10, Filter(level=Level.ERROR))
    assert [record.text.splitlines()[-1] for record in errors] == ["  at x"]


def test_a_rotated_log_loses_no_line(tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_text(line(1, "one"))
    with LogFile(path) as file:
        assert words(file) == ["one"]
        with path.open("a") as late:
            late.write(line(2, "before"))
            path.rename(tmp_path / "a.log.1")
            late.write(line(3, "renamed"))
        assert words(file) == ["before", "renamed"], "there is no newer file yet"
        with (tmp_path / "a.log.1").open("a") as late:
            late.write(line(4, "last"))
        path.write_text(line(5, "new"))
        assert words(file) == ["last", "new"]
        path.write_text("")
        assert words(file) == []
        path.write_text(line(7, "emptied"))
        assert words(file) == ["emptied"]


@pytest.mark.parametrize("backups", [1, 4])
def test_what_the_handler_of_our_processes_rotates_is_followed_to_the_last_line(tmp_path: Path, backups: int):
    handler = RotatingFileHandler(tmp_path / "a.log", maxBytes=200, backupCount=backups)
    seen: list[str] = []
    with LogFile(tmp_path / "a.log") as file, closing(handler):
        for number in range(60):
            handler.emit(logging.LogRecord("x", logging.INFO, "", 0, line(1, str(number)).strip(), None, None))
            if number % 2:  # at most one rotation between two looks
                seen += words(file)
        seen += words(file)
    assert seen == [str(number) for number in range(60)]


def test_rates_between_two_looks():
    history = History()
    for at, finished in ((0.0, 10), (2.0, 14), (3.0, 0)):
        history.add_counts(at, Counts(finished=finished))
    assert list(history.rates["requests"]) == [2.0, 0.0]
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█"
    assert sparkline([0.0]) == "▁"


def test_the_login_of_a_url_is_left_out():
    assert environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:pass@host:4318/v1"}) == {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:4318/v1"
    }
