"""How models write reasoning and tool calls: an entry for each format, by the names that vLLM gives them.

A chat template tells which of them its model has. A `response_template` of the tokenizer's settings, by which
transformers describes a model's answers, is read as one more. It has fields with a beginning and an end each: the
reasoning, the content and the calls. Calls may be JSON, a dialect of it as Gemma's, or parameters in tags or lines.
"""

# pyright: strict

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from router.frontend.chat.deltas import MakeId
from router.frontend.chat.parser import (
    ChatParser,
    DeltaWriter,
    Machine,
    Sink,
    State,
    StreamParser,
    Terminals,
    Tools,
    call_id,
)
from router.frontend.detokenizer import MARK

States: TypeAlias = dict[str, State]

_LETTERS = string.ascii_letters + string.digits
_NAME = r'"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*'
_OTHER = r'"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*'
_OBJECT = rf'\{{\s*(?:{_OTHER})?{_NAME}(?:{_OTHER})?"(?:arguments|parameters)"\s*:\s*(?=\{{\s*(?:"|\}}))'
_OBJECTS = {
    "object": State(Sink.NOTHING, ((_OBJECT, "arguments"),), otherwise="whole"),
    "arguments": State(Sink.JSON, then="rest"),
    "rest": State(Sink.REST, then="next"),
    "whole": State(Sink.OBJECT, then="next"),
}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SERVED = (*_REASONING, "content", "tool_calls")
_VALUE = "(?P<value>.*?)"
_Marker: TypeAlias = Annotated[str, Meta(min_length=1)]
_LEADING_SPACE = re.compile(r"^(?:\\s[*+])+")
_OF_CALLS = {"object", "arguments", "parameters", "draft"}
_WHOLE_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_LISTED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}


def _blank(name: str, otherwise: str) -> State:
    """A state with a name that drops white space."""
    return State(Sink.NOTHING, ((r"\s+", name),), otherwise=otherwise)


def _objects(content: Terminals, *after: tuple[str, str], start: Terminals = ()) -> States:
    """A format whose calls are objects such as `{"name": …, "arguments": {…}}`. Keys may have another order."""
    return {
        **_OBJECTS,
        "content": State(Sink.CONTENT, content),
        "next": State(Sink.NOTHING, after),
    } | ({"start": State(Sink.NOTHING, start)} if start else {})


def _values(begin: str, end: str, call: str, call_end: str) -> States:
    """A format whose calls are a name and a JSON value between markers, and all of them between two more."""
    return {
        "content": State(Sink.CONTENT, ((rf"{begin}\s*{call}", "arguments"),)),
        "arguments": State(Sink.JSON, then="end", otherwise="end"),
        "end": State(Sink.NOTHING, ((rf"\s*{call_end}", "next"),)),
        "next": State(Sink.NOTHING, ((rf"\s*{call}", "arguments"), (rf"\s*{end}", "content"))),
    }


def _parameters(content: Terminals, key: str, value_ends: Terminals, *after: tuple[str, str], **more: State) -> States:
    """A format whose calls are a name and parameters between markers."""
    return {
        "content": State(Sink.CONTENT, content),
        "parameters": State(Sink.NOTHING, ((key, "value"), *after)),
        "value": State(Sink.VALUE, value_ends),
        **more,
    }


def mistral_id() -> str:
    """Return a name for a call as the family's templates insist on: nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls."""

    states: Mapping[str, State]
    make_id: MakeId = call_id
    known_only: bool = False  # an object is a call only if it has no other keys and names a tool

    @property
    def start(self) -> str:
        return "start" if "start" in self.states else "content"


