"""Durations, read from a file: steps of the engine, copies, messages, page transfers between nodes and disks.

    a step = (fixed + token · prompt tokens + pair · pairs + row · rows + context · tokens of the rows + mixed) · noise

The terms are those of `baton.step_cost_model`. The files in `models/` derive their figures from hardware data sheets,
or say how they were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import yaml
from msgspec import Meta, Struct, structs

from baton.config import Config, ModelConfig, load
from baton.errors import ConfigError
from baton.messages import StepSample
from engine.step.batch import Chunk
from engine.vllm_runner.pages import FP8
from kvstore.layout import CODES, PageLayout
from router.placement.step_costs import DecodeCost, PrefillCost, pairs

MODELS = Path(__file__).parent / "models"

_CALIBRATION = ((64, 0), (256, 0), (1_024, 0), (0, 1), (0, 8))  # prompt tokens, rows
_CALIBRATION_CONTEXT = 128  # tokens of each row

_FORMAT = "bfloat16"  # of the figures in a file
_BITS = {"": 16, "int8": 8, "int4": 4, "fp8": 8}  # of a weight, by `model.quantization`; scales are left out

_Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
_Rate: TypeAlias = Annotated[float, Meta(gt=0)]  # bytes per second


class StepTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of a step, in seconds."""

    fixed: Annotated[float, Meta(gt=0)]
    token: _Seconds  # per prompt token
    pair: _Seconds  # per prompt token and position that it attends to, itself included
    row: _Seconds  # per decoding sequence, which gets one token
    context: _Seconds  # per token of context of those sequences
    mixed: _Seconds = 0.0  # additional, in a step that has both


class DiskTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """One node's disk."""

    read: _Rate
    write: _Rate
    latency: _Seconds
    max_bytes: str = "1TiB"


class FrontTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """A router's front, which reads one request after another, in seconds."""

    request: _Seconds
    token: _Seconds  # per prompt token: parsing and tokenizing


class FormatTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """What other formats of weights and pages save of a step's times, which are those of bfloat16."""

    weights: _Seconds  # of `fixed`: reading them
    context: Annotated[float, Meta(ge=0, le=1)]  # the part of `context` that is reading K and V
    head_dim: Annotated[int, Meta(ge=2)]


@dataclass(frozen=True)
class EqualCosts:
    """What work costs where all workers are alike: `router.placement.worker_table.CostModels`."""

    prefill_cost: PrefillCost
    step_cost: DecodeCost

    def prefill(self, incarnation: str) -> PrefillCost:
        return self.prefill_cost

    def step(self, incarnation: str) -> DecodeCost:
        return self.step_cost


