"""`baton down`: end a cluster."""

from rich.markup import escape

from baton.errors import StartupError
from deploy.commands.progress import Progress
from deploy.commands.terminal import Json, Name, command, err, out, print_json, state_folder
from deploy.control_plane import state_file
from deploy.control_plane.teardown import tear_down


@command("baton down")
def down(name: Name = "baton", as_json: Json = False) -> None:
    """End the cluster, and the Ray that `baton up` started for it. A Ray of yours stays up."""
    folder = state_folder(name)
    if not folder.exists():
        raise _no_cluster(name)
    with state_file.locked(folder), Progress(err) as progress:
        state = state_file.read_state(folder)
        if state is None:
            raise _no_cluster(name)
        tear_down(folder, state, progress.say)
    if as_json:
        print_json({"name": name, "down": True})
    else:
        out.print(f"{name} is down; its logs stay in {escape(state.log_dir)}")


def _no_cluster(name: str) -> StartupError:
    return StartupError(f"no cluster named {name!r} is up; there is nothing to end")
