"""A checkpoint with its products rounded to 8 or 4 bits, in compressed-tensors' form, which vLLM reads, too.

Reads one matrix at a time, whatever the format it is stored in. What is no product of a layer stays as it is: norms,
biases, the embedding, routers, and the output head unless it is asked for.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from baton.checkpoint_files import read_config
from baton.checkpoints.hub import FILES
from baton.errors import InvalidRequest
from engine.checkpoint import formats, rounding
from engine.checkpoint.formats.affine_groups import AffineGroups
from engine.checkpoint.formats.format import Shape
from engine.checkpoint.safetensors_reader import INDEX, SINGLE, STORED, TensorFiles
from engine.models import weights
from engine.models.config import load_spec
from engine.spec import ModelSpec, WeightSpec

HEAD, EMBEDDING, HEAD_BITS = "lm_head", "model.embed_tokens.weight", 8
_ROUTERS = [f"re:.*{name}$" for name in ("mlp.gate", "block_sparse_moe.gate")]
_SHARD_BYTES = 4 * 2**30


class LayerError(NamedTuple):
    """What rounding has lost of a layer's products that are rounded: the root of the mean square, over that of the
    numbers."""

    layer: int | None  # None: the output head
    mean: float
    worst: float
    worst_name: str


class Products(NamedTuple):
    """The products of a checkpoint that were to be rounded."""

    total: int
    plain: list[str]  # of these, the ones whose inputs are no multiple of the group


def quantize(source: Path, out: Path, bits: int, group: int, head: bool, say: Callable[[LayerError], None]) -> Products:
    """Write the checkpoint in `source` into the new directory `out`, and tell each layer's error. The directory appears
    whole or not at all.

    Products whose inputs are no multiple of `group` stay as they are. Raises ModelError for a checkpoint that can't be
    read, InvalidRequest if `out` is there or if all products stay as they are.
    """
    if out.exists():
        raise InvalidRequest(f"{out} is there already; name a directory that is not")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        whole = Path(folder) / out.name
        whole.mkdir()
        products = _quantize(source, whole, bits, group, head, say)
        whole.rename(out)
        return products


def _quantize(
    source: Path, out: Path, bits: int, group: int, head: bool, say: Callable[[LayerError], None]
) -> Products:
    spec = load_spec(source)
    inputs = {shape[1] for _, _, shape in weights.matrices(spec)}  # the head's among them
    if all(size % group for size in inputs):
        raise InvalidRequest(
            f"no product of the model has a multiple of {group} inputs, but {', '.join(map(str, sorted(inputs)))}: "
            "take a smaller group, or serve the checkpoint as it is"
        )
    raw = dict(read_config(source))
    with TensorFiles(source) as files:
        reading = weights.as_stored(files, spec)
        writing = _Writing(reading, files, bits, group)
        for error in writing.layers():
            say(error)
        if head:
            for error in writing.head():
                say(error)
            raw["tie_word_embeddings"] = False
        writing.others(head)
        _Shards(out).write(writing.tensors)
    raw["quantization_config"] = rounding.settings(
        bits, group, HEAD_BITS if head else None, [*writing.plain, *_ROUTERS]
    )
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    for file in {file for pattern in FILES for file in source.glob(pattern)}:
        if file.suffix != ".safetensors" and file.name not in ("config.json", INDEX):
            shutil.copyfile(file, out / file.name)
    return Products(writing.count, writing.plain)


class _Writing:
    """The tensors of the new checkpoint, as they are made."""

    def __init__(self, reading: weights.StoredModel, files: TensorFiles, bits: int, group: int) -> None:
        self._spec: ModelSpec = reading.spec
        self._take = reading.through(files.read_tensor)
        self._expected = reading.expected
        self._bits, self._group = bits, group
        self._done = set[str]()
        self.tensors: dict[str, torch.Tensor] = {}
        self.plain: list[str] = []
        self.count = 0

    def layers(self) -> Iterator[LayerError]:
        for layer, matrices in groupby(weights.matrices(self._spec), itemgetter(0)):
            errors = [(name, self._round(self._spec.stored, name, shape, self._bits)) for _, name, shape in matrices]
            yield from _error(layer, errors)

    def head(self) -> Iterator[LayerError]:
        shape, stored = (self._spec.vocab_size, self._spec.hidden_size), self._spec.stored.head or WeightSpec()
        place = EMBEDDING.removesuffix(".weight") if self._spec.tied_embeddings else HEAD
        matrix = formats.read_matrix(stored, place, shape, self._take)
        return _error(None, [(HEAD, self._keep(HEAD, matrix, HEAD_BITS))])

    def others(self, head: bool) -> None:
        """Take over what is no product of a layer."""
        for name, shape in self._expected.items():
            if name not in self._done and not (head and name.startswith(f"{HEAD}.")):
                self.tensors[name] = self._take(name, shape, STORED)

    def _round(self, stored: WeightSpec, name: str, shape: Shape, bits: int) -> float | None:
        self._done |= formats.format_of(stored, name).stored(name, shape).keys()
        return self._keep(name, formats.read_matrix(stored, name, shape, self._take), bits)

    def _keep(self, name: str, matrix: torch.Tensor | AffineGroups, bits: int) -> float | None:
        """Round a matrix and return what was lost of it, or keep it if its inputs don't make whole groups."""
        self.count += 1
        dense = matrix.dense() if isinstance(matrix, AffineGroups) else matrix
        weight = weights.as_published(self._spec, dense)
        if weight.shape[1] % self._group:
            self.tensors[f"{name}.weight"] = weight.clone()
            self.plain.append(name)
            return None
        result = rounding.rounded(weight, bits, self._group, name)
        self.tensors |= rounding.stored(name, result.groups, weight.dtype)
        return result.error


class _Shards:
    """Files of a few GiB each, with an index if there are several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        shards: list[dict[str, torch.Tensor]] = [{}]
        size = 0
        for name, tensor in tensors.items():
            if size and size + tensor.nbytes > _SHARD_BYTES:
                shards.append({})
                size = 0
            shards[-1][name] = tensor.contiguous()
            size += tensor.nbytes
        names = [SINGLE] if len(shards) == 1 else [f"model-{n:05}.safetensors" for n in range(1, len(shards) + 1)]
        for file, shard in zip(names, shards, strict=True):
            save_file(shard, self._folder / file, {"format": "pt"})
        if len(shards) > 1:
            places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            (self._folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=2))


def _error(layer: int | None, errors: list[tuple[str, float | None]]) -> Iterator[LayerError]:
    lost = {name: error for name, error in errors if error is not None}
    if lost:
        worst = max(lost, key=lambda name: lost[name])
        yield LayerError(layer, sum(lost.values()) / len(lost), lost[worst], worst)
