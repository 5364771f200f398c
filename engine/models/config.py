"""From a checkpoint's directory to its ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.errors import ModelNotFound
from engine.checkpoint import formats
from engine.models.config_file import ConfigFile, read_object
from engine.models.families.registry import family_of
from engine.spec import ModelSpec


def load_spec(path: Path) -> ModelSpec:
    """Read `config.json` of the checkpoint in `path`, and `generation_config.json` where there is one.

    Raises ModelNotFound when there is no such directory or no config in it, UnsupportedModel for what the engine does
    not run, ModelError for a value that makes no sense.
    """
    if not path.is_dir():
        raise ModelNotFound(f"{path} is not a directory; give the directory of a checkpoint, or a hub id")
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} holds no config.json; is it the directory of a checkpoint?")
    raw = read_object(path / "config.json")
    generation = path / "generation_config.json"
    return parse_spec(raw, read_object(generation) if generation.is_file() else {})


def parse_spec(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """As `load_spec`, for parsed files."""
    config = ConfigFile(raw, generation or {})
    return replace(family_of(config).read(config), weight_format=formats.name_of(raw.get("quantization_config")))
