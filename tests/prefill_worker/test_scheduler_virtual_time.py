"""Whole loads on one prefill worker, in virtual time."""

import itertools

from baton.messages import AttemptFailed, Cancel, Prefilled
from baton.step_cost_model import pairs
from tests.prefill_worker.timed import PAGE, Timed, machine

LONG = [token % 1_000 for token in range(100_000)]


def prompt(number: int, tokens: int) -> list[int]:
    return [2_000 + number] * tokens


def test_a_short_prompt_behind_a_hundred_thousand_tokens_is_done_within_two_steps() -> None:
    worker = Timed()
    worker.order("long", LONG)
    worker.run(until=lambda: worker.tokens("long") > 50_000)
    for number in range(5):
        came, steps = worker.time, len(worker.steps)
        worker.order(f"short{number}", prompt(number, 4 * PAGE))
        worker.run(until=lambda name=f"short{number}": name in worker.ended)
        assert len(worker.steps) - steps <= 2
        assert worker.ended[f"short{number}"] - came < 2 * 0.06
    worker.run()
    assert isinstance(worker.messages["long"], Prefilled)


def test_steps_last_as_long_as_they_should_from_the_beginning_to_the_end_of_a_long_prompt() -> None:
    worker = Timed()
    worker.order("long", LONG)
    worker.run()
    starts = [at for at, _ in worker.steps]
    lasted = [later - at for at, later in zip(starts, [*starts[1:], worker.time], strict=True)]
    assert max(lasted) < 0.3
    chunks = [chunk for _, plan in worker.steps for chunk in plan.values()]
    for left, (chunk, seconds) in enumerate(reversed(list(zip(chunks, lasted, strict=True))[5:]), 1):
        page = machine(PAGE, pairs(PAGE, chunk.start))
        other = 0.5 / left  # the rest is spread over all that are left
        assert (1 - other) * 0.19 - page < seconds < (1 + other) * 0.2 + page
    assert len(chunks[5].tokens) > 10 * len(chunks[-2].tokens)


def test_the_urgent_are_done_before_the_others_and_the_others_in_time() -> None:
    worker = Timed()
    for number in range(3):
        worker.order(f"later{number}", prompt(number, 3_200), priority=5)
    worker.turn()
    for number in range(3):
        worker.order(f"urgent{number}", prompt(10 + number, 3_200))
    worker.run()
    ends = sorted(worker.ended, key=lambda name: worker.ended[name])
    assert [name[:-1] for name in ends] == ["urgent"] * 3 + ["later"] * 3
    for number in range(3):
        served = worker.served(f"later{number}")
        assert max(after - before for before, after in itertools.pairwise(served)) <= 17


def test_eight_prompts_that_begin_alike_compute_it_once() -> None:
    worker = Timed()
    shared = LONG[:4_000]
    prompts = {f"r{number}": shared + prompt(number, 2 * PAGE) for number in range(8)}
    for name, tokens in prompts.items():
        worker.order(name, tokens)
    assert worker.state.stats().waiting == 7
    assert worker.state.stats().pages_free == worker.pages - 4_000 // PAGE - 8 * 2
    worker.run()
    assert sum(worker.tokens(name) for name in prompts) == 4_000 + 8 * 2 * PAGE
    results = [worker.messages[name] for name in prompts]
    assert all(isinstance(result, Prefilled) and result.computed + result.hit * PAGE == 4_032 for result in results)
    assert worker.state.stats().pages_hit == 7 * 4_000 // PAGE
    # What the first computed in its last step was not sealed yet when the others reserved their slots.
    assert 0 <= worker.state.stats().pages_stored - (4_000 // PAGE + 8 * 2) < 7 * 600 // PAGE
    assert worker.state.stats().pages_free == worker.pages


def test_when_the_first_is_cancelled_one_of_the_others_goes_on_where_it_was() -> None:
    worker = Timed()
    shared = LONG[:4_000]
    for number in range(4):
        worker.order(f"r{number}", shared + prompt(number, PAGE), priority=4 - number)
    worker.run(until=lambda: worker.tokens("r0") > 1_000)
    begun = worker.tokens("r0")
    worker.handle(Cancel("r0", 1))
    worker.turn()
    assert [worker.tokens(f"r{number}") > 0 for number in range(1, 4)] == [False, False, True]  # the most urgent
    worker.run()
    assert begun + sum(worker.tokens(f"r{number}") for number in range(1, 4)) == 4_000 + 3 * PAGE
    assert sorted(worker.ended) == ["r1", "r2", "r3"]


def test_an_urgent_prompt_that_waits_lends_its_urgency() -> None:
    worker = Timed()
    worker.order("first", LONG[:8_000], priority=9)
    worker.order("others", prompt(1, 8_000), priority=3)
    worker.order("urgent", LONG[:3_200], priority=0)
    worker.run()
    assert sorted(worker.ended, key=lambda name: worker.ended[name]) == ["urgent", "others", "first"]
    # `others` had a part before only because no prompt waits for ever.
    before = [plan for at, plan in worker.steps if at < worker.ended["urgent"]]
    assert sum(len(c.tokens) for plan in before for name, c in plan.items() if name.request == "others") < 320


def test_a_deadline_of_the_first_is_no_concern_of_the_others() -> None:
    worker = Timed()
    worker.order("first", LONG[:6_400])
    worker.state._requests["first"].deadline = 0.3
    worker.order("second", LONG[:6_400])
    worker.run()
    assert isinstance(worker.messages["first"], AttemptFailed)
    assert isinstance(worker.messages["second"], Prefilled)
    assert worker.tokens("first") + worker.tokens("second") == 6_400
