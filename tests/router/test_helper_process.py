"""Helper processes that say what is no answer: it costs their one order, and the next one gets an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.frontend.helpers.helper_process import HelperDied, HelperLate, HelperProcess
from tests.fuzz import false_helper
from tests.fuzz.false_helper import NUMBER, answer, order

pytestmark = pytest.mark.slow

GOOD = answer(false_helper.GOOD)
NUMBERED = b'{"number":' + NUMBER
MOST = 100  # characters


def run(test: Callable[[HelperProcess], Awaitable[None]], deadline: float = 30.0) -> None:
    async def whole() -> None:
        helper = HelperProcess("tests.fuzz.false_helper", deadline=deadline, most=MOST)
        try:
            assert (await helper.ask(order(GOOD))).text == "x"
            await test(helper)
            assert (await helper.ask(order(GOOD))).text == "x"
        finally:
            await helper.close()

    asyncio.run(asyncio.wait_for(whole(), 120))


@pytest.mark.parametrize(
    "said",
    [
        answer(b""), answer(b"{"), answer(b"\xff"), answer(b"[]"), answer(b"null"), answer(b"{}"),
        answer(NUMBERED + b"}"), answer(NUMBERED + b', "text": 1}'), answer(NUMBERED + b', "text": null}'),
        answer(NUMBERED + b', "text": "\\ud800"}'), answer(NUMBERED + b', "error": ""}'), answer(b"[" * 10_000),
        answer(NUMBERED + b', "text": ["x"]}'), answer(b'{"text": "x"}'),
        answer(b'{"number": 1, "text": "of another"}'), (2**32 - 1).to_bytes(4, "big"), (2**20).to_bytes(4, "big"),
    ],
    ids=lambda said: str(said[:30]),
)  # fmt: skip
def test_what_is_no_answer(said: bytes) -> None:
    async def test(helper: HelperProcess) -> None:
        with pytest.raises(HelperDied):
            await helper.ask(order(said))

    run(test)


@pytest.mark.parametrize("said", [b"", b"\0", GOOD[:6]])
def test_a_helper_that_ends_in_the_middle(said: bytes) -> None:
    async def test(helper: HelperProcess) -> None:
        with pytest.raises(HelperDied):
            await helper.ask(order(said, end=True))

    run(test)


@pytest.mark.parametrize("said", [b"", b"\0", GOOD[:6]])
def test_a_helper_that_stops_in_the_middle(said: bytes) -> None:
    async def test(helper: HelperProcess) -> None:
        with pytest.raises(HelperLate):
            await helper.ask(order(said))

    run(test, deadline=0.2)


def test_no_order_gets_the_answer_of_another() -> None:
    async def test(helper: HelperProcess) -> None:
        assert (await helper.ask(order(GOOD + GOOD))).text == "x"
        with pytest.raises(HelperDied):
            await helper.ask(order(b""))  # the second answer was said too much

    run(test)


def test_the_longest_text_is_taken_however_it_is_escaped() -> None:
    async def test(helper: HelperProcess) -> None:
        said = answer(NUMBERED + b', "text": "' + b"\\ud83d\\udc4d" * MOST + b'"}')
        assert (await helper.ask(order(said))).text == "👍" * MOST

    run(test)
