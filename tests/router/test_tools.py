"""What clients may say of tools, how their histories become chats, and what may stand around a grammar: reasoning
before it, and calls in its place.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as HfTokenizer

from baton.config import ModelConfig
from baton.errors import InvalidRequest
from baton.grammars import matcher_of
from baton.messages import Grammar
from router.frontend.api.anthropic_messages import MessagesRequest, chat_of_messages
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.openai_responses import ResponsesRequest, chat_of_response
from router.frontend.api.protocol import refuse_unserved
from router.frontend.api.tools import Frames, planned
from router.frontend.chat.deltas import Content
from router.frontend.chat.formats import CALLS, REASONING, Calls, ChatFormat, chosen, read_template
from router.frontend.chat.repairs import Repairs
from router.frontend.detokenizer import Tokenizer
from tests.router import test_chat_api
from tests.router.chat import transcripts
from tests.router.test_chat_api import saying
from tests.router.test_repairs import grammars as grammars

NONE = ChatFormat()
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
SCHEMAS = {"f": {"type": "object", "properties": {"x": {"$ref": "#/$defs/i"}}, "required": ["x"],
                 "additionalProperties": False, "$defs": {"i": {"type": "integer"}}},
           "get-é": {"type": "object", "properties": {}, "additionalProperties": False}}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
MARKERS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>", "[TOOL_CALLS]", "[ARGS]"]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}
HERMES, HARMONY = ChatFormat("hermes", "qwen3"), ChatFormat("openai", "openai_gptoss")
F, WRONG = '{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "arguments": {}}'
G = '{"name":"get-é","arguments":{}}'
THOUGHT = "<|channel|>analysis<|message|>Hm {\n<|end|><|start|>assistant"


def tool(name: Any, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **fields)


def allowed(*tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [*tools]}}


def refused(read: Callable[[], object]) -> str:
    """The field for which a request is refused."""
    with pytest.raises(InvalidRequest) as error:
        read()
    return error.value.field


def of_messages(**fields: Any) -> ChatCompletionRequest:
    return chat_of_messages(MessagesRequest(**{"messages": [], "max_tokens": 9, **fields}), Repairs())


def of_response(**fields: Any) -> ChatCompletionRequest:
    return chat_of_response(ResponsesRequest(**{"input": "x", **fields}), Repairs())


DEEP: Any = {}
for _ in range(5_000):
    DEEP = {"not": [DEEP]}
TWO = [tool("f", {"type": "object"}), tool("g")]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("f"), tool("")]}, "tools[1].function.name"),
        ({"tools": [tool(5)]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool("f", [1])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", description=1)]}, "tools[0].function.description"),
        ({"tools": [tool(f"f{number}") for number in range(513)]}, "tools"),
        ({"tools": [tool("f", {"x": "y" * 2**20})]}, "tools"),
        ({"tools": [tool("f", DEEP)]}, "tools[0].function.parameters"),
        ({"tools": TWO, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": TWO, "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": TWO, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TWO, "tool_choice": allowed({"type": "x"})}, "tool_choice.allowed_tools.tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TWO, "tool_choice": "required", "structured_outputs": {"regex": "x"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_with_tools_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        planned(chat(**fields), HERMES)
    assert error.value.field == field
    assert field in str(error.value)


def test_without_a_known_format_calls_can_only_be_forced() -> None:
    with pytest.raises(InvalidRequest, match=r"model\.tool_call_parser"):
        planned(chat(tools=TWO), NONE)
    assert planned(chat(tools=TWO, tool_choice="none"), NONE)[1].calls is Calls.NONE
    assert planned(chat(tools=TWO, tool_choice="required"), NONE)[1].calls is Calls.REQUIRED
    for neutral in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}):
        assert planned(chat(**neutral), NONE)[1].calls is Calls.NONE


def test_the_model_sees_the_tools_that_it_may_call() -> None:
    def seen(**fields: Any) -> list[str]:
        request, plan = planned(chat(tools=TWO, **fields), HERMES)
        assert set(plan.names) <= {"f", "g"}
        return [one["function"]["name"] for one in request.tools or ()]

    assert seen() == seen(tool_choice="auto") == seen(tool_choice="required") == ["f", "g"]
    assert seen(tool_choice="none") == []
    assert seen(tool_choice=allowed({"type": "function", "function": {"name": "g"}})) == ["g"]


def test_forced_calls_are_a_schema() -> None:
    properties = {"x": {"$ref": "#/$defs/X"}, "self": {"$ref": "#"}}
    parameters = {"type": "object", "properties": properties, "$defs": {"X": {}}}
    request, plan = planned(chat(tools=[tool("f", parameters), tool("g")], tool_choice="required"), HERMES)
    assert (plan.framed, plan.constrained, request.chat_template_kwargs) == (True, False, None)
    schema = request.structured_outputs["json"]
    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {"name": {"const": "f"}, "parameters": {"$ref": "#/$defs/t0"}}
    # A resource of its own, within which its references stay right.
    assert schema["$defs"]["t0"] == parameters | {"$id": "baton://tools/0/"}
    assert second["properties"]["parameters"] == {"$ref": "#/$defs/t1"}
    assert "maxItems" not in schema
    request, _ = planned(chat(tools=TWO, tool_choice="required", parallel_tool_calls=False), HERMES)
    assert request.structured_outputs["json"]["maxItems"] == 1
    named = {"type": "function", "function": {"name": "f"}}
    request, plan = planned(chat(tools=TWO, tool_choice=named, chat_template_kwargs={"enable_thinking": True}), NONE)
    assert (request.structured_outputs["json"], plan.names) == ({"type": "object"}, ("f",))
    assert (plan.framed, plan.constrained) == (False, True)
    off, _ = planned(chat(tools=TWO, tool_choice=named, reasoning_effort="none"), HERMES)
    assert off.chat_template_kwargs == {"enable_thinking": False, "thinking": False}


INTEGER = {"type": "integer"}
REFERRING = {
    "pointer": {"properties": {"x": {"$ref": "#/$defs/i"}}, "$defs": {"i": INTEGER}},
    "anchor": {"properties": {"x": {"$ref": "#whole"}}, "$defs": {"i": {"$anchor": "whole", **INTEGER}}},
    "identifier": {
        "$id": "https://example.com/t", "properties": {"x": {"$ref": "/t#/$defs/i"}}, "$defs": {"i": INTEGER},
    },
    "identifier of a part": {"properties": {"x": {"$ref": "part"}}, "$defs": {"i": {"$id": "part", **INTEGER}}},
}  # fmt: skip


@pytest.mark.parametrize("name", REFERRING)
def test_references_within_a_tool_mean_the_same_in_the_grammar_of_all_tools(name: str) -> None:
    """Two tools with the same names within, of which the second one's are texts."""
    closed = {"type": "object", "required": ["x"], "additionalProperties": False}
    first = closed | REFERRING[name]
    second = json.loads(json.dumps(first).replace("integer", "string").replace("/t", "/u"))
    request, _ = planned(chat(tools=[tool("f", first), tool("g", second)], tool_choice="required"), HERMES)
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(request.structured_outputs["json"] | {"x-guidance": {"whitespace_flexible": False}})
    )

    def allows(text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(list(text.encode())) and not matcher.is_error()

    assert allows('[{"name":"f","parameters":{"x":1}}]')
    assert not allows('[{"name":"f","parameters":{"x":"1"}}]')
    assert allows('[{"name":"g","parameters":{"x":"1"}}]')
    assert not allows('[{"name":"g","parameters":{"x":1}}]')


def test_a_turn_with_calls_of_anthropics() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Look:"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "20"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    request = of_messages(messages=messages, tools=tools, tool_choice={"type": "any"})
    assert request.messages == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Look:"}],
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "20"}], "name": "f"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    assert request.tool_choice == "required"
    assert request.include_reasoning is False
    assert of_messages(messages=messages, thinking={"type": "between_tools"}).include_reasoning is True
    choice, nameless, strange = {"type": "x"}, [{"name": "f"}], [{"type": "wizard"}]
    for wrong in ({"tool_choice": choice}, {"tools": nameless}, {"tools": strange}, {"thinking": {}}):
        assert refused(lambda wrong=wrong: of_messages(messages=messages, **wrong)).startswith(next(iter(wrong)))


