"""Parsers of tool calls and reasoning: each transcript in every cut comes to the same, and no text breaks them."""

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from router.frontend.chat.deltas import CallArguments, CallBegin, ChatDelta, Content, Reasoning
from router.frontend.chat.formats import CALLS, Calls, ChatFormat, chosen, read_template
from router.frontend.chat.parser import ChatParser
from tests.router.chat import transcripts
from tests.router.chat.transcripts import TOOLS, Transcript


@dataclass(frozen=True)
class Family:
    """A format, which calls it may have, and its transcripts."""

    format: ChatFormat
    calls: Calls
    transcripts: Sequence[Transcript]

    def parser(self, transcript: Transcript | None = None) -> ChatParser:
        tools = {"get_weather": TOOLS["get_weather"]} if self.calls is Calls.NAMED else TOOLS
        return self.format.parser(self.calls, tools, prompt=transcript.prompt if transcript else "")


FAMILIES = {
    "hermes": Family(ChatFormat("hermes"), Calls.AUTO, transcripts.HERMES),
    "llama3_json": Family(ChatFormat("llama3_json"), Calls.AUTO, transcripts.LLAMA),
    "mistral": Family(ChatFormat("mistral"), Calls.AUTO, transcripts.MISTRAL),
    "openai": Family(ChatFormat("openai", "openai_gptoss"), Calls.AUTO, transcripts.HARMONY),
    "deepseek_r1": Family(ChatFormat(None, "deepseek_r1"), Calls.NONE, transcripts.DEEPSEEK),
    "qwen3": Family(ChatFormat(None, "qwen3"), Calls.NONE, transcripts.QWEN3),
    "mistral reasoning": Family(ChatFormat(None, "mistral"), Calls.NONE, transcripts.MAGISTRAL),
    "qwen3 with calls": Family(ChatFormat("hermes", "qwen3"), Calls.AUTO, transcripts.QWEN3_CALLS),
    "qwen3 unclosed": Family(ChatFormat("hermes", "qwen3"), Calls.AUTO, transcripts.UNCLOSED),
    "qwen3_coder": Family(ChatFormat("qwen3_coder"), Calls.AUTO, transcripts.QWEN3_CODER),
    "glm45": Family(ChatFormat("glm45", "glm45"), Calls.AUTO, transcripts.GLM),
    "minimax_m2": Family(ChatFormat("minimax_m2", "minimax_m2"), Calls.AUTO, transcripts.MINIMAX),
    "deepseek_v3": Family(ChatFormat("deepseek_v3"), Calls.AUTO, transcripts.DEEPSEEK_V3),
    "deepseek_v31": Family(ChatFormat("deepseek_v31"), Calls.AUTO, transcripts.DEEPSEEK_V31),
    "kimi_k2": Family(ChatFormat("kimi_k2", "kimi_k2"), Calls.AUTO, transcripts.KIMI),
    "openai by tokens": Family(
        ChatFormat("openai", "openai_gptoss", transcripts.HARMONY_SPECIAL), Calls.AUTO, transcripts.HARMONY_TOKENS
    ),
    "required": Family(ChatFormat("hermes", "qwen3"), Calls.REQUIRED, transcripts.REQUIRED),
    "named": Family(ChatFormat("mistral"), Calls.NAMED, transcripts.NAMED),
    "hf gemma": Family(
        chosen(None, "hf", "hf", (), read_template(transcripts.GEMMA_TEMPLATE)), Calls.AUTO, transcripts.GEMMA
    ),
    "hf lines": Family(
        chosen(None, "hf", "none", (), read_template(transcripts.LINES_TEMPLATE)), Calls.AUTO, transcripts.LINES
    ),
}
CASES = [(name, number) for name, family in FAMILIES.items() for number in range(len(family.transcripts))]
MARKERS = [
    "<tool_call>", "</tool_call>", '{"name": "', "get_time", '", "arguments": {', "}", "]", "[", "(", ")",
    "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>",
    "<|end|>", "analysis", "to=", " ", "\n", '"', "'", "\\", ",", "=", ":", ";", "1", "\\u12", "🙂",
    "commentary to=functions.get_time", transcripts.MARK, "<function=get_time>", "<parameter=a>", "</parameter>",
    "</function>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.add:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<minimax:tool_call>",
    '<invoke name="add">', '<parameter name="a">', "</invoke>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>get_time",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\n```json\n", "<tool_call>get_time", transcripts.CALL, "assistant",
    "<|tool_call>call:get_time", '<|"|>', "<tool_call|>", "a", "<call>get_time", "</call>",
]  # fmt: skip


def parsed(parser: ChatParser, pieces: Sequence[str]) -> list[ChatDelta]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return [*deltas, *parser.finish()]


def summed(deltas: Sequence[ChatDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls as a client adds them up."""
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegin(index, _, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, reasoning, calls


def cut(text: str, points: Sequence[int]) -> list[str]:
    edges = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_transcript_comes_to_what_it_says(name: str, number: int) -> None:
    family = FAMILIES[name]
    transcript = family.transcripts[number]
    parser = family.parser(transcript)
    deltas = parsed(parser, [transcript.text])
    content, reasoning, calls = summed(deltas)
    assert (content, reasoning) == (transcript.content, transcript.reasoning)
    assert [called for called, _ in calls] == [called for called, _ in transcript.calls]
    for (_, arguments), (_, right) in zip(calls, transcript.calls, strict=True):
        if arguments != right:
            assert json.loads(arguments) == right
    assert (parser.output.content, parser.output.reasoning) == (content, reasoning)
    assert [(call.name, call.arguments) for call in parser.output.calls] == calls
    by_character = summed(parsed(family.parser(transcript), list(transcript.text)))
    assert by_character == (content, reasoning, calls)
    for at in range(len(transcript.text)):
        assert summed(parsed(family.parser(transcript), [transcript.text[:at], transcript.text[at:]])) == by_character


@given(st.sampled_from(CASES), st.lists(st.integers(0, 2_000), max_size=12))
def test_pieces_add_up_however_a_transcript_is_cut(case: tuple[str, int], points: list[int]) -> None:
    family = FAMILIES[case[0]]
    transcript = family.transcripts[case[1]]
    whole = summed(parsed(family.parser(transcript), [transcript.text]))
    assert summed(parsed(family.parser(transcript), cut(transcript.text, points))) == whole


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.sampled_from(MARKERS) | st.text(st.characters(codec="utf-8"), max_size=8)),
    st.lists(st.integers(0, 500), max_size=8),
)
@settings(max_examples=400)
def test_any_text_comes_to_the_same_however_it_is_cut(name: str, parts: list[str], points: list[int]) -> None:
    text = "".join(parts)
    family = FAMILIES[name]
    whole = summed(parsed(family.parser(), [text]))
    assert summed(parsed(family.parser(), cut(text, points))) == whole
    content, _, calls = whole
    if name in CALLS and family.format.reasoning_parser is None and not calls:
        assert content == text.replace(transcripts.MARK, "")
    json.dumps(whole, ensure_ascii=False).encode()


def test_calls_in_reasoning_that_never_ends_may_not_count() -> None:
    output = transcripts.UNCLOSED[0]
    parser = ChatFormat("hermes", "qwen3").parser(Calls.AUTO, TOOLS, prompt=output.prompt, rescues=lambda: False)
    assert summed(parsed(parser, [output.text])) == ("", output.text, [])


def test_a_call_has_the_name_that_the_model_gives_it() -> None:
    parser = ChatFormat("kimi_k2").parser(Calls.AUTO, TOOLS)
    parsed(parser, [transcripts.kimi(transcripts.TIME, transcripts.TIME)])
    assert [call.id for call in parser.output.calls] == ["functions.get_time:0", "functions.get_time:1"]


@pytest.mark.parametrize("beginning", ["Hi", "<think>Hi"])
def test_a_piece_of_text_takes_few_calls(beginning: str) -> None:
    """Every token of a chat takes them."""
    parser, calls = ChatFormat("hermes", "qwen3").parser(Calls.AUTO, TOOLS), Counter[str]()
    parser.feed(beginning)
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        for _ in range(100):
            parser.feed(" there")
    finally:
        sys.setprofile(None)
    assert calls["call"] <= 900


CODER = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}
OBJECTS = {
    "start_anchor": ["<|im_start|>assistant\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}  # fmt: skip
LIST = OBJECTS | {
    "fields": {
        "tool_calls": {
            "open": "<calls>", "close": "</calls>", "content": "json", "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {"open": "<answer>", "close": "</answer>"},
    },
}  # fmt: skip
CUTS = {
    "hf xml": (
        CODER,
        "Hm.\n</think>\n\nLook:\n\n" + transcripts.coder(("add", {"a": 3.5, "ok": True})),
        "<|im_start|>assistant\n<think>\n",
    ),
    "hf json": (OBJECTS, f"<think>Hm.</think>Look: {transcripts.CALL}\n{transcripts.CALL}", "<|im_start|>assistant\n"),
    "hf gemma": (
        transcripts.GEMMA_TEMPLATE,
        f"Look:{transcripts.gemma(transcripts.ADD)}{transcripts.gemma(transcripts.WEATHER)}",
        "<|turn>model\n<|channel>thought\n<channel|>",
    ),
    "hf lines": (
        transcripts.LINES_TEMPLATE,
        f"Look:{transcripts.lines(transcripts.WEATHER)}{transcripts.lines(('add', {'a': 3.5, 'ok': True}))}",
        "model\n",
    ),
    "hf list": (LIST, f"x<answer>Look.</answer>\n<calls>[{transcripts.named(transcripts.ADD)}]</calls>y", ""),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_response_template_parses_as_with_transformers(name: str) -> None:
    """The same calls at every cut. White space beside reasoning and calls is not compared."""
    spec, text, prompt = CUTS[name]
    tools: Any = [{"function": {"name": tool, "parameters": parameters}} for tool, parameters in TOOLS.items()]
    right = parse_response(text, spec, prefix=prompt, tools=tools)
    form = chosen(None, "auto", "auto", (), read_template(spec))
    assert form.tool_parser == "hf"
    for at in range(len(text) + 1):
        content, reasoning, calls = summed(
            parsed(form.parser(Calls.AUTO, TOOLS, prompt=prompt), [text[:at], text[at:]])
        )
        assert content.split() == right.get("content", "").split()
        assert reasoning == right.get("reasoning_content", right.get("thinking", ""))
        assert [{"name": called, "arguments": json.loads(parameters)} for called, parameters in calls] == [
            call["function"] for call in right["tool_calls"]
        ]
    without = summed(parsed(form.parser(prompt=prompt), [text]))
    assert without[1:] == (right.get("reasoning_content", right.get("thinking", "")), [])
    if form.reasoning_parser:
        assert form.reasoning_end == ("<channel|>" if name == "hf gemma" else "</think>")


def test_reasoning_of_a_response_template_goes_with_calls_of_another_format() -> None:
    form = chosen("{{ tools }}<tool_call>", "auto", "auto", (), read_template(OBJECTS))
    assert (form.tool_parser, form.reasoning_parser) == ("hermes", "hf")
    output = transcripts.QWEN3_CALLS[1]
    parser = form.parser(Calls.AUTO, TOOLS, prompt=output.prompt)
    assert summed(parsed(parser, [output.text]))[1] == output.reasoning
    assert len(parser.output.calls) == 1


def test_a_response_template_that_is_not_served_is_refused_with_what_it_has() -> None:
    call = OBJECTS["fields"]["tool_calls"]
    for spec, reason in (
        ({"fields": {"content": {}}, "version": 2}, "version 2"),
        ({"fields": {"images": {}}}, "'images'"),
        ({"fields": {"tool_calls": call | {"content": "kv-lines"}}}, "kv-lines"),
        ({"fields": {"tool_calls": call | {"content_args": {"allow_non_json": True}}}}, "allow_non_json"),
        ({"fields": {"tool_calls": call | {"content_args": {"kv_sep": ""}}}}, "kv_sep"),
        ({"fields": {"tool_calls": call | {"open_pattern": "(a)+"}}}, r"\(a\)\+"),
        ({"fields": {"content": {"open": 5}}}, "open"),
        ({"fields": {"content": {}}, "start_anchor_pattern": "("}, "subpattern"),
        (5, "object"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_template(spec)


BEGINNINGS = [
    "", "[TOOL_CALLS]", "<tool_call>", '{"name": "get_time", "parameters": {', "[get_time(a=", "<think>", "[",
    "<|channel|>final<|message|>",
]  # fmt: skip
REPEATED = [
    "<tool_call>", '{"name": ', "[", "(", "{", " ", "\n", "<", '"', "\\", "[TOOL_CALLS]", "[get_time(a=[",
    "<|channel|>", "<think>", "get_time", '<tool_call>{"name": "get_time"', "; ", "[get_time(a='\\u",
    "<|start|>x", "a b ", "'", "<tool_call><function=f>", "<function=f>\n<parameter=a>", "</parameter>", "<arg_key>a",
    "<tool_call>f<arg_key>a</arg_key><arg_value>", "<minimax:tool_call>", '<parameter name="', "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
    transcripts.MARK, "assistant", "<|tool_call>call:add{", "a:", '<|"|>', "<call>f", "a=b", "a\n",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_work_is_proportional_to_the_text(name: str) -> None:
    """A quadratic parser takes minutes for one of these."""
    begun = time.process_time()
    for part in REPEATED:
        for beginning in BEGINNINGS:
            text = beginning + part * (20_000 // len(part))
            parsed(FAMILIES[name].parser(), [text[at : at + 10] for at in range(0, len(text), 10)])
    assert time.process_time() - begun < 30
