"""`baton version`."""

from baton import __version__
from deploy.commands.terminal import Json, command, out, print_json


@command("baton version")
def version(as_json: Json = False) -> None:
    """Show the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        out.print(f"baton {__version__}")
