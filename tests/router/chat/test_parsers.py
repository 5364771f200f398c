"""Parsers of tool calls and reasoning: each transcript in every cut comes to the same, and no text breaks them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.frontend.chat.deltas import CallArguments, CallBegin, ChatDelta, Content, Reasoning
from router.frontend.chat.families import TOOL_PARSERS, Calls, ChatFormat, ChatParser
from tests.router.chat import transcripts
from tests.router.chat.transcripts import TOOLS, Transcript


@dataclass(frozen=True)
class Family:
    """A format, which calls it may have, and its transcripts."""

    format: ChatFormat
    calls: Calls
    transcripts: Sequence[Transcript]

    def parser(self, transcript: Transcript | None = None) -> ChatParser:
        tools = TOOLS[:1] if self.calls is Calls.NAMED else TOOLS
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
    "required": Family(ChatFormat("hermes", "qwen3"), Calls.REQUIRED, transcripts.REQUIRED),
    "named": Family(ChatFormat("mistral"), Calls.NAMED, transcripts.NAMED),
}
CASES = [(name, number) for name, family in FAMILIES.items() for number in range(len(family.transcripts))]
MARKERS = [
    "<tool_call>", "</tool_call>", '{"name": "', "get_time", '", "arguments": {', "}", "]", "[", "(", ")",
    "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>",
    "<|end|>", "analysis", "to=", " ", "\n", '"', "'", "\\", ",", "=", ":", ";", "1", "\\u12", "🙂",
    "commentary to=functions.get_time",
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
    for (_, arguments), (_, wanted) in zip(calls, transcript.calls, strict=True):
        if arguments != wanted:
            assert json.loads(arguments) == wanted
    assert (parser.output.content, parser.output.reasoning) == (content, reasoning)
    assert [(call.name, call.arguments) for call in parser.output.calls] == calls
    by_character = summed(parsed(family.parser(transcript), list(transcript.text)))
    assert by_character == (content, reasoning, calls)


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
    if name in TOOL_PARSERS and name != "openai" and not calls:
        assert content == text
    json.dumps(whole, ensure_ascii=False).encode()


BEGINNINGS = [
    "", "[TOOL_CALLS]", "<tool_call>", '{"name": "get_time", "parameters": {', "[get_time(a=", "<think>", "[",
    "<|channel|>final<|message|>",
]  # fmt: skip
REPEATED = [
    "<tool_call>", '{"name": ', "[", "(", "{", " ", "\n", "<", '"', "\\", "[TOOL_CALLS]", "[get_time(a=[",
    "<|channel|>", "<think>", "get_time", '<tool_call>{"name": "get_time"', "; ", "[get_time(a='\\u",
    "<|start|>x", "a b ", "'",
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
