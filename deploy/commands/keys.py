"""`baton keys`: the API keys of a cluster's clients. The routers of a running cluster follow the file by themselves."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton import api_keys
from baton import config as configuration
from baton.api_keys import Identity
from baton.errors import ConfigError
from deploy.control_plane import state_file

_LIMITS = {"max_body_bytes": "bytes", "max_prompt_tokens": "prompt tokens", "max_streams": "requests at a time"}


def file_of(given: Path | None, cluster: str) -> Path:
    """Return the file with the keys of a cluster: the one given, that of the running cluster, or the default one."""
    if given is not None:
        return given.expanduser().resolve()
    config = configuration.load(overrides={"cluster.name": cluster})
    state = state_file.read(config.cluster.state_dir)
    if state is not None and state.api_keys_file:
        return Path(state.api_keys_file)
    if (path := config.api_keys_path) is None:
        raise ConfigError("this user has no home directory; name the file with --file, as api.keys_file does")
    return path


def add(path: Path, asked: Identity) -> str:
    """Add a key and return it. Raises InvalidRequest and KeysUnusable."""
    return api_keys.add(path, asked, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))


def listed(path: Path) -> list[dict[str, Any]]:
    """Return what is known of each key, without its hash. Raises KeysUnusable."""
    return [
        {name: value for name, value in msgspec.structs.asdict(key).items() if name != "sha256"}
        for key in api_keys.read(path) or ()
    ]


def show(console: Console, path: Path, found: list[dict[str, Any]]) -> None:
    """Print a line for each key."""
    if not found:
        refused = "every client is refused" if path.exists() else "clients need no key"
        console.print(f"there are no keys in {escape(str(path))}; {refused}")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "tenant", "operator", "limits", "made"):
        table.add_column(column)
    for key in found:
        limits = ", ".join(f"{key[limit]} {unit}" for limit, unit in _LIMITS.items() if key[limit] is not None)
        operator = "yes" if key["operator"] else ""
        table.add_row(escape(key["name"]), escape(key["tenant"]), operator, limits, escape(key["created"]))
    console.print(table)