def test_a_turn_with_calls_of_responses() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "20"},
        {"type": "function_call_output", "call_id": "c2", "output": "30"},
        {"type": "message", "role": "assistant", "content": "Fine."},
    ]
    request = of_response(input=items, reasoning={"effort": "none"})
    roles = [message["role"] for message in request.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    turn = request.messages[1]
    assert (turn["reasoning_content"], turn["content"][0]["text"]) == ("Hm.", "Look:")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["f", "g"]
    assert [message["name"] for message in request.messages[2:4]] == ["f", "g"]
    assert request.reasoning_effort == "none"
    for item in ({"type": "function_call"}, {"type": "wizard"}, {"type": "function_call_output", "call_id": 5}):
        assert refused(lambda item=item: of_response(input=[item])).startswith("input[0]")


def test_the_template_tells_the_format() -> None:
    for template, tools, reasoning in (
        (None, None, None),
        ("{{ messages }}", None, None),
        ("{{ tools }}<tool_call>{{ enable_thinking }}<think></think>", "hermes", "qwen3"),
        ("{{ tools }}<tool_call><function=", "qwen3_coder", None),
        ("{{ tools }}<tool_call><arg_key>{{ enable_thinking }}</think>", "glm45", "qwen3"),
        ("{{ tools }}<minimax:tool_call><invoke name=", "minimax_m2", None),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi_k2", None),
        ("{{ tools }}<｜tool▁calls▁begin｜>```json", "deepseek_v3", None),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜Assistant｜></think>", "deepseek_v31", "deepseek_r1"),
        ("{{ tools }}<|start_header_id|>", "llama3_json", None),
        ("<|start_header_id|>", None, None),
        ("{{ tools }}<|start_header_id|>[func_name1(", None, None),
        ("{{ tools }}[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("{{ tools }}<|channel|>analysis", "openai", "openai_gptoss"),
        ("<｜Assistant｜><think>", None, "deepseek_r1"),
    ):
        assert chosen(template, "auto", "auto") == ChatFormat(tools, reasoning)
    assert chosen("{{ tools }}<tool_call>", "none", "deepseek_r1") == ChatFormat(None, "deepseek_r1")
    for name in CALLS:
        assert chosen(None, name, "none") == ChatFormat(name)


def test_the_configuration_knows_every_parser() -> None:
    hints = get_type_hints(ModelConfig)
    assert set(get_args(hints["tool_call_parser"])) == {"auto", "none", *CALLS}
    assert set(get_args(hints["reasoning_parser"])) == {"auto", "none", *REASONING}


def test_fields_that_are_not_served_are_refused_by_name() -> None:
    for fields in (
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"web_search_options": {}},
        {"thinking_token_budget": 64},
        {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
        {"logprob_token_ids": [1]},
        {"prompt_embeds": "AAAA"},
        {"moderation": {"model": "m"}},
        {"regex": "a+"},
        {"ebnf": 'root ::= "a"'},
        {"grammar": 'root ::= "a"'},
        {"json_schema": {"type": "object"}},
    ):
        assert refused(lambda fields=fields: refuse_unserved(chat(**fields))) == next(iter(fields))
    refuse_unserved(chat(functions=[], function_call="auto", modalities=["text"]))
    for field in ("prompt", "context_management", "conversation", "moderation", "previous_input_messages"):
        assert refused(lambda field=field: of_response(**{field: [{"id": "x"}]})) == field
    for fields, field in (
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ):
        assert refused(lambda fields=fields: of_response(**fields)) == field
    for field in ("mcp_servers", "container", "thread", "compaction"):
        assert refused(lambda field=field: of_messages(**{field: [{"url": "x"}]})) == field
    assert of_messages(mcp_servers=[]).response_format is None


def test_fields_of_chats_mean_the_same_in_responses() -> None:
    fields: dict[str, Any] = {
        "stop": ["x"], "stop_token_ids": [5], "presence_penalty": 1.0, "frequency_penalty": 1.0, "min_tokens": 2,
        "repetition_penalty": 1.5, "logit_bias": {5: 1.0}, "structured_outputs": {"regex": "a+"}, "session_id": "s",
        "skip_special_tokens": False, "include_stop_str_in_output": True, "chat_template_kwargs": {"a": 1},
    }  # fmt: skip
    request = of_response(**fields)
    assert {name: getattr(request, name) for name in fields} == fields


def test_tools_in_the_input_of_responses() -> None:
    """As Codex sends them: the last tool of a name counts."""
    function = {"type": "function", "name": "f", "description": "old"}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [function, {"type": "web_search"}]},
        {"role": "user", "content": "x"},
        {"type": "additional_tools", "tools": [
            function | {"description": "new"}, {"type": "namespace", "name": "n", "tools": [function]},
        ]},
        {"type": "function_call", "call_id": "c", "namespace": "n", "name": "f", "arguments": "{}"},
    ]  # fmt: skip
    request = of_response(input=items, tool_choice={"type": "function", "name": "f"})
    seen = [(one["function"]["name"], one["function"]["description"]) for one in request.tools or ()]
    assert seen == [("f", "new"), ("n__f", "old")]
    assert [message["role"] for message in request.messages] == ["user", "assistant"]
    assert request.messages[1]["tool_calls"][0]["function"]["name"] == "n__f"
    for tools, field in (("x", "input[0].tools"), ([{"type": ["x"]}], "input[0].tools[0].type")):
        wrong = [{"type": "additional_tools", "tools": tools}]
        assert refused(lambda wrong=wrong: of_response(input=wrong)) == field


