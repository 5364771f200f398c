"""The pipes between a router and its helpers, which render chat templates and compile grammars.

- Orders with any template, messages and grammar, to the real helpers: each is answered or refused in time.
- Answers of a helper that says anything (`false_helper`): each is refused, and the next order is answered.

The router's side runs in this process.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from baton.errors import BatonError, InvalidGrammar, InvalidRequest, Overloaded
from baton.messages import MAX_GRAMMAR, Grammar
from router.frontend.api.prompts import TemplateRenderer, normalized, rendering
from router.frontend.off_loop import HelperDied, HelperLate, HelperProcess
from tests.fuzz import false_helper, values
from tests.fuzz.case import Case
from tests.fuzz.false_helper import NUMBER, answer, order

T = TypeVar("T")

_MOST = 20_000  # characters of a prompt
_BUSY = 60.0  # seconds in which a good order must have been answered once
_LIMIT = 200.0  # seconds of a case; a helper that hangs is ended after 3 s, and starts anew within 30 s
_PIECES = (
    "{{ ", " }}", "{% ", " %}", "messages", "[0]", ".content", "['role']", " | ", "tojson", "for m in ", "endfor",
    "if ", "endif", "set x = ", "namespace()", "range(9)", "'a' * 9", "raise_exception('x')", "macro f()", "endmacro",
    "{# ", " #}", "loop.index", "[", "]", "(", ")", "~", "1 / 0", "strftime_now('%Y')", "''.__class__", "x.y", "-%}",
    "{%- ", "generation", "endgeneration", "caller()", "call f()", "endcall", "filter upper", "endfilter", "\n", "é",
    "dict(a=1)", "'\\ud800'", "cycler(1)", "|attr('x')", "|map(attribute='y')", "|join", "|int", "break", "continue",
)  # fmt: skip
_SCHEMAS: tuple[Any, ...] = (
    {}, {"type": "object"}, {"type": "string", "pattern": "(a+)+"}, {"type": "integer", "maximum": 10**30},
    {"anyOf": []}, {"enum": []}, {"enum": [1, "x", None]}, {"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"not": {}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 2**31}, {"type": "string", "maxLength": 10**9}, True, False,
    {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0}}, "required": ["b"]},
    {"type": "string", "format": "date-time"}, {"const": {"x": [1, 2, {"y": None}]}}, {"type": ["null", "x"]},
)  # fmt: skip
_EXPRESSIONS = (
    "", "a*", "(a|b)*c", "(((", "[", "\\", "a{1000000}", "(a{99}){99}", "(?=x)", "\\p{L}+", "(?i)x", "^$", "a**",
    "[^\\x00-\\x7f]", "\\1(a)", ".{0,5000}", "(a*)*b", "\0",
)  # fmt: skip
_LARK = (
    "", "start: \"a\"", "start: start", "start: x", "start: /a*/ x\nx: \"b\" | start", "root ::= \"a\" root | \"b\"",
    "root ::= [a-z]+", "start: %json {}", "%llguidance {}\nstart: \"a\"", "start[temperature=0.5]: \"a\"",
    "start: a~9999\na: \"x\"~999", "start: @x", "root ::= (", "start: /(/",
)  # fmt: skip


class HelperPipes:
    """A router's ends of the pipes. They belong to one event loop."""

    threads = 1

    def __init__(self, tokenizer: str, vocab_size: int, eos: int) -> None:
        """`tokenizer` is the checkpoint's tokenizer.json."""
        self._loop = asyncio.new_event_loop()
        self._renderer = TemplateRenderer(_MOST)
        grammar = "router.frontend.grammar_process"
        self._grammars = HelperProcess(grammar, tokenizer, str(vocab_size), str(eos), deadline=3.0, most=MAX_GRAMMAR)
        self._false = HelperProcess("tests.fuzz.false_helper", deadline=1.0, most=_MOST)
        assert Path(tokenizer).is_file()

    def start(self) -> None:
        """Start the helpers, which import their libraries."""
        case = Case(0, "helpers", -1)
        for exchange in (self._template, self._grammar, self._false_answer):
            self._in_time(exchange(case))

    def run(self, case: Case) -> str:
        match case.rng.randrange(3):
            case 0:
                return self._in_time(self._template(case))
            case 1:
                return self._in_time(self._grammar(case))
            case _:
                return self._in_time(self._false_answer(case))

    def _in_time(self, exchange: Coroutine[Any, Any, str]) -> str:
        try:
            return self._loop.run_until_complete(asyncio.wait_for(exchange, _LIMIT))
        except TimeoutError:
            raise AssertionError(f"an order was neither answered nor refused within {_LIMIT} s") from None

    async def _template(self, case: Case) -> str:
        """Render any template with any messages; a plain template must still render."""
        rng = case.rng
        template = "".join(rng.choices(_PIECES, k=rng.choice([3, 8, 30])))
        if rng.random() < 0.3:
            template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
        if rng.random() < 0.1:
            template = values.text(rng).encode("utf-8", "replace").decode()
        variables = {"bos_token": "<s>", "tools": values.anything(rng), "messages": self._messages(rng)}
        case.sending(repr((template, variables)).encode())
        text, refusal = "", ""
        try:
            text = await self._renderer.render(rendering(template, variables))
        except (InvalidRequest, Overloaded) as error:
            refusal = str(error)
        except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, RecursionError):
            return "no JSON"  # the HTTP API takes no such body
        assert len(text) <= _MOST, f"a prompt of {len(text)} characters"
        assert len(refusal) < 1_000, f"an error of {len(refusal)} characters"
        user = {"messages": [{"role": "user"}]}
        again = await _answered(lambda: self._renderer.render(rendering("{{ messages[0].role }}", user)))
        assert again == "user", f"a plain template gives {again!r}"
        return "template refused" if refusal else "template rendered"

    def _messages(self, rng: random.Random) -> list[dict[str, Any]]:
        messages = [{"role": values.text(rng, 20) or "user", "content": values.anything(rng)} for _ in range(3)]
        try:
            return normalized(messages)
        except InvalidRequest:
            return [{"role": "user", "content": values.text(rng, 400)}, {"role": "x", "content": [{"text": "y"}]}]

    async def _grammar(self, case: Case) -> str:
        """Compile any grammar; a plain one must still compile."""
        rng = case.rng
        kind: Any
        kind, text = rng.choice([
            ("json_schema", json.dumps(self._schema(rng))), ("regex", "".join(rng.choices(_EXPRESSIONS, k=2))),
            ("regex", values.text(rng, 3_000)), ("lark", rng.choice(_LARK)),
            ("lark", "\n".join(rng.choices(_LARK, k=3))),
            ("json_schema", values.text(rng, 300)), ("lark", "start: " + "(" * rng.choice([9, 5_000])),
        ])  # fmt: skip
        grammar = Grammar(kind, (text.encode("utf-8", "replace").decode() or " ")[:MAX_GRAMMAR], 2)
        case.sending(grammar.text.encode())
        outcome = f"{kind} refused"
        try:
            reply = await self._grammars.ask(msgspec.json.encode({"grammar": grammar, "lenient": rng.random() < 0.5}))
            outcome = outcome if reply.text is None else f"{kind} compiled"
            known = (InvalidGrammar.reason, InvalidRequest.reason, Overloaded.reason)
            assert reply.text is not None or reply.reason in known, f"it says {reply.reason}: {reply.error}"
        except (HelperLate, HelperDied, Overloaded):
            outcome = f"{kind} ended its process"
        plain = msgspec.json.encode({"grammar": Grammar("regex", "a", 2), "lenient": False})
        again = await _answered(lambda: self._grammars.ask(plain))
        assert again.text == "a", f"a plain grammar is not compiled: {again}"
        return outcome

    def _schema(self, rng: random.Random) -> Any:
        schema = rng.choice(_SCHEMAS)
        for _ in range(rng.choice([0, 1, 3, 300])):
            schema = rng.choice([
                {"type": "object", "properties": {"x": schema}}, {"type": "array", "items": schema},
                {"anyOf": [schema]},
            ])  # fmt: skip
        return schema

    async def _false_answer(self, case: Case) -> str:
        """Have a helper say anything; the next order must be answered."""
        rng = case.rng
        body = rng.choice([
            false_helper.GOOD, b'{"number":' + NUMBER + b', "error": "x"}', json.dumps(values.anything(rng)).encode(),
            json.dumps({"number": 1, "text": values.anything(rng)}).encode(), values.data(rng),
        ])  # fmt: skip
        output = answer(values.damaged(rng, body) if rng.random() < 0.3 else body)
        if rng.random() < 0.3:
            output = rng.choice([output + output, output[: rng.randrange(len(output))], values.data(rng), b"\xff" * 9])
        try:
            await self._false.ask(order(case.sending(output), end=rng.random() < 0.2))
            kind = "false answer taken"
        except (HelperLate, HelperDied, Overloaded):
            kind = "false answer refused"
        except BatonError as error:
            raise AssertionError(f"a helper's answer leads to {error!r}") from None
        with suppress(HelperLate, HelperDied, Overloaded):  # what it said too much is no answer to this
            await self._false.ask(order(answer(false_helper.GOOD)))
        await self._false.close()
        again = await _answered(lambda: self._false.ask(order(answer(false_helper.GOOD))))
        assert again.text == "x", f"a plain order is answered by {again}"
        return kind


async def _answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Return the answer to a good order. On a busy machine it may come too late, and is asked for again."""
    until = time.monotonic() + _BUSY
    while time.monotonic() < until:
        with suppress(HelperLate, InvalidRequest, Overloaded):
            return await ask()
    return await ask()
