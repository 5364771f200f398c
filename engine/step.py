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
    """The engine has run the plan: for each chunk the token drawn, or none where no draw was asked for.

    `more`: it went on for as many steps without asking what has come in meanwhile, each row feeding on its own last
    token, and this is what each of them drew. No more of them than the state said would be alike."""

    plan: ScheduledBatch
    sampled: Sequence[Sampled | None]
    more: Sequence[Sequence[Sampled]] = ()


class StepFailed(Struct, frozen=True):
    """The engine raised while running the plan."""

    plan: ScheduledBatch
    message: str
