"""`baton config`: the settings that a cluster would start with."""

from typing import Annotated, Any

import msgspec
import typer
import yaml
from typer.main import get_command

from baton import config as configuration
from baton.config import Config
from baton.errors import ConfigError
from deploy.commands.terminal import ConfigFile, Json, Settings, add_command, load, new_app, out_text, print_json

app = new_app(name="config", help="The settings that a cluster would start with.")


@app.callback()
def group() -> None:
    """The settings that a cluster would start with."""


@add_command(
    app,
    "show",
    "baton config show",
    "baton config show --config cluster.yaml --changed",
    "baton config show router --json",
)
def config_show(
    section: Annotated[str, typer.Argument(help="One section, such as router.")] = "",
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Print the whole configuration as YAML: the file, overridden by --set, on top of the defaults."""
    shown = tree(load(config, settings, {}), changed, section)
    if as_json:
        print_json(shown)
    else:
        out_text(yaml.safe_dump(shown, sort_keys=False) if shown else "")


def tree(config: Config, changed: bool, section: str) -> dict[str, Any]:
    """Return the configuration as plain data, section by section. Raises ConfigError for an unknown section."""
    sections, defaults = (yaml.safe_load(configuration.dump(each)) for each in (config, Config()))
    if section and section not in sections:
        raise ConfigError(f"there is no section {section!r}; there are {', '.join(sections)}")
    if changed:
        sections = {name: _different(values, defaults[name]) for name, values in sections.items()}
        sections = {name: values for name, values in sections.items() if values}
    return {name: values for name, values in sections.items() if not section or name == section}


def _different(values: Any, defaults: Any) -> Any:
    """Return the settings that are not at their default. A list or table is one setting."""
    if not isinstance(values, dict):
        return values if values != defaults else None
    return {name: value for name, value in values.items() if value != defaults.get(name, msgspec.UNSET)}


config = get_command(app)
