"""Where a checkpoint's tokenizer is: its own tokenizer.json, or one that transformers makes of older files.

The conversion runs once, in a process of its own (`convert_tokenizer`), and is kept in the user's cache. Routers and
decode workers find it there by a digest of its sources.
"""

# pyright: strict

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from baton import private_folder
from baton.errors import ModelError, shown

SOURCES = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "merges.txt", "vocab.txt")
"""Files that transformers makes tokenizers of."""
_SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_DEADLINE = 300.0  # seconds; 256,000 tokens take about 20
_TOKEN_IDS_ONLY = "or serve token ids alone: --set model.skip_tokenizer_init=true"  # noqa: S105 - no secret


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with the tokenizer.json of the checkpoint in `folder`, and with the tokenizer_config.json that
    belongs to it. Raises ModelError where there is none and none can be made, with what mends it."""
    if os.path.lexists(folder / "tokenizer.json"):
        return folder
    sources = sorted({file for name in SOURCES for file in folder.glob(name) if file.is_file()})
    if not sources:
        raise ModelError(f"{folder} holds no tokenizer.json, nor files to make one of; add it, {_TOKEN_IDS_ONLY}")
    names = ", ".join(file.name for file in sources)
    try:
        releases = [importlib.metadata.version(name) for name in _libraries(sources)]
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"{folder} holds no tokenizer.json; to make it of {names}: pip install 'baton[convert]'; {_TOKEN_IDS_ONLY}"
        ) from None
    cached = private_folder.cache_root() / "tokenizers" / _digest(folder, sources, releases[0])
    if not (cached / "tokenizer.json").is_file():
        _convert(folder, cached, names)
    return cached


def _libraries(sources: Sequence[Path]) -> Sequence[str]:
    """Return the distributions that a conversion needs."""
    packed = any(file.suffix in (".model", ".tiktoken") for file in sources)
    return ("transformers", "sentencepiece", "tiktoken") if packed else ("transformers",)


def _digest(folder: Path, sources: Sequence[Path], release: str) -> str:
    """Return a name for the outcome of a conversion."""
    digest = hashlib.blake2b(release.encode(), digest_size=16)
    for file in (*sources, *(folder / name for name in _SETTINGS if (folder / name).is_file())):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _convert(folder: Path, target: Path, names: str) -> None:
    private_folder.make(target.parent)
    command = [sys.executable, "-m", "baton.convert_tokenizer", str(folder), str(target)]
    try:
        run = subprocess.run(  # noqa: S603 - a list, no shell
            command, capture_output=True, text=True, timeout=_DEADLINE, check=False, env=os.environ | _OFFLINE
        )
    except subprocess.TimeoutExpired:
        reason = f"it takes longer than {_DEADLINE:.0f} s"
    else:
        if run.returncode == 0:
            return
        reason = run.stdout or run.stderr[-300:] or f"its process ended with {run.returncode}"
    reason = shown(" ".join(reason.split()), 300)
    raise ModelError(
        f"{folder} holds no tokenizer.json, and transformers can't make it of {names}: {reason}; add it, "
        f"{_TOKEN_IDS_ONLY}"
    )


_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