_PLAIN: States = {"content": State(Sink.CONTENT)}
_NO_CALLS = CallFormat(_PLAIN)
_JSON_KEY = r'\{\s*"(?:name|type|id|function|arguments|parameters)"'
_TAG = r"<\|python_tag\|>\s*"
_ARGS = r'\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{\s*(?:"|\}))'
_FUNCTION = r"<function=(?P<name>[^>\n]+)>"
_INVOKE = r'<invoke name="(?P<name>[^"\n]+)">'
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_V3 = r"<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json\s*"
_V31 = r"<｜tool▁call▁begin｜>(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*"
_KIMI = r"<\|tool_call_begin\|>\s*(?P<id>[^\s<]+)\s*<\|tool_call_argument_begin\|>\s*"
_HEADERS = (
    (r"\bto=functions\.(?P<name>[^\s<]+)|\bto=(?P<known>[^\s<]+)", "arguments"),
    (r"<\|channel\|>\s*analysis\b", "reasoning"),
)
_BODY_ENDS = (
    (r"<\|end\|>|<\|call\|>|<\|return\|>", "between"),
    (r"<\|start\|>|(?:assistant)?(?=<\|channel\|>)", "header"),
)
_HEADER = (r"\s*(?:assistant\s*)?(?:<\|start\|>|(?=<\|channel\|>))", "header")
_TO = rf"(?=to=[^<{MARK}]+<\|(?:channel|constrain|message)\|>)"
HARMONY = {
    "start": State(Sink.NOTHING, (_HEADER, (rf"\s*{_TO}", "header"))),
    "header": State(Sink.HEADER, ((r"<\|message\|>", ""),), headers=_HEADERS),
    "content": State(Sink.CONTENT, _BODY_ENDS),
    "reasoning": State(Sink.REASONING, _BODY_ENDS),
    "arguments": State(Sink.ARGUMENTS, _BODY_ENDS),
    "between": State(Sink.NOTHING, (_HEADER, (rf"\s*assistant\s*{_TO}", "header"))),
}
"""gpt-oss: messages with a header each, on the channels analysis, commentary and final. The prompt ends within the
first header."""

_CALLS = {
    "hf": _NO_CALLS,  # the tokenizer's response_template
    "hermes": CallFormat(
        _objects(((r"\n?<tool_call>\s*(?=\{)", "object"),), (r"\s*</tool_call>", "content"), (r"\s*(?=\{)", "object"))
    ),
    "llama3_json": CallFormat(
        _objects(
            ((rf"{_TAG}(?=\{{)", "object"), (rf"\n\s*(?={_JSON_KEY})", "object")),
            (rf"[\s;,]*(?:{_TAG})?(?=\{{)", "object"),
            start=((rf"\s*(?:(?={_JSON_KEY})|{_TAG}(?=\{{))", "object"),),
        ),
        known_only=True,
    ),  # nothing marks its calls but the beginning of a line
    "mistral": CallFormat(
        _objects(
            (
                (r"\[TOOL_CALLS\]\s*\[\s*(?=\{)", "object"),
                (rf"\[TOOL_CALLS\]\s*(?P<name>[\w.\-]+){_ARGS}", "value"),
            ),
            (r"[\s,]*(?=\{)", "object"),
            (r"[\s,]*\]", "content"),
        )
        | {"value": State(Sink.JSON)},
        mistral_id,
    ),
    "openai": CallFormat(HARMONY),
    "qwen3_coder": CallFormat(
        _parameters(
            ((rf"\n?<tool_call>\s*{_FUNCTION}", "parameters"), (rf"\n?{_FUNCTION}(?=\s*<parameter=)", "parameters")),
            r"\s*<parameter=(?P<key>[^>\n]+)>\n?",
            ((r"\n?</parameter>", "parameters"), (r"\n?(?=</function>\s*</tool_call>)", "parameters")),
            (r"\s*</function>", "next"),
            next=State(Sink.NOTHING, ((r"\s*</tool_call>", "content"), (rf"\s*{_FUNCTION}", "parameters"))),
        )
    ),
    "glm45": CallFormat(
        _parameters(
            ((r"\n?<tool_call>\s*(?P<name>[^\s<{]+)\s*(?=<arg_key>|</tool_call>)", "parameters"),),
            r"\s*<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>",
            ((r"</arg_value>", "parameters"),),
            (r"\s*</tool_call>", "content"),
        )
    ),
    "deepseek_v3": CallFormat(_values(*_DEEPSEEK, _V3, r"(?:```\s*)?<｜tool▁call▁end｜>")),
    "deepseek_v31": CallFormat(_values(*_DEEPSEEK, _V31, "<｜tool▁call▁end｜>")),
    "kimi_k2": CallFormat(
        _values(
            r"<\|tool_calls_section_begin\|>", r"<\|tool_calls_section_end\|>", _KIMI, r"<\|tool_call_end\|>"
        )
    ),  # the model names its calls, and its template shows these names
    "minimax_m2": CallFormat(
        _parameters(
            ((rf"\n?<minimax:tool_call>\s*{_INVOKE}", "parameters"),),
            r'\s*<parameter name="(?P<key>[^"\n]+)">',
            ((r"</parameter>", "parameters"),),
            (r"\s*</invoke>", "next"),
            next=State(Sink.NOTHING, ((r"\s*</minimax:tool_call>", "content"), (rf"\s*{_INVOKE}", "parameters"))),
        )
    ),
}  # fmt: skip
CALLS = _CALLS | {"qwen3_xml": _CALLS["qwen3_coder"], "glm47": _CALLS["glm45"]}


