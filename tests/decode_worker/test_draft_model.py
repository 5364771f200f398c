"""A draft model guesses where its pages hold what they should, and changes no token."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from baton import messages as msg
from baton.config import DecodeConfig
from baton.messages import StepSample
from decode_worker.draft_model import DraftModel
from decode_worker.proposers import NgramProposer
from decode_worker.scheduler import DecodeScheduler
from engine.step.batch import Chunk, Sampled
from kvstore.client.transfer import StoreUp
from tests.decode_worker.test_scheduler_decisions import PROMPT, finishes, order, tokens_of
from tests.decode_worker.test_speculation import (
    DEAR_ROWS,
    EVERY_SHARE,
    FREE_ROWS,
    has_the_tokens_without,
    plans_of,
    steps_of,
)
from tests.support.workers_and_stores import PAGE, PAGE_BYTES, VOCAB, Rig, RigWorker, next_token, reference

CONTEXT = 1_000
DEAR_DRAFT = [StepSample(0, 0, rows, rows * 20, 1.0) for rows in (1, 2, 4)]
CHEAP_DRAFT = [
    StepSample(0, 0, rows, rows * context, 0.001) for rows in (1, 2, 4) for context in (2, 40)
] + [StepSample(tokens, tokens * tokens // 2, 0, 0, 0.001) for tokens in (4, 16, 64)]  # fmt: skip


class Draft:
    """The reference model, wrong in a share of its draws. It reads what comes before a chunk from its pages."""

    def __init__(self, share: float) -> None:
        self._rng, self._share = random.Random(2), share
        self._tokens: dict[tuple[int, int], int] = {}  # by page and offset
        self.steps: list[list[Chunk]] = []

    def run(self, chunks: Sequence[Chunk]) -> tuple[Sequence[Sampled | None], float]:
        self.steps.append(list(chunks))
        return [self._draw(chunk) for chunk in chunks], 0.0

    def _draw(self, chunk: Chunk) -> Sampled | None:
        for at, token in enumerate(chunk.tokens, chunk.start):
            self._tokens[chunk.pages[at // PAGE], at % PAGE] = token
        if chunk.sample is None:
            return None
        known = [self._tokens[chunk.pages[at // PAGE], at % PAGE] for at in range(chunk.end)]
        return Sampled(next_token(known) if self._rng.random() < self._share else self._rng.randrange(VOCAB))


def worker(
    draft: Draft,
    pages: int = 64,
    steps: Sequence[StepSample] = FREE_ROWS,
    calibration: Sequence[StepSample] = CHEAP_DRAFT,
    **more: Any,
) -> RigWorker:
    """A decode worker with that draft model, which has so many pages."""
    one = Rig(64).worker("decode", 64, DecodeConfig())
    model = DraftModel(draft.run, pages, PAGE, CONTEXT, calibration)
    one.state = DecodeScheduler(DecodeConfig(), PAGE, 64, calibration=steps, drafter=model, **more)
    one.handle(StoreUp(64, PAGE_BYTES))
    return one


@EVERY_SHARE
def test_tokens_are_those_without(share: float, verify_all: bool) -> None:
    has_the_tokens_without(worker(Draft(share), verify_all=verify_all), share, 20)


def test_all_sequences_of_a_step_are_drafted_for_together() -> None:
    draft = Draft(1.0)
    one = worker(draft, verify_all=True)
    for number in range(4):
        one.handle(order(PROMPT, 40, f"r{number}"))
    plans = plans_of(one)
    one.rig.settle()
    for number in range(4):
        assert tokens_of(one.messages, f"r{number}") == reference(PROMPT, 40)
    assert sum(any(chunk.verify for chunk in plan) for plan in plans) * 4 >= len(draft.steps)
    assert max(map(len, draft.steps)) == 4


def test_a_pool_without_room_leaves_sequences_without_guesses() -> None:
    """Each needs 4 pages in the end, and two have room."""
    draft = Draft(1.0)
    one = worker(draft, pages=9, verify_all=True)
    for number in range(5):
        one.handle(order(PROMPT, 20, f"r{number}"))
    one.rig.settle()
    for number in range(5):
        assert tokens_of(one.messages, f"r{number}") == reference(PROMPT, 20)
    stats = one.state.stats().speculation
    assert 0 < stats.accepted_tokens == stats.draft_tokens


def test_pages_of_sequences_that_ended_are_lent_again() -> None:
    draft = Draft(1.0)
    one = worker(draft, pages=9)
    for number in range(6):
        steps = steps_of(one, 20, request=f"r{number}") if number else steps_of(one, 20)
        assert steps < 10, "it is not drafted for"
        one.messages.clear()


def test_a_long_prompt_is_computed_in_parts() -> None:
    """With costs that say nothing of prompts, a step of the draft model has at most so many tokens."""
    draft, prompt = Draft(1.0), [number % VOCAB for number in range(200)]
    one = worker(draft, verify_all=True)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("decode_worker.draft_model._CATCH_UP", 64)
        one.handle(order(prompt, 20))
        one.rig.settle()
    assert tokens_of(one.messages) == reference(prompt, 20)
    assert max(len(chunk.tokens) for step in draft.steps for chunk in step) == 64
    stats = one.state.stats().speculation
    assert 0 < stats.accepted_tokens == stats.draft_tokens


def test_guesses_that_cost_more_than_they_bring_are_not_made() -> None:
    for steps, calibration in ((FREE_ROWS, DEAR_DRAFT), (DEAR_ROWS, CHEAP_DRAFT)):
        draft = Draft(1.0)
        one = worker(draft, steps=steps, calibration=calibration)
        assert steps_of(one, 40) > 35
        assert one.state.stats().speculation.drafts <= 1, "more than a trial"
    wrong = Draft(0.0)
    half = [StepSample(0, 0, rows, rows * context, 0.01 + 0.002 * rows) for rows in (1, 2, 4) for context in (2, 40)]
    one = worker(wrong, steps=half)
    steps_of(one, 200)
    assert 0 < one.state.stats().speculation.drafts < 60, "it goes on with guesses that are always wrong"


def test_a_proposer_guesses_first() -> None:
    draft = Draft(1.0)
    one = worker(draft, proposer=NgramProposer)
    steps_of(one, 60)
    assert finishes(one.messages) == ["length"]
    assert tokens_of(one.messages) == reference(PROMPT, 60)
    assert draft.steps
    last = [delta for m in one.messages if isinstance(m, msg.Tokens) for delta in m.deltas][-1]
    assert last.accepted > 30


def test_a_context_beyond_the_draft_models_gets_no_guesses() -> None:
    draft = Draft(1.0)
    one = Rig(64).worker("decode", 64, DecodeConfig())
    model = DraftModel(draft.run, 64, PAGE, len(PROMPT) + 10)
    one.state = DecodeScheduler(DecodeConfig(), PAGE, 64, drafter=model, verify_all=True)
    one.handle(StoreUp(64, PAGE_BYTES))
    steps_of(one, 40)
    assert tokens_of(one.messages) == reference(PROMPT, 40)
    assert max(chunk.end for step in draft.steps for chunk in step) <= len(PROMPT) + 10
