"""Reasoning before a grammar, and calls in its place: what an output may be, and what clients read of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer as HfTokenizer

from baton.grammars import matcher_of
from baton.messages import Grammar
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.tools import Frames, planned
from router.frontend.chat.formats import CALLS, ChatFormat
from router.frontend.detokenizer import Tokenizer
from tests.router import test_chat_api
from tests.router.test_chat_api import saying
from tests.router.test_repairs import grammars as grammars

ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
SCHEMAS = {"f": {"type": "object", "properties": {"x": {"$ref": "#/$defs/i"}}, "required": ["x"],
                 "additionalProperties": False, "$defs": {"i": {"type": "integer"}}},
           "get-é": {"type": "object", "properties": {}, "additionalProperties": False}}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
MARKERS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>", "[TOOL_CALLS]", "[ARGS]"]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}
HERMES, HARMONY = ChatFormat("hermes", "qwen3"), ChatFormat("openai", "openai_gptoss")
F, WRONG, G = (
    '{"name": "f", "arguments": {"x": 1}}',
    '{"name": "f", "arguments": {}}',
    '{"name":"get-é","arguments":{}}',
)
THOUGHT = "<|channel|>analysis<|message|>Hm {\n<|end|><|start|>assistant"


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
def test_clients_read_reasoning_and_calls_or_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grammars: list[Any]
) -> None:
    async def test() -> None:
        async with saying(tmp_path, monkeypatch, "") as model, model.openai() as client:
            create: Callable[..., Any] = client.chat.completions.create
            fields: Any = {"model": "", "messages": test_chat_api.MESSAGES, "response_format": FORM}
            for output, thought, content, calls in ANSWERS:
                model.say(f"{output}<|im_end|>")
                for tools in ({"tools": test_chat_api.TOOLS}, {"tools": test_chat_api.TOOLS, "tool_choice": "auto"}):
                    message = (await create(**fields, **tools)).choices[0].message
                    names = [call.function.name for call in message.tool_calls or ()]
                    assert (getattr(message, "reasoning", ""), message.content or "", names) == (
                        thought,
                        content,
                        calls,
                    )
                if not calls:
                    message = (await create(**fields)).choices[0].message
                    assert (getattr(message, "reasoning", ""), message.content) == (thought, content)
            odd = {"type": "function", "function": {"name": "odd", "parameters": {"uniqueItems": True}}}
            raw: Any = client.chat.completions.with_raw_response.create
            assert (await raw(**fields, tools=[odd])).headers["baton-repairs"] == "schema"
            odd["function"]["strict"] = True
            with pytest.raises(test_chat_api.openai.BadRequestError, match=r"'odd'.*#/uniqueItems"):
                await raw(**fields, tools=[odd])

    test_chat_api.run(test)
