"""A process that makes a tokenizer.json of a checkpoint's older tokenizer files, as transformers reads them.

`python -m baton.convert_tokenizer FOLDER TARGET` makes the folder TARGET. It never runs a checkpoint's code. The status
is 1 if it fails, and standard output says why.
"""

import contextlib
import logging
import shutil
import sys
import tempfile
from pathlib import Path


def convert(folder: Path, target: Path) -> None:
    """Make `target`, with tokenizer.json and tokenizer_config.json. Raises ValueError, and what transformers raises."""
    from transformers import AutoTokenizer

    logging.getLogger("transformers").addHandler(_Reasons())
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    work = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        tokenizer.save_pretrained(work)
        if not (work / "tokenizer.json").is_file():
            raise ValueError(f"{type(tokenizer).__name__} has no tokenizer.json")
        with contextlib.suppress(OSError):  # another process was first
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Reasons(logging.Handler):
    """Passes on what transformers warns of: it is the reason of an error that comes later."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stdout.write(f"{record.getMessage()} ")


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 - what transformers raises is not known; the parent passes it on
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.exit(1)
