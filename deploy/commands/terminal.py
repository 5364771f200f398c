"""What all commands share: options, output and errors.

Results go to stdout, progress and errors go to stderr. With --json, stdout holds exactly one JSON object.
`EXIT_STATUSES` has the meaning of each exit status.
"""

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.main import get_command

from baton import config as configuration
from baton.config import Config
from baton.errors import BatonError
from deploy.interrupts import exit_status, quiet_at_the_edges

P = ParamSpec("P")
R = TypeVar("R")


class EngineOption(StrEnum):
    """What computes."""

    AUTO = "auto"
    NATIVE = "native"
    VLLM = "vllm"


class OutputClosed(Exception):
    """Nothing reads stdout any more, as in `baton logs | head`, or its disk is full. Then the error is its argument."""


class _Out(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            raise OutputClosed(error) from None

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise OutputClosed


class _Err(Console):
    """Drops its text once nothing reads it, or the terminal has gone: a teardown goes on without it."""

    def print(self, *objects: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True


out = _Out(highlight=False, soft_wrap=True, emoji=False)  # else "host:on:1" would show a picture
err = _Err(stderr=True, highlight=False, soft_wrap=True, emoji=False)

Name = Annotated[str, typer.Option("--name", help="The cluster's name.", metavar="NAME")]
Operator = Annotated[
    str, typer.Option(metavar="TARGET", help="unix:/PATH or host:port of a router's operator port, instead of --name.")
]
HttpUrl = Annotated[str, typer.Option("--url", help="host:port or URL of an HTTP API, instead of --name.")]
CaFile = Annotated[
    str, typer.Option(envvar="BATON_CA_FILE", help="PEM authorities to trust, over TLS; by default public ones.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML configuration; flags override it.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SETTING=VALUE", help="One setting, such as decode.threads=2.")
]

HELP = {"help_option_names": ["-h", "--help"]}
"""The context settings of every command."""

EXIT_STATUSES: Mapping[int, str] = {
    0: "Done.",
    1: "An error, with its reason on stderr; or the answer is no (not serving, not healthy, not within --wait).",
    2: "Wrong flags or arguments.",
    130: "Interrupted by Ctrl-C; 129 and 143 by SIGHUP and SIGTERM.",
    141: "Nothing reads stdout any more.",
}

_COLOURS = {"live": "green", "ok": "green", "warn": "yellow", "bad": "red"}


def new_app(**options: Any) -> typer.Typer:
    """Return a Typer application that shows Baton's errors itself. `options` are those of Typer."""
    settings: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "no_args_is_help": True}
    settings |= {"context_settings": HELP}
    return typer.Typer(rich_markup_mode="rich", **settings | options)


def command(*examples: str) -> Callable[[Callable[..., None]], Any]:
    """Turn a function into a subcommand: its parameters are the flags, and its errors are `reported`.

    `examples` are command lines for the end of its help.
    """

    def turn(function: Callable[..., None]) -> Any:
        app = new_app(no_args_is_help=False)
        add_command(app, None, *examples)(function)
        return get_command(app)

    return turn


def add_command(app: typer.Typer, name: str | None, *examples: str) -> Callable[[Callable[..., None]], Any]:
    """Add a function to an application under that name, as `command` does."""
    epilog = as_epilog("Examples", (f"[dim]$[/] {escape(line)}" for line in examples))
    return lambda function: app.command(name, epilog=epilog, context_settings=HELP)(reported(function))


def as_epilog(title: str, lines: Iterable[str]) -> str:
    """Return the end of a command's help: a title, and lines in rich's markup, each of which stays a line."""
    return "\n\n".join([f"[bold]{title}[/]", *lines])


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Turn any exception of a command into one message and an exit status, never a traceback."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json = bool(kwargs.get("as_json"))
        quiet_at_the_edges(running=True)
        try:
            return command(*args, **kwargs)
        except BatonError as error:
            _say_error(error.reason, str(error), as_json)
        except KeyboardInterrupt as interrupt:
            err.print("interrupted")
            raise typer.Exit(exit_status(interrupt)) from None
        except OutputClosed as closed:
            forget_stdout()
            if not closed.args:
                raise typer.Exit(128 + signal.SIGPIPE) from None
            _say_error("output", f"stdout can't be written: {closed}", as_json=False)
        except (typer.Exit, typer.Abort, SystemExit):
            raise
        except Exception as error:
            if os.environ.get("BATON_DEBUG"):
                raise
            message = f"{type(error).__name__}: {error} (a fault of Baton's own; BATON_DEBUG=1 shows where)"
            _say_error("internal", message, as_json)
        raise typer.Exit(1)

    return wrapper


def _say_error(reason: str, message: str, as_json: bool) -> None:
    try:
        if as_json:
            print_json({"error": {"reason": reason, "message": message}})
            return
    except OutputClosed:
        forget_stdout()
    err.print(f"[bold red]error[/] ({reason}): {escape(message)}")


def print_json(value: object) -> None:
    out_text(json.dumps(value, ensure_ascii=False) + "\n")


def out_line(text: str) -> None:
    """Write a line to stdout at once; without control characters if that is a terminal."""
    out_text((printable(text) if sys.stdout.isatty() else text) + "\n")


def out_text(text: str) -> None:
    """Write to stdout at once. Raises OutputClosed."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise OutputClosed(error) from None


def forget_stdout() -> None:
    """Let the interpreter's last flush of stdout succeed, after `OutputClosed`."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a device
        os.dup2(nowhere.fileno(), 1)


def printable(text: str) -> str:
    """Return text from elsewhere without control characters: it may not move a terminal's cursor or set its title."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def load(file: Path | None, settings: list[str] | None, flags: dict[str, Any], further: Iterable[str] = ()) -> Config:
    """Return the configuration: the file, overridden by --set, overridden by given flags. `further`: paths of further
    models. Raises ConfigError."""
    overrides: dict[str, object] = dict(configuration.parse_override(text) for text in settings or ())
    overrides |= {key: value for key, value in flags.items() if value not in (None, "")}
    return configuration.load(file, overrides, further)


def state_folder(name: str) -> Path:
    """Return the folder of the state of the cluster of that name. Raises ConfigError."""
    return configuration.load(overrides={"cluster.name": name}).cluster.state_dir


def coloured(word: str) -> str:
    """Return the word in the colour of its meaning: green for good, red for bad, else yellow."""
    return f"[{_COLOURS.get(word, 'yellow')}]{word}[/]"


def new_table(*columns: str, narrow: bool = False) -> Table:
    """Return an empty table. Where a column's name begins with ">", that is left out and its cells stand at the right.

    A `narrow` one has one space between columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print a table at full width in any window, since truncated cells can't be copied."""
    width, console.width = console.width, 240
    console.print(table)
    console.width = width


def size(number: float | None) -> str:
    """Return a number of bytes in its unit, empty if there is none."""
    if number is None:
        return ""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1_024 and len(units) > 1:
        number /= 1_024
        del units[0]
    return f"{number:.0f} B" if units[0] == "B" else f"{number:.1f} {units[0]}"
