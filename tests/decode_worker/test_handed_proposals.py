"""Proposals that come with a step's tokens go on from the last of these, and change no token."""

import random
from collections.abc import Sequence
from typing import Any

from baton.config import DecodeConfig
from decode_worker.handed_proposals import HandedProposals
from decode_worker.scheduler import DecodeScheduler
from engine.step.batch import Chunk
from engine.step.outcome import ScheduledBatch, StepFailed
from kvstore.client.transfer import StoreUp
from tests.decode_worker.test_speculation import EVERY_SHARE, FREE_ROWS, has_the_tokens_without
from tests.decode_worker.test_state import PROMPT, order
from tests.support.workers_and_stores import PAGE, PAGE_BYTES, VOCAB, Rig, RigWorker, next_token

GUESSES = 4


class Drafting:
    """A runner's own draft, wrong in a share of its guesses."""

    def __init__(self, share: float) -> None:
        self.last: dict[int, list[int]] = {}  # after the last step
        self._rng, self._share = random.Random(2), share

    def after(self, known: Sequence[int], chunk: Chunk) -> list[int]:
        tokens = [*known[: chunk.start], *chunk.tokens][: chunk.known]
        for proposal in (*chunk.proposals, None):
            tokens.append(next_token(tokens))
            if tokens[-1] != proposal:
                break
        for _ in range(GUESSES):
            tokens.append(next_token(tokens) if self._rng.random() < self._share else self._rng.randrange(VOCAB))
        return tokens[-GUESSES:]


def worker(drafting: Drafting, **more: Any) -> RigWorker:
    one = Rig(64).worker("decode", 64, DecodeConfig())
    drafter = HandedProposals(lambda: drafting.last)
    one.state = DecodeScheduler(DecodeConfig(), PAGE, 64, calibration=FREE_ROWS, drafter=drafter, **more)
    run = one.run_step

    def noted(plan: ScheduledBatch) -> Any:
        both = enumerate(zip(one.tokens_of(plan), plan.values(), strict=True))
        drafting.last = {number: drafting.after(*each) for number, each in both if each[1].sample is not None}
        return run(plan)

    one.run_step = noted  # type: ignore[method-assign]
    one.handle(StoreUp(64, PAGE_BYTES))
    return one


@EVERY_SHARE
def test_tokens_are_those_without(share: float, verify_all: bool) -> None:
    has_the_tokens_without(worker(Drafting(share), verify_all=verify_all), share, 20 if share else 4)


def test_after_a_step_that_fails_there_are_none() -> None:
    one = worker(Drafting(1.0), verify_all=True)
    for request in ("first", "second"):
        one.handle(order(PROMPT, 20, request))
    for _ in range(2):
        one.step()
    one.state.prepare(0.0)
    plan = one.state.schedule(0.0)
    assert all(chunk.verify for chunk in plan.values())
    one.handle(StepFailed({name: chunk for name, chunk in plan.items() if name.request == "second"}, "boom"))
    one.state.prepare(0.0)
    assert [len(chunk.verify) for chunk in one.state.schedule(0.0).values()] == [0]
