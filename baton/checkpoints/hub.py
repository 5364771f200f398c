"""The directory of a checkpoint: given by path, made once for a named model, or fetched once from the hub by id."""

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.checkpoints import gguf_file, named
from baton.errors import ModelNotFound

FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja")
"""What a checkpoint is served from. Never pickled weights, never code."""

PATIENCE = 3.0
"""Seconds within which the hub must answer. Its own library would try for 25 s, and show each try."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(model: str, patterns: Sequence[str] = FILES, say: Callable[[str], None] = lambda _: None) -> Path:
    """Return the directory of `model`: a path, a name of `named.MODELS`, or a hub id such as "Qwen/Qwen3-0.6B". The
    path may be that of a GGUF file.

    An existing directory wins over a name, and a name over a hub id. What was fetched before is used if the hub does
    not answer. `patterns` are those of the files to fetch; `say` is told of what takes long. Raises ModelNotFound,
    which says what was tried, and StartupError for a named model that can't be had.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if gguf_file.is_one(path):
        return gguf_file.folder(path)
    if known := named.MODELS.get(model):
        return known.fetch(say)
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFound(f"{model!r} is not a directory, and no hub id either (owner/name)")
    if problem := _why_silent():
        if (folder := cached(model)) is not None:
            return folder
        raise ModelNotFound(
            f"{model!r} is no directory here, was not fetched before, and the hub does not answer: {problem}"
        )
    from huggingface_hub import snapshot_download  # imported late: it takes a moment, and is seldom needed

    say(f"fetching {model} from the Hugging Face hub")
    try:
        return Path(snapshot_download(model, allow_patterns=[*patterns]))
    # Everything: which HTTP library's errors come through depends on the release of huggingface_hub.
    except Exception as error:
        raise ModelNotFound(
            f"{model!r} is no directory here, and could not be fetched from the hub: {_reason(error)}"
        ) from error


def cached(model: str) -> Path | None:
    """Return the directory of `model` as `resolve` would without a network; None if its config is not here."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if gguf_file.is_one(path):
        return gguf_file.folder(path)
    if known := named.MODELS.get(model):
        return known.cached()
    if not _HUB_ID.fullmatch(model):
        return None
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, allow_patterns=[*FILES], local_files_only=True))
    except Exception:  # noqa: BLE001 - as above; here they all mean that it was not fetched yet
        return None
    return folder if (folder / "config.json").is_file() else None


def _why_silent() -> str:
    """Return why the hub does not answer within PATIENCE; nothing if it does. Any answer will do."""
    from huggingface_hub import constants, get_session

    answer: list[str] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
            answer.append("")
        except Exception as error:  # noqa: BLE001 - as above
            answer.append(_reason(error))

    # On a thread, since no timeout ends a look-up of the hub's name.
    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(PATIENCE)
    return answer[0] if answer else f"nothing came from {constants.ENDPOINT} within {PATIENCE:.0f} s"


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
