"""Proposals that come with a step's tokens go on from the last of these, and change no token."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from baton.config import DecodeConfig
from baton.messages import StepSample
from decode_worker.handed_proposals import HandedProposals
from decode_worker.scheduler import DecodeScheduler
from engine.step.batch import Chunk
from engine.step.outcome import ScheduledBatch, StepFailed
from kvstore.client.transfer import StoreUp
from tests.decode_worker.test_scheduler_decisions import PROMPT, order, tokens_of
from tests.decode_worker.test_speculation import DEAR_ROWS, EVERY_SHARE, FREE_ROWS, has_the_tokens_without, steps_of
from tests.support.workers_and_stores import PAGE, PAGE_BYTES, VOCAB, Rig, RigWorker, next_token, reference

GUESSES = 5


class Drafting:
    """A runner's own draft, wrong in a share of its guesses."""

    def __init__(self, share: float, guess_seconds: float = 0.0) -> None:
        self.proposals: dict[int, list[int]] = {}  # after the last step
        self.guesses, self.guess_seconds = 0, 0.0
        self.counts: list[int] = []  # of guesses after each row of each step
        self.each = guess_seconds
        self._rng, self._share = random.Random(2), share

    def after(self, known: Sequence[int], chunk: Chunk) -> list[int]:
        tokens = [*known[: chunk.start], *chunk.tokens][: chunk.known]
        for proposal in (*chunk.proposals, None):
            tokens.append(next_token(tokens))
            if tokens[-1] != proposal:
                break
        end = len(tokens)
        for _ in range(min(self.guesses, GUESSES)):
            tokens.append(next_token(tokens) if self._rng.random() < self._share else self._rng.randrange(VOCAB))
        return tokens[end:]

    def note(self, known: Sequence[Sequence[int]], plan: ScheduledBatch) -> None:
        both = enumerate(zip(known, plan.values(), strict=True))
        self.proposals = {number: self.after(*each) for number, each in both if each[1].sample is not None}
        self.counts.append(max(map(len, self.proposals.values()), default=0))
        self.guess_seconds = self.counts[-1] * self.each


def worker(drafting: Drafting, rows: Sequence[StepSample] = FREE_ROWS, **more: Any) -> RigWorker:
    one = Rig(64).worker("decode", 64, DecodeConfig())
    drafter = HandedProposals(drafting, GUESSES)
    one.state = DecodeScheduler(DecodeConfig(), PAGE, 64, calibration=rows, drafter=drafter, **more)
    run = one.run_step

    def noted(plan: ScheduledBatch) -> Any:
        drafting.note(one.tokens_of(plan), plan)
        return run(plan)

    one.run_step = noted  # type: ignore[method-assign]
    one.handle(StoreUp(64, PAGE_BYTES))
    return one


@EVERY_SHARE
def test_tokens_are_those_without(share: float, verify_all: bool) -> None:
    has_the_tokens_without(worker(Drafting(share), verify_all=verify_all), share, 20 if share else 4)


@pytest.mark.parametrize(
    ("share", "seconds", "rows"), [(1.0, 0.0, DEAR_ROWS), (0.6, 0.02, FREE_ROWS), (0.0, 0.002, FREE_ROWS)]
)
def test_where_guesses_do_not_pay_hardly_any_are_made(share: float, seconds: float, rows: Sequence[StepSample]) -> None:
    """Since their rows are too dear, or the guesses themselves, or they are wrong."""
    drafting = Drafting(share, seconds)
    one = worker(drafting, rows)
    assert steps_of(one, 120) > 80
    assert tokens_of(one.messages) == reference(PROMPT, 120)
    assert sum(drafting.counts[40:]) <= 8
    assert one.state.stats().speculation.draft_tokens == sum(drafting.counts), "some were made in vain"


def test_after_a_step_that_fails_there_are_none() -> None:
    one = worker(Drafting(1.0), verify_all=True)
    for request in ("first", "second"):
        one.handle(order(PROMPT, 20, request))
    for _ in range(2):
        one.step()
    one.state.prepare(0.0)
    plan = one.state.schedule(0.0)
    assert [len(chunk.verify) for chunk in plan.values()] == [GUESSES, GUESSES]
    one.handle(StepFailed({name: chunk for name, chunk in plan.items() if name.request == "second"}, "boom"))
    one.state.prepare(0.0)
    assert [len(chunk.verify) for chunk in one.state.schedule(0.0).values()] == [0]