def test_documents_of_anthropics_keep_what_is_said_of_them() -> None:
    text = {"type": "text", "text": "a page"}
    for block, shown in (
        ({"type": "document", "source": {"type": "content", "content": "a page"}}, "a page"),
        ({"type": "document", "source": {"type": "content", "content": [text, text]}}, "a page\na page"),
        (
            {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "a page"}},
            "T\nC\na page",
        ),
        ({"type": "search_result", "title": "T", "source": "S", "content": [text]}, "T\nS\na page"),
        ({"type": "compaction", "content": "all so far"}, "all so far"),
    ):
        request = of_messages(messages=[{"role": "user", "content": [block]}])
        assert request.messages[0]["content"] == [{"type": "text", "text": shown}]
    picture = {"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}
    shown = [{"role": "user", "content": [text, picture]}]
    assert refused(lambda: of_messages(messages=shown)) == "messages[0].content[1]"


def test_a_schema_of_anthropics() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form, "effort": "high"}}, {"output_format": form}):
        right = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
        assert of_messages(**fields).response_format == right
    for wrong in ({"type": "text"}, {"type": "json_schema"}, 5):
        assert refused(lambda wrong=wrong: of_messages(output_config={"format": wrong})) == "output_config.format"


@pytest.fixture(scope="module", params=[True, False], ids=["markers", "spelt"])
def tokenizer(request: pytest.FixtureRequest) -> HfTokenizer:
    """One that has the formats' markers as tokens, and one that spells them."""
    if not request.param:
        return HfTokenizer.from_str(test_chat_api.tokenizers.byte_level().to_str())
    with_markers = test_chat_api.tokenizer()
    with_markers.add_special_tokens(MARKERS)
    return with_markers


