"""The `baton` command: its subcommands are modules of `deploy/commands/`, each imported when it is used.

So `baton status` does not wait until the simulator of `baton advise` is imported, nor `baton version` for gRPC.
"""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from baton import __version__
from deploy.commands.terminal import EXIT_STATUSES, as_epilog, forget_stdout, new_app, out
from deploy.interrupts import quiet_at_the_edges

_COMMANDS = (
    "up", "status", "top", "chat", "generate", "run-batch", "bench", "logs", "explain", "scale", "drain", "role",
    "reload", "down", "pin", "adapters", "profile", "advise", "size", "quantize", "config", "keys", "doctor",
    "collect-env", "version",
)  # fmt: skip


class _Subcommands(TyperGroup):
    """A command is found under the name of its module, where it has that name, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        names: dict[str, Any] = dict.fromkeys(_COMMANDS)
        self.commands = names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            return None
        module = cmd_name.replace("-", "_")
        return getattr(import_module(f"deploy.commands.{module}"), module)


_EPILOG = as_epilog("Exit status", (f"{status:>3}  {meaning}" for status, meaning in EXIT_STATUSES.items()))

app = new_app(name="baton", cls=_Subcommands, add_completion=True, epilog=_EPILOG)


def _version(show: bool) -> None:
    if show:
        out.print(f"baton {__version__}")
        raise typer.Exit


@app.callback()
def main_help(
    _: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")] = False,
) -> None:
    """Serve a large language model with prefill and decode in separate workers."""


def main() -> None:
    try:
        app()
    except OSError as error:  # of typer's own output, such as help
        forget_stdout()
        sys.exit(f"error (output): stdout can't be written: {error}")
    finally:
        quiet_at_the_edges(running=False)
