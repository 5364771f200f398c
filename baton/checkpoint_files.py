"""The JSON files of a checkpoint, read one way by routers, workers and the commands that look at a checkpoint."""

# pyright: strict

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from baton.errors import ModelError, ModelNotFound


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object. Raises ModelNotFound without the file, ModelError where it holds anything else."""
    try:
        value: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFound(f"{path} does not exist; is {path.parent} the directory of a checkpoint?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read: {error}; fetch the checkpoint again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, not an object; fetch the checkpoint again")
    return cast("dict[str, Any]", value)


def read_optional(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, an empty one without the file. A link that leads nowhere raises ModelNotFound."""
    return read_object(path) if os.path.lexists(path) else {}


def canonical(raw: Mapping[str, Any]) -> bytes:
    """Return a config as JSON. Two copies of one model agree, wherever they lie and whichever release wrote them."""
    fields = {key: value for key, value in raw.items() if key not in ("_name_or_path", "transformers_version")}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def text_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the model that writes text. The config of a model of several parts nests them."""
    nested: Any = raw.get("text_config")
    return {**raw, **nested} if isinstance(nested, dict) else raw