@pytest.mark.parametrize(
    ("form", "prompt", "texts", "others"),
    [
        (
            HERMES, "<think>\n",
            ['Hm <b> {\n</think>\n\n{"n": 1}', f"Hm</think>\n<tool_call>\n{F}\n</tool_call>",
             f"</think><tool_call>{G}</tool_call>\n<tool_call>\n{F}\n</tool_call>"],
            ['{"n": 1}', 'Hm</think>\n\n{"n": "1"}', f"Hm</think><tool_call>{WRONG}</tool_call>", "Hm", "Hm</think>",
             'Hm</think>{"n":1}x', F],
        ),
        (
            HERMES, "assistant\n",
            ['{"n": 1}', '<think>Hm</think>{"n": 1}', f"<tool_call>\n{F}\n</tool_call>"],
            ['Hm</think>{"n": 1}', f"<tool_call>\n{WRONG}\n</tool_call>", "Well"],
        ),
        (HERMES, "<think>\n\n</think>\n\n", ['{"n": 1}', f"<tool_call>{F}</tool_call>"], ['<think></think>{"n": 1}']),
        (
            HARMONY, "<|start|>assistant",
            ['<|channel|>final<|message|>{"n": 1}', f'{THOUGHT}<|channel|>final <|constrain|>json<|message|>{{"n": 1}}',
             f'{THOUGHT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"x": 1}}',
             f'{THOUGHT} to=functions.get-é<|channel|>commentary json<|message|>{{}}'],
            ['{"n": 1}', f'{THOUGHT}<|channel|>final<|message|>{{"n": ""}}', THOUGHT,
             f'{THOUGHT}<|channel|>commentary to=functions.f json<|message|>{{}}'],
        ),
        (
            ChatFormat("mistral"), "",
            ['{"n": 1}', f"[TOOL_CALLS][{F}, {G}]", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]get-é[ARGS]{}'],
            [f"[{F}]", f"[TOOL_CALLS][{WRONG}]", "[TOOL_CALLS]g[ARGS]{}"],
        ),
        (
            ChatFormat("llama3_json"), "",
            ['{"n": 1}', '{"name": "f", "parameters": {"x": 1}}', '<|python_tag|>{"name":"f","parameters":{"x":1}}'],
            [F, '{"name": "g", "parameters": {}}'],
        ),
    ],
)  # fmt: skip
def test_an_output_is_reasoning_and_then_calls_or_the_answer(
    tokenizer: HfTokenizer, form: ChatFormat, prompt: str, texts: list[str], others: list[str]
) -> None:
    end = tokenizer.token_to_id("<|im_end|>") or 1
    native = LLTokenizer(tokenizer.to_str(), eos_token=end)

    def allows(text: str, **fields: Any) -> bool:
        chat = ChatCompletionRequest(messages=[], response_format=FORM, tools=TOOLS, **fields)
        _, plan = planned(chat, form)
        frame = Frames(form, Tokenizer(tokenizer), 4).frame(plan, plan.schemas, prompt, None)
        matcher = matcher_of(native, Grammar("json_schema", json.dumps(ANSWER), end, frame=frame))
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert [text for text in texts if not allows(text)] == []
    assert [text for text in others if allows(text)] == []
    several = [text for text in texts if text.count('"name"') == 2]
    assert not any(allows(text, parallel_tool_calls=False) for text in several)


