"""Heads go on from the rows of the last step, and change no token."""

import random
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest

from baton.config import DecodeConfig
from baton.messages import StepSample
from decode_worker.heads import HeadsDrafter
from decode_worker.scheduler import DecodeScheduler
from engine.step.batch import DrawnRows, HiddenRow
from engine.step.outcome import ScheduledBatch, StepFailed
from kvstore.client.transfer import StoreUp
from tests.decode_worker.load import OnePageEach
from tests.decode_worker.test_scheduler_decisions import PROMPT, order, tokens_of
from tests.decode_worker.test_speculation import DEAR_ROWS, EVERY_SHARE, FREE_ROWS, has_the_tokens_without, steps_of
from tests.support.workers_and_stores import PAGE, PAGE_BYTES, VOCAB, Rig, RigWorker, next_token, reference

HEADS = 4


class States:
    """The states of a worker's last step, and heads that are wrong in a share of their guesses."""

    def __init__(self, share: float, seconds: float) -> None:
        self.rows: list[list[int]] = []  # the tokens that each draw of the last step has seen
        self.names: list[Hashable] = []
        self.drafter: HeadsDrafter
        self.guesses = 0
        self._rng, self._share, self.seconds = random.Random(2), share, seconds

    def run(self, rows: Sequence[HiddenRow], count: int) -> tuple[list[list[int]], float]:
        if not self.rows:  # how long it takes is measured before the first step
            return [[0] * count] * len(rows), self.seconds * count
        self.guesses += len(rows)
        return [self._guess(row, count) for row in rows], self.seconds * count

    def keep(self, drawn: Sequence[DrawnRows]) -> None:
        """What counts of the last step: each row has seen what comes before its token."""
        self.names = [each.name for each in drawn]
        for each in drawn:
            before = self.rows[each.row]
            assert len(before) == each.position
            for at in range(len(each.tokens)):
                assert self.rows[each.row + at] == [*before, *each.tokens[:at]]

    def _guess(self, row: HiddenRow, count: int) -> list[int]:
        assert row.name in self.names
        known = [*self.rows[row.row], row.token]
        assert row.position == len(known)
        for _ in range(count):
            known.append(next_token(known) if self._rng.random() < self._share else self._rng.randrange(VOCAB))
        return known[-count:]


def worker(
    states: States, pages: int = 64, steps: Sequence[StepSample] = FREE_ROWS, *, verify_all: bool = False
) -> RigWorker:
    """A decode worker with heads, whose steps leave their states there."""
    one = Rig(64).worker("decode", pages, DecodeConfig())
    states.drafter = HeadsDrafter(states.run, HEADS, states.keep)
    one.state = DecodeScheduler(
        DecodeConfig(), PAGE, pages, growth_reserve=OnePageEach(), calibration=steps, drafter=states.drafter,
        verify_all=verify_all,
    )  # fmt: skip
    run = one.run_step

    def noted(plan: ScheduledBatch) -> Any:
        states.rows = [seen for each in zip(one.tokens_of(plan), plan.values(), strict=True) for seen in seen_by(*each)]
        return run(plan)

    one.run_step = noted  # type: ignore[method-assign]
    one.handle(StoreUp(64, PAGE_BYTES))
    return one


def seen_by(known: Sequence[int], chunk: Any) -> Iterator[list[int]]:
    for position, _ in chunk.draws:
        yield [*known[: chunk.start], *chunk.tokens][:position]


@EVERY_SHARE
def test_tokens_are_those_without(share: float, verify_all: bool) -> None:
    has_the_tokens_without(worker(States(share, 1e-4), verify_all=verify_all), share, 20 if share else 4)


def test_a_sequence_that_is_preempted_goes_on_with_the_same_tokens() -> None:
    """Each needs 16 pages in the end, and one has room."""
    states = States(0.8, 1e-4)
    one = worker(states, pages=24, verify_all=True)
    prompts = [[number, *PROMPT] for number in range(4)]
    for number, prompt in enumerate(prompts):
        one.handle(order(prompt, 50, f"r{number}"))
    one.rig.settle()
    for number, prompt in enumerate(prompts):
        assert tokens_of(one.messages, f"r{number}") == reference(prompt, 50)
    assert one.state.stats().preemptions > 0
    stats = one.state.stats().speculation
    assert stats.accepted_tokens > stats.draft_tokens / 3


def test_after_a_step_that_fails_no_state_is_taken_for_another() -> None:
    states = States(1.0, 1e-4)
    one = worker(states, verify_all=True)
    for request in ("first", "second"):
        one.handle(order(PROMPT, 20, request))
    for _ in range(2):
        one.step()
    one.state.prepare(0.0)
    plan = one.state.schedule(0.0)
    before = states.guesses
    one.handle(StepFailed({name: chunk for name, chunk in plan.items() if name.request == "second"}, "boom"))
    assert not states.names
    one.state.prepare(0.0)
    assert [name.request for name in one.state.schedule(0.0)] == ["first"]
    assert states.guesses == before > 0


def test_what_heads_take_in_steps_is_learned_from_the_first_ones() -> None:
    """Measured in a loop of their own they take a third of that."""
    states = States(1.0, 1e-4)
    one = worker(states, verify_all=True)
    states.seconds *= 3
    assert steps_of(one, 8) < 8
    assert states.drafter.seconds(HEADS, 1, 0) == pytest.approx(HEADS * states.seconds)


def test_heads_that_cost_more_than_they_bring_are_not_run() -> None:
    for seconds, steps in ((1.0, FREE_ROWS), (1e-4, DEAR_ROWS)):
        states = States(1.0, seconds)
        one = worker(states, steps=steps)
        assert steps_of(one, 40) > 35
        assert one.state.stats().speculation.drafts <= 1, "more than a trial"
