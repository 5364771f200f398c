"""Helper processes that say what is no answer: it costs their one order, and the next one gets an answer."""

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.config import ModelConfig
from baton.errors import InvalidRequest, Overloaded
from baton.messages import Grammar
from router.frontend.api.prompts import TemplateRenderer, rendering
from router.frontend.grammar_checker import GrammarChecker
from router.frontend.off_loop import HelperDied, HelperProcess
from router.frontend.served_model import load
from tests.fuzz import false_helper
from tests.fuzz.false_helper import NUMBER, answer, order
from tests.router.model import EOS
from tests.router.served import model_folder

pytestmark = pytest.mark.slow

GOOD = answer(false_helper.GOOD)
NUMBERED = b'{"number":' + NUMBER
MOST = 100  # characters


@contextlib.asynccontextmanager
async def answering_helper(deadline: float = 30.0) -> AsyncIterator[HelperProcess]:
    """A helper that answers before the block and after it."""
    helper = HelperProcess("tests.fuzz.false_helper", deadline=deadline, most=MOST)
    try:
        assert (await helper.ask(order(GOOD))).text == "x"
        yield helper
        assert (await helper.ask(order(GOOD))).text == "x"
    finally:
        await helper.close()


@pytest.mark.parametrize(
    "output",
    [
        answer(b""), answer(b"{"), answer(b"\xff"), answer(b"[]"), answer(b"null"), answer(b"{}"),
        answer(NUMBERED + b"}"), answer(NUMBERED + b', "text": 1}'), answer(NUMBERED + b', "text": null}'),
        answer(NUMBERED + b', "text": "\\ud800"}'), answer(NUMBERED + b', "error": ""}'), answer(b"[" * 10_000),
        answer(NUMBERED + b', "text": ["x"]}'), answer(b'{"text": "x"}'),
        answer(b'{"number": 1, "text": "of another"}'), (2**32 - 1).to_bytes(4, "big"), (2**20).to_bytes(4, "big"),
    ],
    ids=lambda output: str(output[:30]),
)  # fmt: skip
async def test_what_is_no_answer(output: bytes) -> None:
    async with answering_helper() as helper:
        with pytest.raises(HelperDied):
            await helper.ask(order(output))


@pytest.mark.parametrize("output", [b"", b"\0", GOOD[:6]])
async def test_a_helper_that_ends_in_the_middle(output: bytes) -> None:
    async with answering_helper() as helper:
        with pytest.raises(HelperDied):
            await helper.ask(order(output, end=True))


@pytest.mark.parametrize("output", [b"", b"\0", GOOD[:6]])
async def test_a_helper_that_says_nothing_more_and_computes_nothing(output: bytes) -> None:
    """Its order is done again by another process, once."""
    async with answering_helper(deadline=0.2) as helper:
        with pytest.raises(Overloaded, match="interrupted twice"):
            await helper.ask(order(output))


async def test_no_order_gets_the_answer_of_another() -> None:
    async with answering_helper() as helper:
        assert (await helper.ask(order(GOOD + GOOD))).text == "x"
        with pytest.raises(HelperDied):
            await helper.ask(order(b""))  # the second answer was said too much


async def test_the_longest_text_is_taken_however_it_is_escaped() -> None:
    async with answering_helper() as helper:
        output = answer(NUMBERED + b', "text": "' + b"\\ud83d\\udc4d" * MOST + b'"}')
        assert (await helper.ask(order(output))).text == "👍" * MOST


def pid_of(helper: HelperProcess) -> int:
    return helper._started.result().pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_helper_that_is_killed_or_stopped_from_outside_costs_no_order(number: signal.Signals) -> None:
    async with answering_helper(deadline=1.0) as helper:
        for _ in range(2):
            os.kill(pid_of(helper), number)
            assert (await helper.ask(order(GOOD))).text == "x"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_grammar_does_not_suffer_from_what_happens_to_its_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    """`json_object` was refused for ever, since the refusal was remembered."""
    checker = GrammarChecker(load(ModelConfig(path=str(model_folder(tmp_path / "model")))))
    try:
        await checker.check(Grammar("regex", "a", EOS), "")
        assert checker._helper is not None
        os.kill(pid_of(checker._helper), number)
        grammar = Grammar("json_schema", '{"type":"object"}', EOS)
        assert await checker.check(grammar, "") == grammar
    finally:
        await checker.close()


async def test_an_order_has_no_more_patience_after_a_kill_than_before(tmp_path: Path) -> None:
    """A slow template behind a killed process took the start's 30 seconds instead of its own two."""
    renderer = TemplateRenderer(10_000)
    slow = rendering("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {"messages": []})
    plain = rendering("{{ messages[0].role }}", {"messages": [{"role": "user"}]})
    try:
        assert await renderer.render(plain) == "user"
        took = list[float]()
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(InvalidRequest, match="takes longer than 2 s"):
                await renderer.render(slow)
            took.append(time.monotonic() - began)
        assert max(took) < 3 * min(took), took  # the machine's speed is in both
    finally:
        await renderer.close()
