"""A GGUF file as a model: the directory below the user's cache that describes it and links to it.

The directory has the config, the tokenizer and the chat template of the file, some MiB. The numbers stay in the file.
"""

import hashlib
import importlib.util
import tempfile
from pathlib import Path

from baton import private_folder
from baton.errors import StartupError

_VERSION = 4  # counts changes of what is written


def is_one(path: Path) -> bool:
    """Whether the path is that of a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def folder(path: Path) -> Path:
    """Return the directory of a file, made if it is not there. It is another one once the file has changed.

    Raises StartupError without the package that reads such files, UnsupportedModel and CorruptWeights.
    """
    from baton.checkpoints import from_gguf

    if importlib.util.find_spec("gguf") is None:
        raise StartupError(
            f"{path} is a GGUF file, and the package that reads it is not here: pip install 'baton[gguf]'"
        )
    path = path.resolve()
    state = path.stat()
    digest = hashlib.blake2b(repr((str(path), state.st_size, state.st_mtime_ns)).encode(), digest_size=8).hexdigest()
    parent = private_folder.cache_root() / "gguf"
    place = parent / f"{path.stem}-{digest}-{_VERSION}"
    if not place.exists():
        private_folder.make(parent)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".making-") as work:
            from_gguf.link(path, Path(work) / place.name)
            try:
                (Path(work) / place.name).rename(place)
            except OSError:
                if not place.exists():  # else another process was faster
                    raise
    return place
