"""A conversation as the chat template writes it, with the characters that training should weigh.

Owns the format between messages and text, in Python. `template.jinja` says the same for servers; a test compares them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TOOL_MARKERS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>")
TEMPLATE = Path(__file__).parent / "template.jinja"

TOOLS_BEFORE = "You can call these tools:\n<tools>\n"
TOOLS_AFTER = "</tools>\nWrite a call as a JSON object with name and arguments inside <tool_call>."

PROSE, SPOKEN, VALUE, OPENING = 0, 1, 2, 3
"""Kinds of text: what the model reads, what the assistant says, the words of it that only the context tells, and its
first words, which decide what is answered at all."""
_OPENING_WORDS = 3


@dataclass(frozen=True)
class Message:
    """One message. `values` are parts of `content` that only the context tells."""

    role: str
    content: str
    values: tuple[str, ...] = ()
    calls: tuple[dict[str, Any], ...] = ()
    """Tool calls: objects with `name` and `arguments`."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order; `tools` are functions as OpenAI's API describes them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass
class Rendered:
    """Text and its weighed parts: (begin, end, weight) in characters, in order of writing; a later part wins."""

    text: str = ""
    parts: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, text: str, weight: int = PROSE, values: tuple[str, ...] = ()) -> None:
        """Append `text` with `weight`; each of `values` found in it counts as `VALUE`."""
        begin = len(self.text)
        self.text += text
        if weight != PROSE:
            self.parts.append((begin, len(self.text), weight))
            opening = " ".join(text.split(" ")[:_OPENING_WORDS])
            self.parts.append((begin, begin + len(opening), OPENING))
        for value in values:
            at = text.rfind(value)
            assert at >= 0, f"{value!r} is not in {text!r}"
            self.parts.append((begin + at, begin + at + len(value), VALUE))


def render(conversation: Conversation) -> Rendered:
    """Return the conversation's text, as `template.jinja` renders it."""
    rendered = Rendered()
    messages = list(conversation.messages)
    system = messages.pop(0).content if messages[0].role == "system" else ""
    if system or conversation.tools:
        rendered.add(f"{BEGIN}system\n{system}")
        if conversation.tools:
            rendered.add("\n" if system else "")
            rendered.add(TOOLS_BEFORE + "".join(json.dumps(tool) + "\n" for tool in conversation.tools) + TOOLS_AFTER)
        rendered.add(f"{END}\n")
    for message in messages:
        rendered.add(f"{BEGIN}{message.role}\n")
        weight = SPOKEN if message.role == "assistant" else PROSE
        rendered.add(message.content, weight, message.values)
        for number, call in enumerate(message.calls):
            rendered.add("\n" if number or message.content else "", weight)
            rendered.add(f"<tool_call>\n{json.dumps(call)}\n</tool_call>", weight, _call_values(call))
        rendered.add(END, weight)
        rendered.add("\n")
    return rendered


def _call_values(call: dict[str, Any]) -> tuple[str, ...]:
    return (call["name"], *(str(value) for value in call["arguments"].values()))