CALL_F, CALL_G = '{"name":"f","parameters":{"x":1}}', '{"name":"get-é","parameters":{}}'
ON_CHANNEL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
GEMMA = chosen(None, "hf", "hf", (), read_template(transcripts.GEMMA_TEMPLATE))


@pytest.mark.parametrize(
    ("form", "prompt", "choice", "texts", "others"),
    [
        (
            HERMES, "<think>\n", "required",
            [f"Hm [\n</think>\n\n[{CALL_F},{CALL_G}]", f"</think>[{CALL_F}]"],
            [f"[{CALL_F}]", "Hm", "</think>[]", 'Hm</think>[{"name":"f","parameters":{}}]', f"</think>{CALL_F}"],
        ),
        (
            HERMES, "assistant\n", "f",
            ['{"x":1}', '<think>Hm</think>\n\n{"x":1}'],
            ["{}", "<think>Hm</think>", "<think>Hm</think>{}", 'Hm</think>{"x":1}'],
        ),
        (HERMES, "<think>\n\n</think>\n\n", "f", ['{"x":1}'], ['<think>Hm</think>{"x":1}']),
        (
            GEMMA, "model\n", "f", ['{"x":1}', '<|channel>thought\nHm<channel|>{"x":1}'],
            ["{}", '<|channel>thought\nHm<channel|>{"x":"1"}'],
        ),
        (GEMMA, "model\n<|channel>thought\n", "f", ['Hm<channel|>{"x":1}'], ['{"x":1}']),
        (
            HARMONY, "<|start|>assistant", "required",
            [f'{THOUGHT}{ON_CHANNEL}{{"x": 1}}', f'{ON_CHANNEL}{{"x": 1}}',
             f"{THOUGHT} to=functions.get-é<|channel|>commentary json<|message|>{{}}"],
            [f"[{CALL_F}]", f"{THOUGHT}<|channel|>final<|message|>[{CALL_F}]", f"{THOUGHT}{ON_CHANNEL}{{}}", THOUGHT],
        ),
        (
            HARMONY, "<|start|>assistant", "f",
            [f'{THOUGHT}{ON_CHANNEL}{{"x":1}}', f'{ON_CHANNEL}{{"x":1}}'],
            [f"{THOUGHT} to=functions.get-é<|channel|>commentary json<|message|>{{}}", '{"x":1}'],
        ),
    ],
)  # fmt: skip
def test_a_forced_call_comes_at_once_or_behind_reasoning(
    tokenizer: HfTokenizer, form: ChatFormat, prompt: str, choice: str, texts: list[str], others: list[str]
) -> None:
    end = tokenizer.token_to_id("<|im_end|>") or 1
    named = {"type": "function", "function": {"name": choice}}
    request, plan = planned(chat(tools=TOOLS, tool_choice="required" if choice == "required" else named), form)
    frame = Frames(form, Tokenizer(tokenizer), 4).frame(plan, plan.schemas, prompt, None)
    grammar = Grammar("json_schema", json.dumps(request.structured_outputs["json"]), end, frame=frame)

    def calls(text: str) -> list[tuple[str, Any]] | None:
        matcher = matcher_of(LLTokenizer(tokenizer.to_str(), eos_token=end), grammar)
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if matcher.try_consume_tokens(tokens) < len(tokens) or not matcher.is_accepting():
            return None
        for at in range(len(text)):
            parser = form.parser(plan.calls, plan.schemas, prompt=prompt)
            deltas = [*parser.feed(text[:at]), *parser.feed(text[at:]), *parser.finish()]
            assert not any(isinstance(delta, Content) for delta in deltas)
            assert ("Hm" in text) == ("Hm" in parser.output.reasoning)
        return [(call.name, json.loads(call.arguments)) for call in parser.output.calls]

    for text in texts:
        answer = calls(text)
        assert answer == [(name, {"x": 1} if name == "f" else {}) for name, _ in answer or ()] != []
    assert [text for text in others if calls(text) is not None] == []


