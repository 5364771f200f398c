"""Proposals change no token, and are made where they are worth their rows."""

import random
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from baton import messages as msg
from baton.config import DecodeConfig
from baton.messages import LogitsRules, SamplingParams, StepSample
from decode_worker.proposers import NgramProposer
from decode_worker.scheduler import DecodeScheduler
from engine.sampling.logits_rules import LogitsEditor
from engine.step.batch import Chunk
from engine.step.outcome import ScheduledBatch
from kvstore.client.transfer import StoreUp
from tests.decode_worker.test_scheduler_decisions import PROMPT, finishes, order, tokens_of
from tests.support.workers_and_stores import PAGE, PAGE_BYTES, VOCAB, Rig, RigWorker, next_token, reference

FREE_ROWS = [StepSample(0, 0, rows, rows * context, 0.01) for rows in (1, 2, 4) for context in (2, 40)]
DEAR_ROWS = [StepSample(0, 0, rows, rows * context, 0.01 * rows) for rows in (1, 2, 4) for context in (2, 40)]


class Guesses:
    """A proposer that is right that often."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._rng, self._share = rng, share

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        known = list(tokens)
        for _ in range(self._rng.randint(0, most)):
            known.append(next_token(known) if self._rng.random() < self._share else self._rng.randrange(VOCAB))
        return known[len(tokens) :]


def worker(
    share: float, steps: Sequence[StepSample] = FREE_ROWS, pages: int = 64, verify_all: bool = False, **config: Any
) -> RigWorker:
    settings = DecodeConfig(**config)
    one = Rig(64).worker("decode", pages, settings)
    rng = random.Random(1)
    one.state = DecodeScheduler(
        settings, PAGE, pages, calibration=steps, proposer=lambda: Guesses(rng, share), verify_all=verify_all
    )
    one.handle(StoreUp(64, PAGE_BYTES))
    return one


def plans_of(one: RigWorker) -> list[list[Chunk]]:
    """Return a list that gets the chunks of each step."""
    plans: list[list[Chunk]] = []
    run = one.run_step

    def note(plan: ScheduledBatch) -> Any:
        plans.append(list(plan.values()))
        return run(plan)

    one.run_step = note  # type: ignore[method-assign]
    return plans


def steps_of(one: RigWorker, count: int, **more: Any) -> int:
    """Run a request and return its steps."""
    one.handle(order(PROMPT, count, **more))
    steps = 0
    while not finishes(one.messages):
        steps += one.step()
        one.hear()
    return steps


EVERY_SHARE = pytest.mark.parametrize(("share", "verify_all"), list(product((0.0, 0.6, 1.0), (False, True))))


def has_the_tokens_without(one: RigWorker, share: float, least: int) -> None:
    """Run a request whose proposals are right in that share, and of which at least so many are verified."""
    steps = steps_of(one, 60)
    assert tokens_of(one.messages) == reference(PROMPT, 60)
    stats = one.state.stats().speculation
    assert stats.draft_tokens > least
    if share == 1:
        assert stats.accepted_tokens == stats.draft_tokens, "a guess goes on from something else than it should"
        assert steps < 20
    elif share:
        assert stats.draft_tokens / 5 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_tokens_are_those_without(share: float) -> None:
    one = worker(share)
    steps = steps_of(one, 60)
    one.rig.settle()
    assert tokens_of(one.messages) == reference(PROMPT, 60)
    assert finishes(one.messages) == ["length"]
    stats = one.state.stats().speculation
    assert stats.draft_tokens > 20
    assert stats.accepted_tokens <= 60 - steps + 1
    last = [delta for m in one.messages if isinstance(m, msg.Tokens) for delta in m.deltas][-1]
    assert (last.verified, last.accepted) == (stats.draft_tokens, stats.accepted_tokens)
    if share == 1:
        # Each saves a step, and rows are free.
        assert last.saved == pytest.approx(0.01 * stats.accepted_tokens, rel=0.2)
        assert steps < 20
        assert stats.accepted_tokens == stats.draft_tokens


def test_an_output_ends_at_a_stop_token_among_accepted_ones() -> None:
    expected = reference(PROMPT, 60)
    stop = next(token for at, token in enumerate(expected) if at > 20 and token not in expected[:at])
    one = worker(1.0)
    steps_of(one, 60, stop_token_ids=(stop,))
    one.rig.settle()
    assert tokens_of(one.messages) == expected[: expected.index(stop) + 1]
    assert finishes(one.messages) == ["stop"]


def test_dear_rows_and_wrong_guesses_are_not_verified() -> None:
    """A proposal costs a row. If that is a whole step, not even one that is right is worth it."""
    one = worker(1.0, DEAR_ROWS)
    assert steps_of(one, 40) > 35
    assert one.state.stats().speculation.drafts <= 1, "more than a trial"
    assert steps_of(worker(1.0, DEAR_ROWS, verify_all=True), 40) < 20
    half = [StepSample(0, 0, rows, rows * context, 0.01 + 0.004 * rows) for rows in (1, 2, 4) for context in (2, 40)]
    one = worker(0.0, half)
    steps_of(one, 120)
    assert 0 < one.state.stats().speculation.drafts < 30, "it goes on with guesses that are always wrong"


def test_what_speculation_saves_is_steps_less_rows() -> None:
    half = [StepSample(0, 0, rows, rows * context, 0.01 + 0.001 * rows) for rows in (1, 2, 4) for context in (2, 40)]
    for share in (0.0, 1.0):
        one = worker(share, half)
        steps_of(one, 60)
        last = [delta for m in one.messages if isinstance(m, msg.Tokens) for delta in m.deltas][-1]
        expected = 0.011 * last.accepted - 0.001 * last.verified
        assert last.saved == pytest.approx(expected, rel=0.3)
        assert (last.saved > 0) == (share == 1)


def test_a_step_holds_no_more_tokens_than_it_may() -> None:
    one = worker(1.0, max_num_batched_tokens=8)
    for number in range(3):
        one.handle(order(PROMPT, 50, f"r{number}"))
    plans = plans_of(one)
    one.rig.settle()
    verifying = [plan for plan in plans if any(chunk.verify for chunk in plan)]
    assert max(sum(len(chunk.tokens) for chunk in plan) for plan in verifying) == 8
    for number in range(3):
        assert tokens_of(one.messages, f"r{number}") == reference(PROMPT, 50)


def propose(tokens: Iterable[int], most: int = 4) -> list[int]:
    return list(NgramProposer().propose(list(tokens), most))


def test_ngrams_propose_what_came_after_the_last_tokens_before() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9]
    assert propose([1, 2, 3, 4, 1, 2, 3, 5, 0, 1, 2, 3]) == [5, 0, 1, 2], "not the last time"
    assert propose([1, 2, 3, 4, 5, 6]) == []
    assert propose([7, 7, 7, 7]) == [7, 7, 7, 7]
    assert propose([8, 1, 2, 1, 2, 1, 2]) == [1, 2, 1, 2], "a repetition goes on"
    assert propose([1, 256, 65536, 0, 5, 0, 1, 256]) == [], "bytes of two tokens are no token"


def test_ngrams_stay_where_they_are_right() -> None:
    one, text = NgramProposer(), [5, 1, 2, 3, 4, 6, 1, 2, 3, 8, 0, 9, 1, 2]
    assert one.propose(text, 2) == ()
    text.append(3)
    assert one.propose(text, 2) == [8, 0]
    text.append(4)  # it is wrong, and the last three tokens came before elsewhere
    assert one.propose(text, 2) == [6, 1]
    text += [6, 1]
    assert one.propose(text, 2) == [2, 3]


def test_rules_know_proposals_that_come_before() -> None:
    """Each row's changes are those that it would have if the proposals were its tokens."""
    rules = LogitsRules(
        repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.1, min_tokens=4, bad_words=((3, 4), (4, 4, 9))
    )
    tokens, ahead = [1, 2, 3], [3, 4, 4, 3]
    one, other = LogitsEditor(rules, tokens, [7]), LogitsEditor(rules, tokens, [7])
    one.edits(tokens)
    rows = one.edits_ahead(ahead)
    for count, row in enumerate(rows, 1):
        assert same(row, other.edits(tokens + ahead[:count])), count
    assert same(one.edits([*tokens, 5]), LogitsEditor(rules, tokens, [7]).edits([*tokens, 5]))


def same(one: object, other: object) -> bool:
    return str(one) == str(other)


def test_a_request_with_rules_is_verified_with_those_of_each_row() -> None:
    one = worker(1.0)
    sampling = SamplingParams(temperature=0, rules=LogitsRules(frequency_penalty=0.5))
    plans = plans_of(one)
    decode = msg.Decode("r", 1, b"r" * 16, order(PROMPT, 30).tokens, len(PROMPT), 30, sampling)
    one.handle(decode)
    one.rig.settle()
    verifying = next(chunk for plan in plans for chunk in plan if len(chunk.verify) > 1)
    counts = [draw.edits.lowered[1].sum() for _, draw in verifying.draws if draw.edits and draw.edits.lowered]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1
    assert tokens_of(one.messages) == reference(PROMPT, 30)