@dataclass(frozen=True)
class ThinkMarkers:
    """Texts around reasoning, and whether an output begins within them where the prompt has neither."""

    begin: str
    end: str
    begins_inside: bool = False

    def inside(self, prompt: str, continued: str | None = None) -> bool:
        """Whether the output begins with reasoning. `continued` is the message that it continues, if any.

        Some templates end a prompt with the opening marker, some models write it themselves, and a template that
        switches reasoning off ends the prompt with a closed pair."""
        if continued is not None:
            return continued.rfind(self.begin) > continued.rfind(self.end)
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin.rstrip()):
            return True
        return self.begins_inside and not prompt.endswith(self.end)

    def before(self, states: States, start: str) -> States:
        """The states of a format with reasoning before its answer, as far as calls in it are drafts."""
        begin, end = (f"(?:{MARK})?{re.escape(marker)}" for marker in (self.begin, self.end))
        drafts = tuple((pattern, "draft") for pattern, _ in states["content"].terminals)
        return states | {
            "outside": State(Sink.NOTHING, ((rf"\s*{begin}", "reasoning"),), otherwise=start),
            "inside": State(Sink.NOTHING, ((rf"\s*{begin}", "reasoning"),), otherwise="reasoning"),
            "reasoning": State(Sink.REASONING, ((end, "answer"), *drafts)),
            "draft": State(Sink.DRAFT, ((end, "answer"),)),
            "answer": _blank("answer", start),
        }