def test_every_format_of_calls_has_a_frame(tokenizer: HfTokenizer) -> None:
    for name in CALLS.keys() - {"hf"}:
        form = ChatFormat(name, "openai_gptoss" if name == "openai" else None)
        _, plan = planned(ChatCompletionRequest(messages=[], response_format=FORM, tools=TOOLS), form)
        frame = Frames(form, Tokenizer(tokenizer), 4).frame(plan, plan.schemas, "", None)
        matcher_of(LLTokenizer(tokenizer.to_str(), eos_token=1), Grammar("regex", "a+", 1, frame=frame))


ANSWERS: list[tuple[str, str, str, list[str]]] = [
    ('<think>\nHm.\n</think>\n\n{"n": 1}', "Hm.", '{"n": 1}', []),
    (f"<think>\nHm.\n</think>\n\n{test_chat_api.CALL}", "Hm.", "", ["get_weather"]),
    ('{"n": 1}', "", '{"n": 1}', []),
]


@pytest.mark.slow
async def test_clients_read_reasoning_and_calls_or_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grammars: list[Any]
) -> None:
    async with saying(tmp_path, monkeypatch, "") as model, model.openai() as client:
        create: Callable[..., Any] = client.chat.completions.create
        fields: Any = {"model": "", "messages": test_chat_api.MESSAGES, "response_format": FORM}
        for output, thought, content, calls in ANSWERS:
            model.say(f"{output}<|im_end|>")
            for tools in ({"tools": test_chat_api.TOOLS}, {"tools": test_chat_api.TOOLS, "tool_choice": "auto"}):
                message = (await create(**fields, **tools)).choices[0].message
                names = [call.function.name for call in message.tool_calls or ()]
                assert (getattr(message, "reasoning", ""), message.content or "", names) == (thought, content, calls)
            if not calls:
                message = (await create(**fields)).choices[0].message
                assert (getattr(message, "reasoning", ""), message.content) == (thought, content)
        odd = {"type": "function", "function": {"name": "odd", "parameters": {"uniqueItems": True}}}
        raw: Any = client.chat.completions.with_raw_response.create
        assert (await raw(**fields, tools=[odd])).headers["baton-repairs"] == "schema"
        odd["function"]["strict"] = True
        with pytest.raises(test_chat_api.openai.BadRequestError, match=r"'odd'.*#/uniqueItems"):
            await raw(**fields, tools=[odd])
