"""The JSON files of a checkpoint, read one way by routers, workers and the commands that look at a checkpoint."""

# pyright: strict

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from baton.errors import ModelError, ModelNotFound, shown

_KINDS = {
    "architectures": list,
    "layer_types": list,
    "model_type": str,
    "quantization_config": dict,
    "text_config": dict,
}
"""Members of config.json that all readers take for these."""
_MOST = 2**63  # of any number in it


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object. Raises ModelNotFound without the file, ModelError where it holds anything else."""
    try:
        content = path.read_bytes()
        value: Any = json.loads(content)
        if b"\\ud" in content.lower():  # half a character can't be shown, nor sent
            json.dumps(value, ensure_ascii=False).encode()
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


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint. Raises as `read_object` does, and ModelError for a member that no reader
    can take."""
    raw = read_object(folder / "config.json")
    for name, value in (*raw.items(), *text_settings(raw).items()):
        kind = _KINDS.get(name)
        too_large = isinstance(value, int) and abs(value) >= _MOST
        if too_large or (kind is not None and not isinstance(value, kind | None)):
            raise ModelError(
                f"config.json: {name} is {shown(repr(value))}, which makes no sense there; fetch the checkpoint again"
            )
    return raw


def canonical(raw: Mapping[str, Any]) -> bytes:
    """Return a config as JSON. Two copies of one model agree, wherever they lie and whichever release wrote them."""
    fields = {key: value for key, value in raw.items() if key not in ("_name_or_path", "transformers_version")}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def text_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the model that writes text. The config of a model of several parts nests them."""
    nested: Any = raw.get("text_config")
    return {**raw, **nested} if isinstance(nested, dict) else raw
