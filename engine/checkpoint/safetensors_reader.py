"""The tensors of a checkpoint on disk, each read once, and the digest of all that was read.

Reads safetensors and GGUF and nothing else: both hold numbers only, so a checkpoint can't run code here.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from baton.checkpoints.from_gguf import FILE
from baton.errors import CorruptWeights, ModelNotFound
from engine.checkpoint.formats.format import FLOATS
from engine.checkpoint.gguf_reader import GgufTensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # that safetensors reads
_STORED_AS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
STORED = tuple(_STORED_AS)
"""All dtypes that a format may have."""


class TensorFiles:
    """A checkpoint's safetensors, opened together; a context manager, since they stay mapped while it is open.

    `read_tensor` digests as it goes, so that the fingerprint costs no second pass over the files.
    """

    def __init__(self, directory: Path, single: str = SINGLE) -> None:
        """`single`: the file's name where there is but one. Raises ModelNotFound when there are no safetensors,
        CorruptWeights when they can't be opened."""
        self._stack = ExitStack()
        self._files: dict[str, tuple[Path, Any]] = {}  # by tensor name
        self._digests: dict[str, bytes] = {}
        try:
            self._open(directory, single)
        except BaseException:
            self._stack.close()
            raise

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    @property
    def seen(self) -> frozenset[str]:
        """Names of the tensors read so far."""
        return frozenset(self._digests)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one of `names`, without reading it. Raises CorruptWeights."""
        path, file = self._files[name]
        try:
            return tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CorruptWeights(f"{path}: {name} can't be read: {error}; fetch the checkpoint again") from error

    def holds_bytes(self, name: str) -> bool:
        """Whether one of `names` is stored as bytes, as formats do that pack several numbers into one. Raises
        CorruptWeights."""
        path, file = self._files[name]
        try:
            return file.get_slice(name).get_dtype() == "U8"
        except (SafetensorError, OSError) as error:
            raise CorruptWeights(f"{path}: {name} can't be read: {error}; fetch the checkpoint again") from error

    def expect(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
        """Check what is said of the tensor `name`, without reading it. Raises as `read_tensor` does."""
        if name not in self._files:
            raise CorruptWeights(f"the checkpoint has no tensor {name}, which its config asks for; fetch it again")
        path, file = self._files[name]
        actual = self.shape(name)
        if actual != shape:
            raise CorruptWeights(f"{path.name}: {name} has shape {list(actual)}, its config says {list(shape)}")
        stored = file.get_slice(name).get_dtype()
        if stored not in (known := [_STORED_AS[dtype] for dtype in dtypes]):
            raise CorruptWeights(f"{path.name}: {name} is {stored}; known: {', '.join(known)}")

    def read_tensor(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
        """The tensor `name` on the CPU, in the dtype it was stored in.

        Raises CorruptWeights when it is absent, of another shape, or of none of `dtypes`.
        """
        self.expect(name, shape, dtypes)
        return self._take(name)

    def fingerprint(self, config: bytes) -> bytes:
        """16 bytes that name the config and every tensor's name, dtype, shape and bytes; reads the other tensors."""
        digest = hashlib.blake2b(config, digest_size=16)
        for name in sorted(self._files):
            if name not in self._digests:
                self._take(name)
            digest.update(self._digests[name])
        return digest.digest()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, directory: Path, single: str) -> None:
        if (gguf := directory / FILE).exists():
            tensors = GgufTensors(gguf)
            self._files = dict.fromkeys(tensors.names(), (gguf, tensors))
            return
        if single == SINGLE and (directory / INDEX).is_file():
            shards = _shards(directory / INDEX)
        elif (directory / single).is_file():
            shards = {directory / single: None}
        else:
            raise ModelNotFound(
                f"{directory} holds neither {single} nor {INDEX}; pickled weights are never loaded, "
                "save the model as safetensors"
            )
        for path, promised in shards.items():
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                present = set(file.keys())
            except (SafetensorError, OSError) as error:
                why = _beyond_the_end(path) or error
                raise CorruptWeights(f"{path} can't be read: {why}; fetch the checkpoint again") from error
            for name in present if promised is None else promised:
                if name not in present:
                    raise CorruptWeights(f"{path.name} lacks {name}, which {INDEX} promises; fetch it again")
                self._files[name] = (path, file)

    def _take(self, name: str) -> torch.Tensor:
        path, file = self._files[name]
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CorruptWeights(f"{path}: {name} can't be read: {error}; fetch the checkpoint again") from error
        if name not in self._digests:
            self._digests[name] = _digest(name, tensor)
        return tensor


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    """XXH3 for the bytes, since it runs at memory speed; the names around it keep tensors from changing places."""
    content = xxhash.xxh3_128_digest(tensor.reshape(-1).view(torch.uint8).numpy().data)
    head = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
    return len(head).to_bytes(4, "little") + head + content


def _beyond_the_end(path: Path) -> str:
    """Return which tensor is the first to end beyond the end of a file, in words; "" if there is none, or no header."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        header.pop("__metadata__", None)
        ends = {name: 8 + length + int(each["data_offsets"][1]) for name, each in header.items()}
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return ""
    end, name = min(((end, name) for name, end in ends.items() if end > size), default=(0, ""))
    return name and f"{name} ends at byte {end:,} of {size:,}"


def _shards(index: Path) -> dict[Path, list[str] | None]:
    """The files that an index names, each with the tensors it is said to hold."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptWeights(f"{index} has no readable weight_map: {error!r}; fetch the checkpoint again") from error
    shards: dict[Path, list[str] | None] = {}
    for name, file in pairs:
        # An index comes from strangers: it may name files beside itself and no others.
        if Path(file).name != file:
            raise CorruptWeights(f"{index.name} puts {name} into {file!r}, which is not a file beside it")
        path = index.parent / file
        if not path.is_file():
            raise CorruptWeights(f"{index.name} names {file}, which is missing; fetch the checkpoint again")
        names = shards.setdefault(path, [])
        assert names is not None
        names.append(name)
    return shards