class ModelTiming(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of worker and its node. Bandwidths are in bytes per second, latencies in seconds."""

    about: str  # source of the figures
    token_bytes: Annotated[int, Meta(ge=1)]  # of keys and values, all layers
    max_context: Annotated[int, Meta(ge=1)]
    kv_cache_bytes: str  # device pages of a worker
    host_cache_bytes: str  # of a node's store
    prefill: StepTimes  # of a prefill worker
    decode: StepTimes  # of a decode worker, which may compute prompts, too
    copy: _Rate  # between a worker's device and the arena
    network: _Rate  # of a node, each way
    network_latency: _Seconds
    message: _Seconds  # between a router and a worker or store, one way
    call: _Seconds  # between a worker and its node's store, one way
    start: _Seconds  # from the start of a process to its Hello
    turn: _Seconds = 0.0  # of an iteration of a worker's loop, besides its step
    noise: Annotated[float, Meta(ge=0)] = 0.0  # sigma of the logarithm of a step's time
    disk: DiskTimes | None = None
    front: FrontTimes | None = None  # nothing: it takes no time
    gpus: Annotated[int, Meta(ge=1)] = 1  # per worker
    formats: FormatTimes | None = None
    layers: Annotated[int, Meta(ge=1)] | None = None  # handed on between prefill workers; nothing: no rings
    config: Mapping[str, object] = {}  # settings of `baton.config` that suit such workers

    @property
    def costs(self) -> EqualCosts:
        """The exact costs, for policies that may know them."""
        return EqualCosts(
            PrefillCost(self.prefill.fixed, self.prefill.token, self.prefill.pair),
            DecodeCost(self.decode.fixed, self.decode.row, self.decode.context),
        )

    def configuration(self, page_size: int, overrides: Mapping[str, object]) -> Config:
        """Return the configuration of a cluster of such workers. Raises ConfigError."""
        own: dict[str, object] = {
            "pages.page_size": page_size,
            "prefill.kv_cache_bytes": self.kv_cache_bytes,
            "decode.kv_cache_bytes": self.kv_cache_bytes,
            "store.host_cache_bytes": self.host_cache_bytes,
        }
        if self.disk is not None:
            own |= {"disk.path": "simulated", "disk.max_bytes": self.disk.max_bytes}
        config = load(None, {**own, **self.config, **overrides})
        if config.disk.path and self.disk is None:
            raise ConfigError(
                f"disk.path is {config.disk.path!r}, but this model has no times of a disk; add `disk:` with read, "
                "write and latency to its file"
            )
        return config

    def in_formats(self, model: ModelConfig) -> ModelTiming:
        """Return the times with the weights and pages that a configuration asks for: fewer bytes are read, copied and
        sent, and as many hold more tokens. Raises ConfigError for a format without figures."""
        pages = CODES.get(model.kv_cache_dtype) or FP8.get(model.kv_cache_dtype, model.kv_cache_dtype)
        if not model.quantization and pages in ("auto", _FORMAT):
            return self
        if self.formats is None:
            raise ConfigError(
                "this timing model has no figures of other formats: leave out model.quantization and "
                "model.kv_cache_dtype, or add `formats:` with weights, context and head_dim to its file"
            )
        if model.quantization not in _BITS:
            raise ConfigError(
                f"model.quantization is {model.quantization}, and only {', '.join(filter(None, _BITS))} are simulated"
            )
        plain = PageLayout(1, 1, self.formats.head_dim, 1, _FORMAT)
        held = plain if pages == "auto" else replace(plain, dtype=pages)
        share = held.token_bytes / plain.token_bytes
        saved = self.formats.weights * (1 - _BITS[model.quantization] / _BITS[""])
        slope = 1 - self.formats.context * (1 - share)

        def times(step: StepTimes) -> StepTimes:
            return structs.replace(step, fixed=step.fixed - saved, context=step.context * slope)

        return structs.replace(
            self, token_bytes=round(self.token_bytes * share), prefill=times(self.prefill), decode=times(self.decode)
        )


class StepWork(Struct, frozen=True):
    """The work of a step."""

    tokens: int
    pairs: int
    rows: int
    context: int

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> StepWork:
        tokens = attended = rows = context = 0
        for chunk in chunks:
            count = len(chunk.tokens)
            if count == 1:
                rows += 1
                context += chunk.end
            else:
                tokens += count
                attended += pairs(count, chunk.start)
        return cls(tokens, attended, rows, context)

    def seconds(self, times: StepTimes) -> float:
        both = times.mixed if self.tokens and self.rows else 0.0
        prompts = times.token * self.tokens + times.pair * self.pairs
        return times.fixed + prompts + times.row * self.rows + times.context * self.context + both

    def sample(self, times: StepTimes) -> StepSample:
        """Return the work and its duration, as a worker reports it."""
        return StepSample(self.tokens, self.pairs, self.rows, self.context, self.seconds(times))


def calibration(times: StepTimes) -> tuple[StepSample, ...]:
    """Return the samples of the steps that a worker runs while it starts."""
    works = [StepWork(tokens, pairs(tokens), rows, rows * _CALIBRATION_CONTEXT) for tokens, rows in _CALIBRATION]
    return tuple(work.sample(times) for work in works)


class Noise:
    """Factors around 1, drawn from a seed; `slowness` makes one worker slower than the others."""

    def __init__(self, sigma: float, seed: tuple[int, ...]) -> None:
        self._sigma = sigma
        self._rng = np.random.default_rng(seed)
        self._drawn: list[float] = []
        self.slowness = 1.0

    def draw(self) -> float:
        if not self._sigma:
            return self.slowness
        if not self._drawn:
            mean = -self._sigma * self._sigma / 2
            self._drawn = np.exp(self._rng.normal(mean, self._sigma, 1_024)).tolist()
        return self._drawn.pop() * self.slowness


def read_timing(name: str) -> ModelTiming:
    """Read a timing model, given a file's path or a name in `models/`. Raises ConfigError."""
    path = Path(name) if name.endswith(".yaml") else MODELS / f"{name}.yaml"
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=ModelTiming, strict=False)  # YAML 1.1 takes 87e9 for text
    except OSError as error:
        known = ", ".join(sorted(each.stem for each in MODELS.glob("*.yaml")))
        raise ConfigError(f"can't read {path}: {error.strerror}; there are {known}") from None
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
