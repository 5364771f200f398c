"""A step of the engine as a worker's state sees it: what it plans, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from baton.messages import AttemptName
from engine.batch import Chunk, Sampled

ScheduledBatch: TypeAlias = dict[AttemptName, Chunk]
"""One chunk for each attempt in the step, in the order in which they are run."""


class StepDone(Struct, frozen=True):
    """The engine has run the plan: for each chunk the token drawn, or none where no draw was asked for."""

    plan: ScheduledBatch
    sampled: Sequence[Sampled | None]


class StepFailed(Struct, frozen=True):
    """The engine raised while running the plan."""

    plan: ScheduledBatch
    message: str
