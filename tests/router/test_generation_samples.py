"""Samples of one prompt: the first one's prompt is computed, then the others begin where it runs."""

import pytest

from baton.clock import Tick
from baton.errors import Unavailable
from baton.messages import Refused
from baton.v1 import generation_pb2 as pb
from router.events import Failed, Finished, Shutdown
from router.frontend.output_stream import Output
from tests.router.driven import driven, read_end
from tests.router.model import CONFIG
from tests.support.eventually import eventually_async


async def test_the_others_begin_at_the_first_token_of_the_first_and_where_it_runs() -> None:
    async with driven() as bench:
        outputs = await bench.start(n=3, seed=5)
        (first,) = bench.orders
        assert first[1].sampling.seed == 5
        bench.answer(first, 9)
        await bench.settle()
        assert [to for to, _ in bench.orders] == [first[0]] * 3
        assert [order.sampling.seed for _, order in bench.orders] == [5, 6, 7]
        for order, token in zip(bench.orders[1:], (10, 11), strict=True):
            bench.answer(order, token, 3, finish="length")
        for output, token in zip(outputs[1:], (10, 11), strict=True):
            news = await output.stream.read()
            assert isinstance(news, Output)
            assert news.tokens == [token, 3]
            assert isinstance((await read_end(output)).outcome, Finished)


async def test_a_worker_without_room_for_a_sample_sends_it_elsewhere() -> None:
    async with driven() as bench:
        await bench.start(n=2)
        (first,) = bench.orders
        bench.answer(first, 9)
        await bench.settle()
        to, second = bench.orders[1]
        assert to == first[0]
        bench.say(to, Refused(second.request, second.attempt, "busy"))
        assert bench.orders[2][0] != first[0]


async def test_a_first_sample_that_fails_takes_the_others_along() -> None:
    async with driven() as bench:
        outputs = await bench.start(n=3)
        bench.driver.handle(Shutdown())
        for output in outputs:
            outcome = (await read_end(output)).outcome
            assert isinstance(outcome, Failed)
            assert isinstance(outcome.error, Unavailable)
        assert not bench.driver.busy


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
async def test_samples_that_are_not_wanted_any_more_never_begin(order: tuple[int, ...]) -> None:
    async with driven() as bench:
        outputs = await bench.start(n=3)
        for number in order:
            outputs[number].close()
        assert len(bench.orders) == 1
        assert not bench.driver._streams
        assert not bench.driver._held
        assert not bench.driver._max_tokens


async def test_further_prompts_of_a_body_leave_most_of_the_queue_to_others() -> None:
    async with driven() as bench:
        outputs = [(await bench.start(n=2, further=bool(number)))[0] for number in range(40)]
        await bench.settle()
        assert bench.driver.state.queued == CONFIG.router.max_queued // 4 + 1
        assert len(bench.driver._held) > 40
        (other,) = await bench.start()
        assert not other.stream.ended
        for output in outputs[20:]:
            output.close()
        held, limit = len(bench.driver._held), CONFIG.router.queue_timeout_ms / 1_000
        bench.now_ += limit / 2
        bench.driver.handle(Tick())
        await bench.settle()
        assert len(bench.driver._held) == held
        bench.driver.stop()
        for output in outputs:
            assert not isinstance((await read_end(output)).outcome, Finished)
        assert not bench.driver._streams
        assert not bench.driver._held


async def test_a_search_that_is_not_wanted_any_more_ends_its_steps() -> None:
    async with driven() as bench:
        (output,) = await bench.start(n=1, best_of=2, beam_search=pb.BeamSearch())
        await eventually_async(lambda: bench.orders)
        output.close()
        await eventually_async(lambda: not bench.driver._streams)


async def test_a_step_of_a_search_that_fails_is_the_end_of_all_outputs() -> None:
    async with driven() as bench:
        outputs = await bench.start(n=2, beam_search=pb.BeamSearch())
        await eventually_async(lambda: bench.orders)
        bench.driver.handle(Shutdown())
        for output in outputs:
            assert isinstance((await read_end(output)).outcome, Failed)
