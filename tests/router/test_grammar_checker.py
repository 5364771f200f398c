"""Structured output: its fields, and the check of a grammar before its request is queued."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from baton.config import ModelConfig
from baton.errors import InvalidGrammar, InvalidRequest, Overloaded, UnsupportedField
from baton.grammars import matcher_of
from baton.messages import MAX_GRAMMAR, Grammar
from baton.v1 import generation_pb2 as pb
from router.frontend.api.openai_completions import CompletionRequest
from router.frontend.api.openai_responses import ResponsesRequest, chat_of_response
from router.frontend.api.protocol import refuse_unserved, structured_output
from router.frontend.chat.repairs import Repairs
from router.frontend.generation import generation_request, grammar_of, message_fields
from router.frontend.grammar_checker import GrammarChecker
from router.frontend.served_model import ServedModel, load
from tests.router.model import EOS
from tests.router.served import model_folder
from tests.router.test_api import door

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": 'é"'}}, "required": ["z"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"), ensure_ascii=False)
OWN = '{"x-guidance":{"whitespace_flexible":true}}'


def bounded(text: str, count: int = 32) -> str:
    """A schema as it is compiled."""
    return f'{text[:-1]},"x-guidance":{{"whitespace_pattern":"[ \\\\t\\\\r\\\\n]{{1,{count}}}"}}}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load(ModelConfig(path=str(model_folder(tmp_path_factory.mktemp("model")))))


def output_of(**fields: Any) -> dict[str, Any] | None:
    request = CompletionRequest(**fields)
    refuse_unserved(request)
    return structured_output(request)


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": None, "json_object": False}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", bounded('{"type":"object"}'))),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
            ("json_schema", bounded('{"type":"array"}')),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            ("json_schema", bounded(TEXT)),
        ),
        ({"structured_outputs": {"json": SCHEMA}, "response_format": {"type": "text"}}, ("json_schema", bounded(TEXT))),
        ({"structured_outputs": {"json": TEXT}}, ("json_schema", bounded(TEXT))),
        ({"structured_outputs": {"json": True}}, ("json_schema", bounded('{"anyOf":[true]}'))),
        ({"structured_outputs": {"json_object": True}}, ("json_schema", bounded('{"type":"object"}'))),
        ({"structured_outputs": {"json": OWN}}, ("json_schema", OWN)),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            ("json_schema", '{"type":"object","x-guidance":{"whitespace_flexible":false}}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", 'b"', "a"]}}, ("lark", 'start: "a" | "b\\""')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ("lark", 'start: "a"')),
    ],
)
def test_fields_become_a_grammar(model: ServedModel, fields: dict[str, Any], right: tuple[Any, str] | None) -> None:
    grammar = grammar_of(output_of(**fields), model)
    assert grammar == (None if right is None else Grammar(*right, EOS))


def test_json_has_little_white_space(model: ServedModel) -> None:
    def allows(text: str, **fields: Any) -> bool:
        grammar = grammar_of(output_of(**fields), replace(model, json_whitespace=spaces))
        assert grammar is not None
        matcher = matcher_of(LLTokenizer("byte"), grammar)
        return matcher.consume_tokens([*text.encode()])

    for spaces in (0, 3):
        for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": True}}):
            for many in range(5):
                gap = "\n" + " " * (many - 1) if many else ""
                text = f'{{{gap}"a"{gap}:{gap}[{gap}1{gap},{gap}{{{gap}}}{gap}]{gap}}}'
                assert allows(text, **form) == (many <= spaces), (text, spaces)
        assert allows("[" + " " * 90, structured_outputs={"json": OWN})
        assert not allows("[ ", structured_outputs={"json": True, "disable_any_whitespace": True})


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "no schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format", "one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "object"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex", "text"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"choice": ["a"] * 10_001}}, "structured_outputs.choice", "10001"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "support"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "support"),
        ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs.choice"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        output_of(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (pb.StructuredOutput(), "empty"),
        (pb.StructuredOutput(json_schema="{"), "JSON"),
        (pb.StructuredOutput(json_schema="[]"), "object"),
        (pb.StructuredOutput(json_schema='{"a":' * 5_000), "JSON"),
        (pb.StructuredOutput(regex=""), "0 characters"),
        (pb.StructuredOutput(grammar="a" * (MAX_GRAMMAR + 1)), "131073"),
        (pb.StructuredOutput(json_schema=json.dumps({"x": "a" * MAX_GRAMMAR})), "characters"),
        (pb.StructuredOutput(choice=pb.Choices()), "no choices"),
        (pb.StructuredOutput(choice=pb.Choices(texts=["a", ""])), "empty"),
    ],
)
def test_what_grpc_clients_send_is_checked(model: ServedModel, output: pb.StructuredOutput, says: str) -> None:
    with pytest.raises(InvalidGrammar, match=says):
        grammar_of(message_fields(output), model)


def test_a_model_without_tokenizer_or_end_is_named(model: ServedModel) -> None:
    for change, says in (({"tokenizer_file": None}, "tokenizer.json"), ({"eos": ()}, "end-of-sequence")):
        with pytest.raises(UnsupportedField, match=says):
            grammar_of({"regex": "a"}, replace(model, **change))


def test_an_end_of_sequence_ends_every_grammar(model: ServedModel) -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "token_ids": {"ids": [5]}}
    request = generation_request(fields | {"structured_output": {"regex": "a"}}, "a", model, lambda: 1)
    assert request.sampling.grammar == Grammar("regex", "a", EOS, ignore_eos=True)
    assert request.stop_token_ids == (EOS,)
    assert generation_request(fields, "a", model, lambda: 1).stop_token_ids == ()


def test_responses_have_a_format_of_their_own() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    chat = chat_of_response(ResponsesRequest(input="x", text={"format": form}), Repairs())
    assert structured_output(chat) == {"json_schema": TEXT}
    for other in ({"type": "json_object"}, {"type": "text"}, None):
        assert chat_of_response(ResponsesRequest(input="x", text={"format": other}), Repairs()).response_format == other


@contextlib.asynccontextmanager
async def grammar_checker(model: ServedModel) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(model)
    try:
        yield checker
    finally:
        await checker.close()


@pytest.mark.slow
async def test_grammars_are_compiled(model: ServedModel) -> None:
    async with grammar_checker(model) as checker:
        for kind, text in (
            ("json_schema", TEXT), ("regex", r"[a-z]{3}\d*"), ("lark", 'start: "a" | "b\\""'), ("lark", 'start: "ü"'),
        ):  # fmt: skip
            grammar = Grammar(kind, text, EOS)
            assert await checker.check(grammar, "") == grammar
        gbnf = await checker.check(Grammar("lark", 'root ::= "a" | "b" [0-9]+', EOS), "")
        assert "start" in gbnf.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (
            "json_schema",
            '{"not": {"type": "string"}}',
            r"JSON schema can't be used: #/not: Unimplemented keys: \[\"not\"\]",
        ),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
        ("json_schema", '{"$ref": "http://example.com/x.json"}', "example.com"),
        ("json_schema", "false", "false"),
        ("regex", "(?<=a)b", "regular expression can't be used.*look-around"),
        ("regex", "(", "unclosed"),
        ("lark", "foo", "grammar"),
        ("lark", 'start: nothing "a"', "nothing"),
    ],
)
async def test_the_reason_of_a_wrong_grammar_is_llguidances(
    model: ServedModel, kind: Any, text: str, says: str
) -> None:
    async with grammar_checker(model) as checker:
        for _ in range(2):  # the second answer is a remembered one
            with pytest.raises(InvalidGrammar, match=f"(?s){says}"):
                await checker.check(Grammar(kind, text, EOS), "")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubled(name: str, rules: int, also: str = "") -> str:
    """Rules that each stand for two of the next, so the last stands for 2 to the power of `rules`."""
    lines = [f"{name}{n}: {name}{n + 1} {name}{n + 1}{also}" for n in range(rules)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{rules}: "y"'])


def properties(count: int, kind: str) -> dict[str, Any]:
    return {f"{kind}{n}": {"type": "string"} for n in range(count)}


PRODUCT = {"allOf": [{"anyOf": [{"properties": {f"a{n}_{m}": {}}} for m in range(8)]} for n in range(12)]}
HOSTILE: dict[str, tuple[Any, str]] = {
    "repeated": ("regex", "((a{1000}){1000}){1000}"),
    "alternatives": ("regex", "(.*a.{200}|.*b.{300}|.*[cd].{250})*z"),
    "parentheses": ("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "intersection": ("lark", "start: /(.*a.{100})&(.*b.{90})&(.*c.{80})/"),
    "lark parentheses": ("lark", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "doubled terminals": ("lark", doubled("A", 64)),
    "doubled rules": ("lark", doubled("a", 2_000, ' | "x"')),
    "ambiguous": ("lark", 'start: e\ne: e e | e e e | "a" | ""'),
    "gbnf": ("lark", "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000),
    "deep": ("json_schema", json.dumps(nested(300))),
    "itself": ("json_schema", '{"$ref": "#"}'),
    "each other": ("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'),
    "optional": ("json_schema", json.dumps({"type": "object", "properties": properties(3_000, "p")})),
    "many": ("json_schema", json.dumps({"type": "array", "minItems": 10**6, "maxItems": 10**7})),
    "long": ("json_schema", '{"type": "string", "minLength": 1000000, "pattern": "^(a|b)*c.{900}$"}'),
    "product": ("json_schema", json.dumps(PRODUCT)),
    "multiples": ("json_schema", json.dumps({"allOf": [{"multipleOf": n} for n in (97, 89, 83, 79, 73, 71)]})),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grammar_is_soon_done_with(model: ServedModel, name: str) -> None:
    """Accepted or not, within the deadline; and the next grammar is checked."""
    kind, text = HOSTILE[name]
    async with grammar_checker(model) as checker:
        await checker.check(Grammar("regex", "a", EOS), "")
        began = time.monotonic()
        with contextlib.suppress(InvalidGrammar):
            await checker.check(Grammar(kind, text, EOS), "")
        assert time.monotonic() - began < 60
        await checker.check(Grammar("regex", "b", EOS), "")


@pytest.mark.slow
async def test_slow_grammars_of_one_tenant_delay_another_by_one_of_them(model: ServedModel) -> None:
    order: list[str] = []
    async with grammar_checker(model) as checker:

        async def check(tenant: str, text: str) -> None:
            with contextlib.suppress(InvalidGrammar, Overloaded):
                await checker.check(Grammar("lark", text, EOS), tenant)
            order.append(tenant)

        await check("a", 'start: "a"')
        slow = [doubled("A", 20 + number) for number in range(4)]
        await asyncio.gather(*(check("a", text) for text in slow), check("b", 'start: "b"'))
    assert len(order) == 6
    assert order.index("b") <= 2


@pytest.mark.slow
async def test_too_many_waiting_grammars_of_a_tenant_are_refused(model: ServedModel) -> None:
    async with grammar_checker(model) as checker:
        checks = [checker.check(Grammar("regex", f"a{{{number}}}", EOS), "a") for number in range(70)]
        answers = await asyncio.gather(*checks, return_exceptions=True)
        assert Counter(type(answer).__name__ for answer in answers) == {"Grammar": 64, "Overloaded": 6}
        assert await checker.check(Grammar("regex", "b", EOS), "a")


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"score": {"type": "integer"}}, "patternProperties": {"^score$": {}},
         "additionalProperties": False},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    ],
    ids=["names", "recursion"],
)  # fmt: skip
async def test_a_schema_without_a_way_to_an_end_is_400_at_once(tmp_path: Path, schema: dict[str, Any]) -> None:
    async with door(tmp_path) as client:
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        status, answer, _ = await client.post("/v1/completions", {"prompt": "x", "response_format": form})
        assert (status, answer["error"]["param"]) == (400, "response_format"), answer


@pytest.mark.slow
async def test_an_invalid_grammar_is_400_with_its_field(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        bad, good = {"not": {}}, {"type": "integer"}
        body = {"prompt": "x", "max_tokens": 3}
        for fields, param in (
            ({"structured_outputs": {"json": bad}}, "structured_outputs"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": bad}}}, "response_format"),
            ({"guided_json": good}, "guided_json"),
        ):
            status, answer, headers = await client.post("/v1/completions", body | fields)
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert headers["baton-reason"] in ("invalid_grammar", "unsupported_field")
        status, _, _ = await client.post("/v1/completions", body | {"structured_outputs": {"json": good}})
        assert status == 200
