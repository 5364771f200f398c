"""`baton keys`: the API keys of a cluster's clients. The routers of a running cluster follow the file by themselves."""

import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from typer.main import get_command

from baton import api_keys
from baton import config as configuration
from baton.api_keys import Identity
from baton.errors import ConfigError
from baton.wire import ClusterKeys
from deploy.commands.terminal import Json, Name, add_command, err, new_app, new_table, out, out_text, print_json
from deploy.control_plane import state_file

_LIMITS = {"max_body_bytes": "bytes", "max_prompt_tokens": "prompt tokens", "max_streams": "requests at a time"}

app = new_app(name="keys", help="API keys of clients, and the key pair of a cluster's processes.")
KeysFile = Annotated[
    Path | None, typer.Option("--file", help="The file with the keys (api.keys_file), instead of --name's.")
]


@add_command(
    app,
    "add",
    "baton keys add alice --tenant research",
    "baton keys add watcher --operator",
    "baton keys add batch --tenant batch --max-streams 32",
)
def keys_add(
    key: Annotated[str, typer.Argument(metavar="NAME", help="The key's name, in lists and logs.")],
    tenant: Annotated[str, typer.Option(help="Clients with this key share its cache, weight and rate limits.")] = "",
    operator: Annotated[bool, typer.Option("--operator", help="It may also watch and change the cluster.")] = False,
    max_body_bytes: Annotated[int | None, typer.Option(min=1, help="Largest request.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt.")] = None,
    max_streams: Annotated[int | None, typer.Option(min=1, help="Most requests at a time.")] = None,
    file: KeysFile = None,
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Make an API key and print it once. Only its hash is kept. From the first key on, clients need one."""
    limits = {"max_body_bytes": max_body_bytes, "max_prompt_tokens": max_prompt_tokens, "max_streams": max_streams}
    path = file_of(file, name)
    secret = add_key(path, Identity(name=key, tenant=tenant, operator=operator, **limits))
    if as_json:
        print_json({"name": key, "tenant": tenant, "operator": operator, "key": secret, "file": str(path)})
    else:
        err.print(f"[dim]{escape(key)} is in {escape(str(path))}; the key is not shown again[/]")
        out_text(secret + "\n")


@add_command(app, "list", "baton keys list")
def keys_list(file: KeysFile = None, name: Name = "baton", as_json: Json = False) -> None:
    """Show the names, tenants and limits of all API keys."""
    path = file_of(file, name)
    rows = listed(path)
    if as_json:
        print_json({"file": str(path), "keys": rows})
    else:
        show(out, path, rows)


@add_command(app, "remove", "baton keys remove alice")
def keys_remove(
    key: Annotated[str, typer.Argument(metavar="NAME", help="The key's name.")],
    file: KeysFile = None,
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Remove an API key. Within seconds it opens nothing any more; its requests that run go on."""
    path = file_of(file, name)
    left = api_keys.remove(path, key)
    if as_json:
        print_json({"name": key, "removed": True, "left": left})
        return
    out.print(f"removed {escape(key)}; {left} keys are left")
    if not left:
        out.print(escape(f"every client is refused now; to serve clients without keys, remove {path} and restart"))


@add_command(app, "cluster", "baton keys cluster ./cluster.key")
def keys_cluster(
    file: Annotated[Path, typer.Argument(help="The file to make; an existing file is never overwritten.")],
    as_json: Json = False,
) -> None:
    """Make a key pair for a cluster. Every process with the file can join it. Name it in cluster.key_file."""
    ClusterKeys.generate().write(file)
    if as_json:
        print_json({"key_file": str(file)})
    else:
        out.print(f"made {escape(str(file))}, for its owner alone; set cluster.key_file to it")


keys = get_command(app)


def file_of(chosen: Path | None, cluster: str) -> Path:
    """Return the file with the keys of a cluster: the one given, that of the running cluster, or the default one."""
    if chosen is not None:
        return chosen.expanduser().resolve()
    config = configuration.load(overrides={"cluster.name": cluster})
    state = state_file.read_state(config.cluster.state_dir)
    if state is not None and state.api_keys_file:
        return Path(state.api_keys_file)
    if (path := config.api_keys_path) is None:
        raise ConfigError("this user has no home directory; name the file with --file, as api.keys_file does")
    return path


def add_key(path: Path, identity: Identity) -> str:
    """Add a key and return it. Raises InvalidRequest and KeysUnusable."""
    return api_keys.add_key(path, identity, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))


def listed(path: Path) -> list[dict[str, Any]]:
    """Return what is known of each key, without its hash. Raises KeysUnusable."""
    return [
        {name: value for name, value in msgspec.structs.asdict(key).items() if name != "sha256"}
        for key in api_keys.read_keys(path) or ()
    ]


def show(console: Console, path: Path, rows: list[dict[str, Any]]) -> None:
    if not rows:
        refused = "every client is refused" if path.exists() else "clients need no key"
        console.print(f"there are no keys in {escape(str(path))}; {refused}")
        return
    table = new_table("name", "tenant", "operator", "limits", "made")
    for key in rows:
        limits = ", ".join(f"{key[limit]} {unit}" for limit, unit in _LIMITS.items() if key[limit] is not None)
        operator = "yes" if key["operator"] else ""
        table.add_row(escape(key["name"]), escape(key["tenant"]), operator, limits, escape(key["created"]))
    console.print(table)
