"""Find the running cluster that a command is about."""

from pathlib import Path

import msgspec

from baton.client import Client
from baton.errors import StartupError
from deploy.commands.terminal import state_folder
from deploy.control_plane import state_file
from deploy.control_plane.reports import read_overview
from deploy.control_plane.state_file import State


def find(folder: Path) -> State:
    """Return the state of the cluster of that folder. Raises StartupError if there is none."""
    state = state_file.read_state(folder)
    if state is None:
        raise StartupError(f"no cluster named {folder.name!r} is up; start one with `baton up --model DIRECTORY`")
    if not state.routers:
        raise StartupError(
            f"the cluster {folder.name!r} never came up: its `baton up` was killed; `baton down --name {folder.name}` "
            "clears away what is left"
        )
    # The supervisor knows the addresses of restarted routers.
    overview = read_overview(folder)
    return msgspec.structs.replace(state, routers=overview.routers) if overview and overview.routers else state


def operator_client(target: str, name: str) -> Client:
    """Return a client of the operator port at `target`, or of the cluster of that name. Raises StartupError."""
    if target:
        return Client(operator=target)
    state = find(state_folder(name))
    return Client(operator=state.operator, api_key=state.operator_key)
