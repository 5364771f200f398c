"""What may stand around a structured output: reasoning before it, and calls of tools in its place.

A frame is a grammar in llguidance's Lark that has the output's own grammar as `@output`. So a model that thinks first
is bound only behind its reasoning, and a model with tools either calls them in its own format or follows the grammar.
"""

# pyright: strict

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidGrammar
from baton.messages import MAX_GRAMMAR
from router.frontend.api.tools import Json, ToolPlan
from router.frontend.chat.formats import REASONING, Calls, ChatFormat
from router.frontend.detokenizer import Tokenizer
from router.frontend.grammar_parsing import bounded

_OBJECTS = {"hermes": "arguments", "mistral": "arguments", "llama3_json": "parameters"}
"""Formats whose calls are objects, and their member with the arguments."""
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_MARKERS = {
    "hermes": _TOOL_CALL,
    "qwen3_coder": _TOOL_CALL,
    "qwen3_xml": _TOOL_CALL,
    "glm45": _TOOL_CALL,
    "glm47": _TOOL_CALL,
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
}
"""Texts around calls. Between those of a format without objects anything may stand, as without a grammar."""
_ANY = "/(?s:.*)/"
_GAP = "GAP: /[ \\n]{0,4}/"


@dataclass(frozen=True)
class Frames:
    """Makes frames for a model."""

    form: ChatFormat
    tokenizer: Tokenizer
    json_whitespace: int

    def frame(self, plan: ToolPlan, schemas: Mapping[str, Json], prompt: str, continued: str | None) -> str:
        """Return the frame of a planned chat whose tools have these schemas; "" if nothing stands around its output.
        `prompt` is the end of the prompt, `continued` the message that the output continues. Raises InvalidGrammar."""
        if not plan.framed:
            return ""
        auto = plan.calls is Calls.AUTO
        if self.form.is_harmony:
            rules = list(self._harmony(plan, schemas if auto else {}))
        else:
            rules = [f"answer: {'calls | ' if auto else ''}@output"]
            rules += self._calls(plan, schemas) if auto else ()
            rules += self._reasoning(prompt, continued)
        frame = "\n".join([*rules, _GAP])
        if len(frame) > MAX_GRAMMAR:
            raise InvalidGrammar(f"the tools' schemas have {len(frame)} characters; at most {MAX_GRAMMAR} may be")
        return frame

    def _reasoning(self, prompt: str, continued: str | None) -> Iterator[str]:
        think = REASONING[self.form.reasoning_parser] if self.form.reasoning_parser else None
        if think is None or (continued is None and prompt.rstrip().endswith(think.end)):
            yield "start: answer"
            return
        inside = think.inside(prompt, continued)
        yield "start: thought answer" if inside else f"start: answer | {self._text(think.begin)} thought answer"
        yield from self._until("thought", think.end)

    def _calls(self, plan: ToolPlan, schemas: Mapping[str, Json]) -> Iterator[str]:
        name = self.form.tool_parser or ""

        def repeated(rule: str, between: str) -> str:
            return f"{rule} ({between} {rule})*" if plan.parallel else rule

        if name == "mistral":
            begin, arguments = self._text("[TOOL_CALLS]"), self._text("[ARGS]")
            named = [f"{_quoted(tool)} {arguments} schema_{number}" for number, tool in enumerate(schemas)]
            objects = repeated("object", 'GAP "," GAP')
            yield f'calls: {begin} GAP "[" GAP {objects} GAP "]" | {repeated("named", "")}'
            yield f"named: {begin} ({' | '.join(named)})"
        elif name == "llama3_json":
            objects = repeated("object", 'GAP ";" GAP')
            yield f"calls: {self._text('<|python_tag|>')}? {objects}"
        elif name not in _MARKERS:
            raise InvalidGrammar(
                f"no grammar of calls is known for the format {name!r}: send tools or a response_format, not both"
            )
        else:
            begin, end = _MARKERS[name]
            yield f"calls: {repeated('call', 'GAP')}"
            if name in _OBJECTS:
                yield f"call: {self._text(begin)} GAP object GAP {self._text(end)}"
            else:
                yield f"call: {self._text(begin)} body"
                yield from self._until("body", end)
        if name in _OBJECTS:
            yield "object: " + " | ".join(f"object_{number}" for number in range(len(schemas)))
            for number, tool in enumerate(schemas):
                members = [_quoted(json.dumps(text, ensure_ascii=False)) for text in ("name", tool, _OBJECTS[name])]
                key, value, arguments = members
                yield (
                    f'object_{number}: "{{" GAP {key} GAP ":" GAP {value} GAP "," GAP {arguments} GAP ":" GAP '
                    f'schema_{number} GAP "}}"'
                )
            yield from self._schemas(schemas)

    def _harmony(self, plan: ToolPlan, schemas: Mapping[str, Json]) -> Iterator[str]:
        """gpt-oss: messages on its channels. The prompt ends within the first header."""
        start, channel, message = map(self._text, ("<|start|>", "<|channel|>", "<|message|>"))
        json_type = f'(GAP {self._text("<|constrain|>")}? "json")?'
        yield f"start: thought* (final{' | calls' if schemas else ''})"
        yield f'thought: {channel} ("analysis" | "commentary") {message} text {start} "assistant"'
        yield from self._until("text", "<|end|>")
        yield f'final: {channel} "final" {json_type} {message} @output'
        if schemas:
            yield "calls: " + " | ".join(f"call_{number}" for number in range(len(schemas)))
            for number, tool in enumerate(schemas):
                to = _quoted(f" to=functions.{tool}")
                yield (
                    f'call_{number}: ({to} {channel} "commentary" | {channel} "commentary" {to}) {json_type} {message} '
                    f"schema_{number}"
                )
            yield from self._schemas(schemas)

    def _schemas(self, schemas: Mapping[str, Json]) -> Iterator[str]:
        for number, schema in enumerate(schemas.values()):
            yield f"schema_{number}: %json {json.dumps(bounded(schema, self.json_whitespace))}"

    def _until(self, rule: str, end: str) -> Iterator[str]:
        """A rule for any text and its end, which may be a token or spelt in several."""
        token = self.tokenizer.token_of(end)
        yield f"{rule}: ({rule}_spelt{'' if token is None else f' | {rule}_text <[{token}]>'}) GAP"
        yield f"{rule}_spelt[suffix={_quoted(end)}]: {_ANY}"
        if token is not None:
            yield f"{rule}_text: {_ANY}"

    def _text(self, marker: str) -> str:
        token = self.tokenizer.token_of(marker)
        return _quoted(marker) if token is None else f"(<[{token}]> | {_quoted(marker)})"


def _quoted(text: Any) -> str:
    return json.dumps(text, ensure_ascii=False)
