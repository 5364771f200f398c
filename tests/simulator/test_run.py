"""Repeatable steps may run in a row without any change to the outcome."""

from baton.config import DecodeConfig
from baton.messages import Cancel, Decode, SamplingParams
from engine.step.batch import Chunk, Sampled, TokenDraw
from engine.step.outcome import ScheduledBatch
from kvstore.keys import pack_tokens
from simulator.run import RunDecodeScheduler, RunDone
from tests.decode_worker.test_scheduler_decisions import tokens_of
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigWorker, next_token, reference

PROMPT = [1, 2, 3, 4, 5]


def order(count: int, request: str = "r", stops: tuple[int, ...] = ()) -> Decode:
    prompt = pack_tokens([*PROMPT, len(request)])
    return Decode(request, 1, ROOT, prompt, len(PROMPT) + 1, count, SamplingParams(temperature=0), stops)


def worker() -> RigWorker:
    one = Rig(64).worker("decode", 32, DecodeConfig())
    one.state = RunDecodeScheduler(DecodeConfig(), PAGE, 32)
    return one


def sampled(worker: RigWorker, plan: ScheduledBatch, steps: int) -> list[list[Sampled]]:
    """What each row of the plan draws in so many steps, feeding on its own last token."""
    drawn: list[list[Sampled]] = []
    for name, chunk in plan.items():
        sequence = worker.state._sequences[name.request]
        tokens = list(sequence.tokens)
        row = [worker.device.run(tokens, chunk)]
        for at in range(chunk.end, chunk.end + steps - 1):
            tokens.append(next_token(tokens))
            row.append(worker.device.run(tokens, Chunk(tokens[at : at + 1], at, sequence.pages, TokenDraw())))
        drawn.append([token for token in row if token is not None])
    return drawn


def run(worker: RigWorker) -> list[int]:
    """Run to the end, always as many steps in a row as are alike. Returns how many these were."""
    runs: list[int] = []
    while worker.state.busy:
        worker.hear()
        worker.copy()
        worker.hear()
        worker.state.prepare(worker.rig.now)
        plan = worker.state.schedule(worker.rig.now)
        if not plan:
            continue
        runs.append(worker.state.repeatable_steps(plan))
        worker.handle(RunDone(plan, sampled(worker, plan, runs[-1]), runs[-1]))
    return runs


def test_steps_in_a_row_make_the_tokens_that_single_steps_make() -> None:
    one = worker()
    one.handle(order(23))
    runs = run(one)
    assert tokens_of(one.messages) == reference([*PROMPT, 1], 23)
    assert runs[0] == 1, "the first token is for itself"
    assert max(runs) == PAGE, "the others come up to the end of a page"


def test_several_rows_go_on_until_something_becomes_of_one() -> None:
    many = worker()
    many.handle(order(9, "r"))
    many.handle(order(14, "rr"))
    run(many)
    assert tokens_of(many.messages, "r") == reference([*PROMPT, 1], 9)
    assert tokens_of(many.messages, "rr") == reference([*PROMPT, 2], 14)


def test_what_is_drawn_behind_a_stop_token_is_dropped() -> None:
    expected = reference([*PROMPT, 1], 12)
    stop = next(token for at, token in enumerate(expected) if at > 4 and token not in expected[:at])
    stopped = worker()
    stopped.handle(order(12, stops=(stop,)))
    run(stopped)
    assert tokens_of(stopped.messages) == expected[: expected.index(stop) + 1]
    stopped.handle(Cancel("r", 1))
    assert stopped.state.stats().pages_free == 32
