"""Where a checkpoint's files are: a directory given by path, or fetched once from the Hugging Face hub by id."""

from __future__ import annotations

import re
from pathlib import Path

from baton.errors import ModelNotFound

WANTED = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja"]
"""What a checkpoint is served from. Never pickled weights, never code."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(model: str) -> Path:
    """The directory of `model`, which is a path, or a hub id such as "Qwen/Qwen3-0.6B".

    An existing directory wins over a hub id. What was fetched before is used without a network.
    Raises ModelNotFound, saying which of the two was tried.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFound(f"{model!r} is not a directory, and no hub id either (owner/name)")
    from huggingface_hub import snapshot_download  # imported late: it takes a moment, and is seldom needed

    try:
        return Path(snapshot_download(model, allow_patterns=WANTED))
    # Everything: which HTTP library's errors come through depends on the release of huggingface_hub.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(
            f"{model!r} is no directory here, and could not be fetched from the hub: {reason}"
        ) from error


def cached(model: str) -> Path | None:
    """The directory of `model` as `resolve` would return it without a network; None if its config is not here."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if not _HUB_ID.fullmatch(model):
        return None
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(model, allow_patterns=WANTED, local_files_only=True))
    except Exception:  # noqa: BLE001 - as above; here they all mean that it was not fetched yet
        return None
    return found if (found / "config.json").is_file() else None
