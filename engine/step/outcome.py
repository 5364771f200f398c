"""A step of the engine as a worker's state sees it: what it plans, and what came of it."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from baton.messages import AttemptName, PromptTokenLogprob
from engine.step.batch import Chunk, Sampled

ScheduledBatch: TypeAlias = dict[AttemptName, Chunk]
"""One chunk for each attempt in the step, in the order in which they are run."""


class StepLaunched(Struct, frozen=True):
    """The plan runs. Another step may be planned before this one ends."""

    plan: ScheduledBatch


class StepDone(Struct, frozen=True):
    """The engine has run the plan: for each chunk the token drawn, or none where no draw was asked for. `scores` has
    the prompt tokens that were scored, `verified` those drawn by `Chunk.verify`, and `weights` what observed tokens
    attend to, [tokens][pages], by number of the chunk. `seconds` is what the step took by the device's clock; none: all
    the time since it was planned."""

    plan: ScheduledBatch
    sampled: Sequence[Sampled | None]
    scores: Mapping[int, Sequence[PromptTokenLogprob]] = {}
    seconds: float | None = None
    verified: Mapping[int, Sequence[Sampled | None]] = {}
    weights: Mapping[int, Sequence[Sequence[float]]] = {}


class StepOutOfMemory(Struct, frozen=True):
    """The step did not fit into the device's memory. It has drawn nothing, and no page that it wrote counts. So each of
    its chunks may be run again."""

    plan: ScheduledBatch
    message: str


class StepFailed(Struct, frozen=True):
    """The engine raised while running the plan."""

    plan: ScheduledBatch
    message: str