_THINK = ThinkMarkers("<think>", "</think>")
REASONING: dict[str, ThinkMarkers | None] = {
    "deepseek_r1": ThinkMarkers("<think>", "</think>", begins_inside=True),
    "mistral": ThinkMarkers("[THINK]", "[/THINK]"),
    "openai_gptoss": None,  # harmony
    "hf": None,  # the tokenizer's response_template
} | dict.fromkeys(("deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "qwen3"), _THINK)

_REQUIRED = _objects((), (r"[\s,]*(?=\{)", "object"), (r"[\s,]*\]", "content"), start=((r"\s*\[\s*(?=\{)", "object"),))


class Calls(Enum):
    """Which calls an output may have."""

    NONE = "none"
    AUTO = "auto"  # as the model likes, in its own format
    REQUIRED = "required"  # at least one, as a list of `{"name": …, "parameters": {…}}` in JSON
    NAMED = "named"  # one of a given function, whose parameters are the output


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes reasoning and calls. None: it has no such format, or none that is known here."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    special: frozenset[str] = frozenset()  # texts of the tokenizer's special tokens
    response: ResponseTemplate | None = None  # what "hf" stands for

    def markers(self, calls: Calls, *, constrained: bool = False) -> frozenset[str]:
        """The special tokens that a parser must see."""
        return frozenset[str]() if constrained else self._machines[calls is not Calls.NONE].special

    @property
    def is_harmony(self) -> bool:
        """Whether the model writes messages on channels, as gpt-oss does."""
        return self.reasoning_parser == "openai_gptoss" or self._calls is CALLS["openai"]

    @property
    def reasoning_end(self) -> str | None:
        if self.reasoning_parser == "openai_gptoss":
            return "<|end|>"
        return think.end if (think := self.think) else None

    @property
    def reasons(self) -> bool:
        """Whether reasoning may stand before a grammar."""
        return self.reasoning_parser == "openai_gptoss" or self.think is not None

    def parser(
        self,
        calls: Calls = Calls.NONE,
        tools: Tools | None = None,
        *,
        constrained: bool = False,
        plain: bool = False,
        prompt: str = "",
        continued: str | None = None,
        show_reasoning: bool = True,
        parallel_calls: bool = True,
        texts: Collection[str] = (),
        rescues: Callable[[], bool] = lambda: True,
    ) -> ChatParser:
        """A parser for one output. `prompt` is the end of the prompt. A constrained output has no format but that of
        forced calls. A `plain` one is the text that a named tool takes. Harmony's forced calls are in its own format.
        """
        think, forced = self.think, _PLAIN
        if calls is Calls.REQUIRED:
            forced = _REQUIRED
        elif calls is Calls.NAMED:
            (name,) = tools or ("",)
            before = State(Sink.NOTHING, otherwise="call") if plain else _blank("start", "call")
            forced = _PLAIN | {"start": before, "call": State(Sink.ARGUMENTS if plain else Sink.JSON, call=name)}
        if constrained or (forced is not _PLAIN and not self.reasons):
            machine = Machine(forced)
        elif forced is not _PLAIN and think:
            machine = self._behind(think, forced, "start")
        else:
            machine = self._machines[calls is not Calls.NONE]
        start = next(name for name in ("outside", "start", "content") if name in machine.states)
        if think and "inside" in machine.states and think.inside(prompt, continued):
            start = "inside"
        out = DeltaWriter(self._calls.make_id)
        reader = StreamParser(machine, start, out, tools or {})
        if self._template and machine in self._machines:
            reader.feed(self._template.begun(prompt))
            out.take_deltas()
        return ChatParser(
            reader, out, show_reasoning=show_reasoning, parallel_calls=parallel_calls, texts=texts, plain=plain,
            rescues=rescues, channels=self.is_harmony,
        )  # fmt: skip

    @property
    def _template(self) -> ResponseTemplate | None:
        return self.response if (self.tool_parser or self.reasoning_parser) == "hf" else None

    @property
    def think(self) -> ThinkMarkers | None:
        if self.reasoning_parser == "hf":
            return ThinkMarkers(*self.response.reasoning) if self.response and self.response.reasoning else None
        return REASONING[self.reasoning_parser] if self.reasoning_parser else None

    @property
    def _calls(self) -> CallFormat:
        return CALLS[self.tool_parser] if self.tool_parser else _NO_CALLS

    @cached_property
    def _machines(self) -> tuple[Machine, Machine]:
        """Those without and with calls."""
        return self._machine(calls=False), self._machine(calls=True)

    def _machine(self, *, calls: bool) -> Machine:
        if template := self._template:
            states = template.states if calls and self.tool_parser == "hf" else template.without_calls()
            return Machine(states, self.special, spelt=template.reasoning or ())
        form = self._calls if calls else _NO_CALLS
        if self.is_harmony:
            routes = {"arguments": calls, "reasoning": self.reasoning_parser == "openai_gptoss"}
            headers = tuple(one for one in _HEADERS if routes[one[1]])
            return Machine(HARMONY | {"header": replace(HARMONY["header"], headers=headers)}, self.special)
        if think := self.think:
            return self._behind(think, dict(form.states), form.start, known_only=form.known_only)
        return Machine(form.states, self.special, known_only=form.known_only)

    def _behind(self, think: ThinkMarkers, states: States, start: str, *, known_only: bool = False) -> Machine:
        """A machine for reasoning and what stands behind it."""
        spelt = (think.begin, think.end)
        return Machine(think.before(states, start), self.special, spelt=spelt, known_only=known_only)


NO_FORMAT = ChatFormat()


def chosen(
    template: str | None, tools: str, reasoning: str, special: Collection[str] = (),
    response: ResponseTemplate | None = None,
) -> ChatFormat:  # fmt: skip
    """The format that the configuration names: a parser, "none", or "auto" for the one that the template tells. A
    `response` template counts where the chat template tells none."""
    if tools == "auto":
        tools = _tool_parser(template or "") or ("hf" if response and response.has_calls else "none")
    if reasoning == "auto":
        reasoning = _reasoning_parser(template or "") or ("hf" if response and response.reasoning else "none")
    return ChatFormat(
        None if tools == "none" else tools, None if reasoning == "none" else reasoning, frozenset(special), response
    )


_TOOL_MARKS = {
    "<|channel|>": "openai",
    "[TOOL_CALLS]": "mistral",
    "<minimax:tool_call>": "minimax_m2",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<tool_call>": "hermes",
    "[func_name1(": None,  # asks for Python
    "<|python_tag|>": "llama3_json",
    "<|start_header_id|>": "llama3_json",
}


def _tool_parser(template: str) -> str | None:
    if "tools" not in template:
        return None
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return next((name for mark, name in _TOOL_MARKS.items() if mark in template), None)


def _reasoning_parser(template: str) -> str | None:
    if "<|channel|>" in template:
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template and "<think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


class _Args(Struct, forbid_unknown_fields=True):
    strip: bool = True
    unquoted_keys: bool = False
    string_delims: list[tuple[_Marker, _Marker]] = []
    tag_pattern: str = ""
    line_sep: _Marker = "\n"
    kv_sep: _Marker = ":"


class _Field(Struct):
    open: str | list[str] = []
    open_pattern: str = ""
    close: str | list[str] = []
    close_pattern: str = ""
    content: str = "text"
    content_args: _Args = field(default_factory=_Args)
    transform: Any = None
    transform_each: bool = False

    @property
    def opens(self) -> list[str]:
        return _patterns(self.open, self.open_pattern)

    @property
    def closes(self) -> list[str]:
        return _patterns(self.close, self.close_pattern)


class _Spec(Struct):
    fields: dict[str, _Field]
    version: int = 1
    start_anchor: str | list[str] = []
    start_anchor_pattern: str = ""


@dataclass(frozen=True)
class ResponseTemplate:
    """A template that has been read."""

    states: Mapping[str, State]
    anchor: re.Pattern[str]  # what stands before the answer
    reasoning: tuple[str, str] | None = None  # texts around it
    has_calls: bool = False

    def without_calls(self) -> dict[str, State]:
        """Return the states for an output that has none."""
        return {
            name: replace(state, terminals=tuple(one for one in state.terminals if one[1] not in _OF_CALLS))
            for name, state in self.states.items()
        }

    def begun(self, prompt: str) -> str:
        """Return how much of the answer the end of a prompt has already."""
        ends = [match.end() for match in self.anchor.finditer(prompt)]
        return prompt[ends[-1] :] if ends else ""


def read_template(tree: object) -> ResponseTemplate:
    """Read a `response_template`. Raises ValueError for one with fields or patterns that are not served."""
    try:
        spec = msgspec.convert(tree, _Spec)
        anchor = re.compile("|".join(_patterns(spec.start_anchor, spec.start_anchor_pattern)) or "(?!)", re.DOTALL)
    except (msgspec.ValidationError, re.error) as error:
        raise ValueError(str(error)) from None
    if spec.version != 1:
        raise ValueError(f"version {spec.version} is not served")
    if odd := [name for name in spec.fields if name not in _SERVED]:
        raise ValueError(f"field {odd[0]!r} is not served")
    content, calls = spec.fields.get("content", _Field()), spec.fields.get("tool_calls")
    thought = next((spec.fields[name] for name in _REASONING if name in spec.fields), _Field())
    home = "outside" if content.opens else "content"
    states, begins = _states_of_calls(calls, home) if calls else ({}, ())
    closes = tuple((one, home) for one in thought.closes)
    opens: Terminals = (
        *((one, "content") for one in content.opens), *((one, "reasoning") for one in thought.opens), *begins
    )  # fmt: skip
    states |= {
        "content": State(Sink.CONTENT, (*opens, *((one, home) for one in content.closes))),
        "reasoning": State(Sink.REASONING, (*closes, *((pattern, "draft") for pattern, _ in begins))),
        "draft": State(Sink.DRAFT, closes),
    }
    if home == "outside":
        states[home] = State(Sink.NOWHERE, opens)
    begin, end = thought.open, thought.close
    around = (begin, end) if isinstance(begin, str) and isinstance(end, str) else None
    Machine(states)  # its patterns can be read
    return ResponseTemplate(states, anchor, around, calls is not None)


def _states_of_calls(field: _Field, home: str) -> tuple[dict[str, State], Terminals]:
    closes = tuple((rf"\s*{one}", home) for one in field.closes)
    after = State(Sink.NOTHING, closes, otherwise=home)
    shape, args = (field.content, field.transform, field.transform_each), field.content_args
    if shape in (("json", _WHOLE_CALL, False), ("json", None, False)) and args == _Args():
        return {**_OBJECTS, "next": after}, tuple((rf"{one}\s*(?=\{{)", "object") for one in field.opens)
    if shape == ("json", _LISTED_CALL, True) and args == _Args():
        among = State(Sink.NOTHING, ((r"[\s,]*(?=\{)", "object"), (r"[\s,]*\]", "after")), otherwise=home)
        states = {**_OBJECTS, "next": among, "after": after}
        return states, tuple((rf"{one}\s*\[\s*(?=\{{)", "object") for one in field.opens)
    if shape == ("json", _NAMED_CALL, False) and args == _Args():
        states = {"arguments": State(Sink.JSON, then="next"), "next": after}
        return states, tuple((rf"{one}\s*", "arguments") for one in field.opens)
    if shape == ("json", _NAMED_CALL, False):
        return _dialect(args, closes), tuple((rf"{one}\s*", "arguments") for one in field.opens)
    if shape == ("kv-lines", _NAMED_CALL, False) and args.strip:
        return _lines(args, closes), tuple((one, "parameters") for one in field.opens)
    if shape == ("xml-inline", _NAMED_CALL, False):
        key, value, end = args.tag_pattern.partition(_VALUE)
        if value:
            parameters = State(Sink.NOTHING, ((rf"\s*{key}", "value"), *closes), otherwise=home)
            states = {"parameters": parameters, "value": State(Sink.VALUE, ((end, "parameters"),))}
            return states, tuple((one, "parameters") for one in field.opens)
    raise ValueError(f"tool_calls of content {field.content!r} with that transform and content_args are not served")


def _dialect(args: _Args, closes: Terminals) -> States:
    """Return the states of arguments in a dialect of JSON: texts between delimiters, and keys without quotes."""
    terminals = [*closes, ('"', "string")]
    terminals += ((re.escape(begin), f"text {number}") for number, (begin, _) in enumerate(args.string_delims))
    if args.unquoted_keys:
        terminals.append((r"(?P<member>\w+)(?=\s*:)", "arguments"))
    return {
        "arguments": State(Sink.ARGUMENTS, tuple(terminals)),
        "string": State(Sink.ARGUMENTS, ((r'\\\\|\\"', "string"), ('"', "arguments"))),
        **{
            f"text {number}": State(Sink.VALUE, ((re.escape(end), "arguments"),))
            for number, (_, end) in enumerate(args.string_delims)
        },
    }


def _lines(args: _Args, closes: Terminals) -> States:
    """Return the states of parameters in lines of a key, a separator and a value. Other lines are left out."""
    line, between = (re.sub(r"([\\\]^-])", r"\\\1", one[0]) for one in (args.line_sep, args.kv_sep))
    blank = rf"[^\S{line}]*"
    key = rf"(?P<key>[^{line}{between}]+){re.escape(args.kv_sep)}{blank}"
    return {
        "parameters": State(Sink.NOWHERE, (*closes, (key, "value"))),
        "value": State(Sink.VALUE, (*closes, (rf"{blank}{re.escape(args.line_sep)}", "parameters"))),
    }


def _patterns(texts: str | list[str], pattern: str) -> list[str]:
    """Return patterns for texts, or a pattern. White space before a call is layout in any case."""
    several = [texts] if isinstance(texts, str) else texts
    return [_LEADING_SPACE.sub("", pattern)] if pattern else [re.escape(one) for one in several]
