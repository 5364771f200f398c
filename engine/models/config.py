"""From a checkpoint's directory to its ModelSpec."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.checkpoint_files import read_config
from baton.errors import ModelNotFound
from engine.checkpoint import formats
from engine.models.config_file import ConfigFile
from engine.models.families.registry import family_of
from engine.spec import ModelSpec


def load_spec(path: Path) -> ModelSpec:
    """Read `config.json` of the checkpoint in `path`.

    Raises ModelNotFound when there is no such directory or no config in it, UnsupportedModel for what the engine does
    not run, ModelError for a value that makes no sense.
    """
    if not path.is_dir():
        raise ModelNotFound(f"{path} is not a directory; give the directory of a checkpoint, or a hub id")
    return parse_spec(read_config(path))


def parse_spec(raw: Mapping[str, Any]) -> ModelSpec:
    """As `load_spec`, for a parsed file."""
    config = ConfigFile(raw)
    return replace(family_of(config).read(config), stored=formats.describe(raw.get("quantization_config")))
