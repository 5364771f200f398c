"""What `--help` shows of every command, and that what it shows can be typed."""

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton import __version__
from deploy.cli import app
from deploy.commands.terminal import EXIT_STATUSES

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / ".ci" / "cli_reference.py"))


@pytest.mark.parametrize(("name", "command"), [pytest.param(*each, id=each[0]) for each in REFERENCE["commands"]()])
def test_every_command_has_examples_that_parse(name: str, command: Any):
    assert command.help
    shown = REFERENCE["examples"](command)
    assert shown
    for line in shown:
        assert line.startswith(name), line
        command.make_context(name, shlex.split(line.partition(" > ")[0])[len(name.split()) :])


def test_the_help_has_a_table_of_exit_statuses():
    shown = CliRunner().invoke(app, ["--help"]).output
    for status in EXIT_STATUSES:
        assert f" {status} " in shown


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("name", ["", *(name.removeprefix("baton ") for name, _ in REFERENCE["commands"]())])
def test_help_fits_into_80_columns(name: str, flag: str):
    shown = CliRunner().invoke(app, [*name.split(), flag], env={"COLUMNS": "80", "TERM": "dumb"})
    assert shown.exit_code == 0, shown.output
    assert "Usage: baton" in shown.output
    options = [line for line in shown.output.splitlines() if re.match(r"│ \*? *-", line)]
    assert options
    for line in options:
        assert len(line) == 80
        assert "…" not in line, "a flag's name is cut"
        assert not re.search(r"<[\w|]+ *(│|  )", line), "the type of a flag is cut"
        assert not line.split("│")[1].rstrip().endswith("="), "the form of a flag's value is cut"


def test_the_version_is_shown_by_a_flag_and_by_a_command():
    by_flag, by_command = (CliRunner().invoke(app, [word]) for word in ("--version", "version"))
    assert by_flag.output == by_command.output == f"baton {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands(shell: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_BATON_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "baton expl")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "baton expl")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    shown = CliRunner().invoke(app, [], prog_name="baton").output
    assert "explain" in shown
    assert "status" not in shown


def test_the_page_of_all_commands_is_what_they_say():
    written = (ROOT / "docs" / "cli.md").read_text()
    assert written == REFERENCE["page"](), "run python .ci/cli_reference.py docs/cli.md"
