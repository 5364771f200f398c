"""From the tensors of a checkpoint to the matrices the model multiplies with.

Three parties say how: the family where each tensor is, the weight format how it is stored, and the device's
`LinearMaker` how products are held. Owns what is fused: q, k and v into one product, gate and up into another. Loads
all or nothing: a tensor that is missing or misshapen raises CorruptWeights. `check` finds that without loading.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import torch

from engine.checkpoint import formats, rounding
from engine.checkpoint.formats.affine_groups import AffineGroups
from engine.checkpoint.formats.format import FLOATS, Shape, Take
from engine.checkpoint.safetensors_reader import STORED, TensorFiles
from engine.models.families import registry
from engine.models.linear import Dense, Grouped, Linear, LinearMaker, Weight, densified, stacked
from engine.spec import ExpertsSpec, ModelSpec, WeightSpec

log = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_UNUSED = ("rotary_emb.inv_freq", "position_ids")
"""Ends of names of tensors that older releases saved and that are computed."""
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens", "model.norm", "lm_head"

_Products: TypeAlias = Callable[[str], Weight]
"""Reads one product of a layer by what it is for: q, k, v, output, gate, up or down."""


@dataclass(frozen=True)
class KeyValueWeights:
    """What makes a layer's K and V from its input: all that a prefill worker has of the last layer."""

    input_norm: torch.Tensor  # [hidden]
    kv: Linear  # hidden → (2 · kv_heads) · head_dim: keys, then values
    k_norm: torch.Tensor | None  # [head_dim]


@dataclass(frozen=True)
class MlpWeights:
    """One MLP, or one expert."""

    gate_up: Linear  # hidden → 2 · inner: gate, then up; inner is the intermediate size, or more with zeros behind it
    down: Linear  # inner → hidden


@dataclass(frozen=True)
class StackedExperts:
    """The experts of a layer for a device, which alone knows how many rows each of them has."""

    gate_up: torch.Tensor  # [experts, 2 · inner, hidden]: gate, then up
    down: torch.Tensor  # [experts, hidden, inner]


@dataclass(frozen=True)
class ExpertsWeights:
    """A mixture of experts."""

    router: torch.Tensor  # [experts, hidden]
    experts: tuple[MlpWeights, ...] | StackedExperts


