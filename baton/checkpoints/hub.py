"""The directory of a checkpoint: given by path, made once for a named model, or fetched once from the hub by id."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.checkpoints import named
from baton.errors import ModelNotFound

WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
"""What a checkpoint is served from. Never pickled weights, never code."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(model: str, wanted: Sequence[str] = WANTED, say: Callable[[str], None] = lambda _: None) -> Path:
    """Return the directory of `model`: a path, a name of `named.MODELS`, or a hub id such as "Qwen/Qwen3-0.6B".

    An existing directory wins over a name, and a name over a hub id. What was fetched before is used without a network.
    `say` is told of what takes long. Raises ModelNotFound, saying what was tried, and StartupError for a named model
    that can't be had.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if known := named.MODELS.get(model):
        return known.fetch(say)
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFound(f"{model!r} is not a directory, and no hub id either (owner/name)")
    from huggingface_hub import snapshot_download  # imported late: it takes a moment, and is seldom needed

    say(f"fetching {model} from the Hugging Face hub")
    try:
        return Path(snapshot_download(model, allow_patterns=list(wanted)))
    # Everything: which HTTP library's errors come through depends on the release of huggingface_hub.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(
            f"{model!r} is no directory here, and could not be fetched from the hub: {reason}"
        ) from error


def cached(model: str) -> Path | None:
    """Return the directory of `model` as `resolve` would without a network; None if its config is not here."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if known := named.MODELS.get(model):
        return known.cached()
    if not _HUB_ID.fullmatch(model):
        return None
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(model, allow_patterns=list(WANTED), local_files_only=True))
    except Exception:  # noqa: BLE001 - as above; here they all mean that it was not fetched yet
        return None
    return found if (found / "config.json").is_file() else None
