"""`baton adapters`: the LoRA adapters of a cluster, which may change while it serves."""

from typing import Annotated

import typer
from rich.markup import escape
from typer.main import get_command

from deploy.commands.running_cluster import operator_client
from deploy.commands.terminal import Json, Name, Operator, add_command, new_app, new_table, out, print_json

_app = new_app(
    name="adapters", help="Load, list and unload LoRA adapters while the cluster serves. Loading needs model.max_loras."
)
AdapterName = Annotated[str, typer.Argument(metavar="NAME", help="What clients call it: the `model` of a request.")]


def _load(
    adapter: AdapterName,
    path: Annotated[str, typer.Argument(help="Its directory, as PEFT saved it; every node must have it.")],
    model: Annotated[str, typer.Option(help="Of several models, its own; by default the first.")] = "",
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Have every worker of a model load an adapter. The command ends once they have, or says which can't, and then none
    has it."""
    with operator_client(operator, name) as client:
        client.load_adapter(adapter, path, model=model)
    if as_json:
        print_json({"name": adapter, "path": path})
    else:
        out.print(f"{escape(adapter)} is served")


def _unload(adapter: AdapterName, operator: Operator = "", name: Name = "baton", as_json: Json = False) -> None:
    """Serve no more requests of an adapter. Those that run go on."""
    with operator_client(operator, name) as client:
        client.unload_adapter(adapter)
    if as_json:
        print_json({"name": adapter})
    else:
        out.print(f"{escape(adapter)} is served no more")


def _list(operator: Operator = "", name: Name = "baton", as_json: Json = False) -> None:
    """Show the adapters that clients may name."""
    with operator_client(operator, name) as client:
        adapters = client.adapters()
    if as_json:
        print_json({"adapters": [{"name": one.name, "path": one.path} for one in adapters]})
        return
    table = new_table("NAME", "PATH")
    for one in adapters:
        table.add_row(escape(one.name), escape(one.path))
    out.print(table)


add_command(_app, "load", "baton adapters load poet /models/poet-lora")(_load)
add_command(_app, "unload", "baton adapters unload poet")(_unload)
add_command(_app, "list", "baton adapters list")(_list)
adapters = get_command(_app)