@dataclass(frozen=True)
class LayerWeights:
    """One whole layer. Norms are float32 where the family adds one to them, or in the model's dtype."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden → (heads + 2 · kv_heads) · head_dim: queries, keys, values
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]: one row for each head of q, then of k
    output: Linear  # heads · head_dim → hidden
    attention_output_norm: torch.Tensor | None  # [hidden]
    mlp_norm: torch.Tensor  # [hidden]
    mlp: MlpWeights | ExpertsWeights
    mlp_output_norm: torch.Tensor | None  # [hidden]


@dataclass(frozen=True)
class ModelWeights:
    """`layers` are whole; without a head, the last layer is only `last_kv`, and there are no norm and head."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    last_kv: KeyValueWeights | None
    norm: torch.Tensor | None  # [hidden]
    head: Linear | None  # hidden → vocab


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Weights in memory, with the digest of the checkpoint they came from."""

    weights: ModelWeights
    fingerprint: bytes


def load(
    path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, head: bool, maker: LinearMaker
) -> LoadedCheckpoint:
    """Read the checkpoint in `path`.

    Without `head`, what a prefill worker never uses is digested but not kept: final norm, output head, and of the last
    layer all but K and V. So the fingerprint is the same for both kinds of worker.
    Raises ModelNotFound or CorruptWeights.
    """
    with TensorFiles(path) as files:
        reading = as_stored(files, spec)
        for note in reading.notes:
            log.warning("%s", note)
        weights = assembled(reading.spec, dtype, device, head, maker, reading.through(files.read_tensor))
        if not head:
            _expect_all(files, reading, dtype, maker)
        for name in sorted(reading.expected.keys() - files.seen):
            files.read_tensor(name, reading.expected[name], STORED)
        return LoadedCheckpoint(weights, files.fingerprint(spec.canonical))


def check(path: Path, spec: ModelSpec, dtype: torch.dtype, maker: LinearMaker) -> tuple[ModelSpec, tuple[str, ...]]:
    """Check the checkpoint in `path` as `load` would, from the files' heads alone. Return the spec that the tensors
    fit, and what of them is odd and does no harm. Raises ModelNotFound or CorruptWeights."""
    with TensorFiles(path) as files:
        reading = as_stored(files, spec)
        _expect_all(files, reading, dtype, maker)
        return reading.spec, reading.notes


def outline(spec: ModelSpec, dtype: torch.dtype, head: bool, maker: LinearMaker) -> ModelWeights:
    """Return weights of the shapes and dtype that `load` would return, without memory of their own (device "meta")."""

    def nothing(name: str, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtypes[0], device="meta")

    return assembled(spec, dtype, torch.device("meta"), head, maker, nothing)


def assembled(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, head: bool, maker: LinearMaker, take: Take
) -> ModelWeights:
    """Return weights of the tensors that `take` gives for the names and shapes of a checkpoint."""
    return _Assembly(spec, maker, take, dtype, device).model(head)


def read_layer(spec: ModelSpec, maker: LinearMaker, take: Take, dtype: torch.dtype) -> LayerWeights:
    """Return the first layer of the tensors that `take` gives, for the CPU."""
    return _Assembly(spec, maker, take, dtype, torch.device("cpu")).layer(0)


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint with this config must hold."""
    tensors: dict[str, Shape] = {f"{_EMBEDDING}.weight": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        tensors |= _Tensors(spec, layer).stored()
    tensors[f"{_NORM}.weight"] = (spec.hidden_size,)
    if not spec.tied_embeddings:
        head = formats.format_of(spec.stored.head or WeightSpec(), _HEAD)
        tensors |= head.stored(_HEAD, (spec.vocab_size, spec.hidden_size))
    return tensors


def as_published(spec: ModelSpec, weight: torch.Tensor) -> torch.Tensor:
    """Return numbers in the dtype of the model. A checkpoint may hold them in float32."""
    return weight if spec.dtype is None or weight.dtype != torch.float32 else weight.to(TORCH_DTYPES[spec.dtype])


def matrices(spec: ModelSpec) -> Iterator[tuple[int, str, Shape]]:
    """Yield layer, name and shape of the products of all layers, experts included."""
    for layer in range(spec.num_layers):
        tensors = _Tensors(spec, layer)
        experts = range(tensors.experts.count if tensors.experts is not None else 0)
        for matrix in [*tensors.matrices, *(one for number in experts for one in tensors.expert(number))]:
            yield layer, matrix.name, (matrix.out_size, matrix.in_size)


@dataclass(frozen=True)
class StoredModel:
    """A spec as a checkpoint's tensors have it. `aliases`: under which name a tensor is stored, where not under its
    own; `notes`: what is odd, and read as transformers reads it."""

    spec: ModelSpec
    expected: Mapping[str, Shape]
    aliases: Mapping[str, str]
    notes: tuple[str, ...]

    def through(self, take: Take) -> Take:
        """Return `take` for the names of the spec."""
        return lambda name, shape, dtypes: take(self.aliases.get(name, name), shape, dtypes)


def as_stored(files: TensorFiles, spec: ModelSpec) -> StoredModel:
    """Compare a spec with the tensors that there are. Raises CorruptWeights.

    As with transformers, embedding and head are one only if the checkpoint does not store two that differ, either of
    them stands for both, and a tensor that no layer uses is left out.
    """
    embedding, head = f"{_EMBEDDING}.weight", f"{_HEAD}.weight"
    notes: list[str] = []
    aliases: dict[str, str] = {}
    if spec.tied_embeddings and head in files.names:
        shape = (spec.vocab_size, spec.hidden_size)
        if embedding not in files.names:
            aliases[embedding] = head
        elif not torch.equal(files.read_tensor(embedding, shape), files.read_tensor(head, shape)):
            spec = replace(spec, tied_embeddings=False)
            notes.append(
                f"tie_word_embeddings is true, and the checkpoint's {head} differs from {embedding}; both are used, as "
                "by transformers: set it to false in config.json"
            )
    expected = {aliases.get(name, name): shape for name, shape in expected_tensors(spec).items()}
    unused = sorted(name for name in files.names - expected.keys() - {head} if not name.endswith(_UNUSED))
    if unused:
        notes.append(
            f"{len(unused)} tensors of the checkpoint have no place in its config and are not used, such as {unused[0]}"
        )
    return StoredModel(spec, expected, aliases, tuple(notes))


def _expect_all(files: TensorFiles, reading: StoredModel, dtype: torch.dtype, maker: LinearMaker) -> None:
    """Check every tensor's shape and dtype without reading it. Raises CorruptWeights."""

    def take(name: str, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        files.expect(name, shape, dtypes)
        return torch.empty(shape, dtype=dtypes[0], device="meta")

    assembled(reading.spec, dtype, torch.device("meta"), True, maker, reading.through(take))


@dataclass(frozen=True)
class _Matrix:
    """A matrix of the checkpoint: the products whose rows it holds, one after another, and how many rows each has."""

    name: str
    rows: Mapping[str, int]
    in_size: int
    bias: bool

    @property
    def out_size(self) -> int:
        return sum(self.rows.values())


class _Tensors:
    """The tensors of one layer, by what they are for."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        self.spec = spec
        self.experts: ExpertsSpec | None = spec.layers[layer].experts
        self._names = registry.by_name(spec.family).tensors
        self._prefix = f"model.layers.{layer}."

    @property
    def matrices(self) -> list[_Matrix]:
        """The dense products of the layer, without those of experts."""
        spec = self.spec
        q, kv, inner = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.intermediate_size
        sizes = {
            "q": (q, spec.hidden_size, spec.qkv_bias),
            "k": (kv, spec.hidden_size, spec.qkv_bias),
            "v": (kv, spec.hidden_size, spec.qkv_bias),
            "output": (spec.hidden_size, q, spec.output_bias),
        }
        if self.experts is None:
            sizes |= {
                "gate": (inner, spec.hidden_size, spec.mlp_bias),
                "up": (inner, spec.hidden_size, spec.mlp_bias),
                "down": (spec.hidden_size, inner, spec.mlp_bias),
            }
        return [
            _Matrix(self._prefix + name, {one: sizes[one][0] for one in products}, *sizes[products[0]][1:])
            for products, name in self._names.products.items()
            if products[0] in sizes
        ]

    def expert(self, number: int) -> list[_Matrix]:
        assert self.experts is not None
        prefix = f"{self._prefix}{self._names.experts.format(number)}."
        hidden, inner = self.spec.hidden_size, self.experts.intermediate_size
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return [
            _Matrix(prefix + name, {one: rows}, columns, False)
            for name, (one, (rows, columns)) in zip(self._names.expert_products, sizes.items(), strict=True)
        ]

    @property
    def router(self) -> tuple[str, Shape]:
        assert self.experts is not None
        return f"{self._prefix}{self._names.router}.weight", (self.experts.count, self.spec.hidden_size)

    @property
    def norms(self) -> dict[str, tuple[str, Shape]]:
        """Name and shape by what each is for."""
        hidden = ["input_norm", "mlp_norm"]
        hidden += ["attention_output_norm", "mlp_output_norm"] if self.spec.output_norms else []
        shapes = dict.fromkeys(hidden, (self.spec.hidden_size,))
        shapes |= {one: (self.spec.head_dim,) for one in ("q_norm", "k_norm") if self.spec.qk_norm}
        return {one: (f"{self._prefix}{self._names.norms[one]}.weight", shape) for one, shape in shapes.items()}

    def stored(self) -> dict[str, Shape]:
        matrices, tensors = self.matrices, dict(self.norms.values())
        if self.experts is not None:
            matrices += [one for number in range(self.experts.count) for one in self.expert(number)]
            tensors |= [self.router]
        for matrix in matrices:
            stored = formats.format_of(self.spec.stored, matrix.name)
            tensors |= stored.stored(matrix.name, (matrix.out_size, matrix.in_size))
            if matrix.bias:
                tensors[f"{matrix.name}.bias"] = (matrix.out_size,)
        return tensors


class _Assembly:
    """Reads tensors and puts them together, for one device."""

    def __init__(
        self, spec: ModelSpec, maker: LinearMaker, take: Take, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec, self._maker, self._take = spec, maker, take
        self._dtype, self._device = dtype, device

    def model(self, head: bool) -> ModelWeights:
        spec = self._spec
        vocabulary = (spec.vocab_size, spec.hidden_size)
        embedding = self._read(f"{_EMBEDDING}.weight", vocabulary)
        last = spec.num_layers - 1
        layers = tuple(self.layer(layer) for layer in range(last + head))
        if not head:
            return ModelWeights(embedding, layers, self._key_value(last), None, None)
        if spec.tied_embeddings:
            output = Dense(embedding, None)
        else:
            output = self._matrix(
                spec.stored.head or WeightSpec(), _Matrix(_HEAD, {"": vocabulary[0]}, vocabulary[1], False)
            )
        norm = self._norm(f"{_NORM}.weight", (spec.hidden_size,))
        return ModelWeights(embedding, layers, None, norm, self._maker.linear(output))

    def layer(self, layer: int) -> LayerWeights:
        tensors, spec = _Tensors(self._spec, layer), self._spec
        products = self._products(tensors.matrices)
        norms = {one: self._norm(*place) for one, place in tensors.norms.items()}
        qk_norm = None
        if spec.qk_norm:
            q_norm = norms["q_norm"].expand(spec.num_heads, -1)
            qk_norm = torch.cat((q_norm, norms["k_norm"].expand(spec.num_kv_heads, -1)))
        return LayerWeights(
            input_norm=norms["input_norm"],
            qkv=self._maker.linear(stacked([products(one) for one in ("q", "k", "v")])),
            qk_norm=qk_norm,
            output=self._maker.linear(products("output")),
            attention_output_norm=norms.get("attention_output_norm"),
            mlp_norm=norms["mlp_norm"],
            mlp=self._mlp(products) if tensors.experts is None else self._experts(tensors),
            mlp_output_norm=norms.get("mlp_output_norm"),
        )

    def _key_value(self, layer: int) -> KeyValueWeights:
        tensors = _Tensors(self._spec, layer)
        products, norms = self._products(tensors.matrices), tensors.norms
        return KeyValueWeights(
            input_norm=self._norm(*norms["input_norm"]),
            kv=self._maker.linear(stacked([products("k"), products("v")])),
            k_norm=self._norm(*norms["k_norm"]) if self._spec.qk_norm else None,
        )

    def _mlp(self, products: _Products) -> MlpWeights:
        return MlpWeights(*self._maker.mlp(products("gate"), products("up"), products("down")))

    def _experts(self, tensors: _Tensors) -> ExpertsWeights:
        assert tensors.experts is not None
        each = (self._products(tensors.expert(number)) for number in range(tensors.experts.count))
        if self._maker.stacks_experts:
            experts = self._stacked(tensors.experts, each)
        else:
            experts = tuple(self._mlp(products) for products in each)
        return ExpertsWeights(self._read(*tensors.router), experts)

    def _stacked(self, experts: ExpertsSpec, each: Iterable[_Products]) -> StackedExperts:
        """One expert after the other is read and copied, so that none is there twice but the one being read."""
        hidden, inner = self._spec.hidden_size, experts.intermediate_size
        gate_up = torch.empty((experts.count, 2 * inner, hidden), dtype=self._dtype, device=self._device)
        down = torch.empty((experts.count, hidden, inner), dtype=self._dtype, device=self._device)
        for number, products in enumerate(each):
            gate_up[number, :inner] = densified(products("gate")).weight
            gate_up[number, inner:] = densified(products("up")).weight
            down[number] = densified(products("down")).weight
        return StackedExperts(gate_up, down)

    def _products(self, matrices: list[_Matrix]) -> _Products:
        """How one of the layer's products is read. A matrix that holds several is read once for those that follow one
        another."""

        @lru_cache(maxsize=1)
        def read_weight(matrix_name: str) -> Weight:
            return self._matrix(self._spec.stored, next(one for one in matrices if one.name == matrix_name))

        def product(one: str) -> Weight:
            matrix = next(each for each in matrices if one in each.rows)
            whole = read_weight(matrix.name)
            if len(matrix.rows) == 1:
                read_weight.cache_clear()  # nothing else is read from it: it must not outlive its use
                return whole
            before = list(matrix.rows)
            first = sum(matrix.rows[each] for each in before[: before.index(one)])
            return whole.rows(slice(first, first + matrix.rows[one]))

        return product

    def _matrix(self, stored: WeightSpec, matrix: _Matrix) -> Weight:
        weight = formats.read_matrix(stored, matrix.name, (matrix.out_size, matrix.in_size), self._take)
        bias = self._read(f"{matrix.name}.bias", (matrix.out_size,)) if matrix.bias else None
        if self._maker.bits and not isinstance(weight, AffineGroups) and matrix.name != _HEAD:
            weight = as_published(self._spec, weight)
            if matrix.in_size % rounding.GROUP == 0:
                weight = rounding.grouped(weight, self._maker.bits, rounding.GROUP, matrix.name)
        if not isinstance(weight, AffineGroups):
            return Dense(self._moved(weight), bias)
        if self._maker.keeps(weight, self._dtype):
            return Grouped(weight, bias, self._dtype)
        return Dense(self._moved(weight.dense()), bias)

    def _read(self, name: str, shape: Shape) -> torch.Tensor:
        return self._moved(self._take(name, shape, FLOATS))

    def _norm(self, name: str, shape: Shape) -> torch.Tensor:
        """In float32 where one is added: rounded to fewer bits, the sum would lose what the weight says."""
        weight = self._take(name, shape, FLOATS)
        if self._spec.norms_add_one:
            return (weight.float() + 1.0).to(self._device)
        return self._moved(weight)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        # A copy even where nothing changes: the file's mapping must not outlive the loading.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)
