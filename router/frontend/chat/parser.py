"""The parser of all formats: a machine whose states and terminals a format declares.

Text comes in any pieces, and the deltas do not depend on where it was cut. A state has terminals, each with the state
that follows it. The text before a terminal goes where the state says. Text that turns out to be no tool
call is content, as it came.
"""

# pyright: strict

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from math import isfinite
from typing import Any, TypeAlias, cast

from router.frontend.chat.deltas import CallArguments, CallBegin, ChatDelta, ChatOutput, Content, MakeId, Reasoning
from router.frontend.chat.scanning import MOST, Hit, JsonValue, Patterns, TextArgument, Verdict, decoded
from router.frontend.detokenizer import MARK, Tokenizer

Json: TypeAlias = dict[str, Any]
Terminals: TypeAlias = tuple[tuple[str, str], ...]
"""Patterns, and the states that follow them."""
Tools: TypeAlias = Mapping[str, Json]
"""The parameters of the tools that may be called, as JSON schemas, by name."""

_MOST_HEADER = 500  # characters
_DEEPEST = 8  # schemas within each other
_ARGUMENTS = ("arguments", "parameters")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")  # gpt-oss's
_USUAL_KEYS = {"name", "type", "id", "function", *_ARGUMENTS}
_LITERALS = {"true": "boolean", "false": "boolean", "none": "null"}
"""What models write for some values, beside JSON, and their types."""
_TYPES: Mapping[type[object], str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    type(None): "null",
}
_TEXT = frozenset({"string"})
_SURROGATE = re.compile("[\ud800-\udfff]")


class Sink(Enum):
    """Where the text of a state goes."""

    CONTENT = "content"
    REASONING = "reasoning"
    ARGUMENTS = "arguments, as they come"
    JSON = "arguments that are one JSON value, as they come"
    OBJECT = "an object that is a call, once it is whole"
    REST = "nowhere: the rest of an object"
    VALUE = "a parameter"
    HEADER = "a header, which tells the next state"
    DRAFT = "reasoning, or calls if the reasoning never ends"
    NOWHERE = "nowhere"
    NOTHING = "there is none: a terminal comes at once, or another state"


@dataclass(frozen=True)
class State:
    """A state of a format. A terminal is a pattern and the state that follows it. Its named groups are the `name` and
    the `id` of a call that begins there, and the `key` of a parameter. An `id` has the name in it. A terminal between
    two states of arguments is a part of these, and its `member` gets quotation marks."""

    sink: Sink
    terminals: Terminals = ()
    then: str = "content"  # the state after a JSON value
    otherwise: str = "content"  # the state for text that can't be here
    headers: Terminals = ()  # regular expressions, and the state of the first that is in a header
    call: str = ""  # of this function, which begins with the state

    @property
    def in_call(self) -> bool:
        keys = self.sink in (Sink.NOTHING, Sink.NOWHERE) and any("(?P<key>" in pattern for pattern, _ in self.terminals)
        return keys or self.sink in (Sink.ARGUMENTS, Sink.JSON, Sink.VALUE)

    @property
    def is_tentative(self) -> bool:
        """Whether what led here is content if no call or message comes of it."""
        return self.otherwise == "whole" or self.sink in (Sink.OBJECT, Sink.HEADER)


def call_id() -> str:
    """Return a name for a call, as OpenAI's API makes them."""
    return f"call_{secrets.token_hex(12)}"


@lru_cache
def _patterns(state: State, special: frozenset[str] = frozenset()) -> Patterns:
    return Patterns([pattern for pattern, _ in state.terminals], special)


class Machine:
    """A format's states, ready to parse."""

    def __init__(
        self, states: Mapping[str, State], special: Collection[str] = (), *, spelt: Collection[str] = (),
        known_only: bool = False,
    ) -> None:  # fmt: skip
        """`special`: texts of special tokens. As other tokens they are text, but for those in `spelt`. `known_only`: an
        object is a call only if it has no other keys and names a tool. Raises ValueError for a wrong pattern."""
        literals = "\n".join(_patterns(state).literals for state in states.values())
        self.special = frozenset(one for one in special if one in literals)  # those that the parser must see
        marked = self.special.difference(spelt)
        self.states = {name: (state, _patterns(state, marked)) for name, state in states.items()}
        self.known_only = known_only


class DeltaWriter:
    """Collects deltas. White space alone between calls, or beside them, is layout and no content."""

    def __init__(self, make_id: MakeId = call_id) -> None:
        self.make_id = make_id
        self._deltas: list[ChatDelta] = []
        self._blank: list[str] = []  # what a run of content has so far, if that is white space
        self._has_text = False  # the run of content
        self._gap: list[str] = []  # white space after reasoning, or between two parts of it
        self._thought = False
        self._calls = self._parameters = 0
        self._begun = False  # the arguments
        self._types: frozenset[str] = frozenset()  # of the parameter
        self._value: list[str] = []

    def content(self, text: str) -> None:
        if not self._has_text and not text.strip():
            self._blank.append(text)
            return
        if not text:
            return
        self._has_text = True
        if self._blank:
            text = "".join((*self._blank, text))
            self._blank.clear()
        self._add(Content(text))

    def begin_reasoning(self) -> None:
        self._gap = ["\n"] if self._thought else []

    def reasoning(self, text: str) -> None:
        """Add to the reasoning, without the white space around it."""
        if not self._thought:
            text = text.lstrip()
        if body := text.rstrip():
            self._thought = True
            self._add(Reasoning("".join((*self._gap, body))))
            self._gap.clear()
        self._gap.append(text[len(body) :])

    def begin_call(self, name: str, id_: str = "") -> None:
        self._blank.clear()
        self._has_text = self._begun = False
        self._parameters = 0
        self._deltas.append(CallBegin(self._calls, id_ or self.make_id(), name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        if text:
            self._begun = True
            self._add(CallArguments(self._calls - 1, text))

    def end_call(self) -> None:
        self.arguments("}" if self._parameters else "" if self._begun else "{}")

    def begin_value(self, key: str, types: frozenset[str]) -> None:
        """Begin a parameter of some JSON types. Only a text is given out as it comes."""
        self.arguments(f"{', ' if self._parameters else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._parameters += 1
        self.begin_text(types)

    def begin_text(self, types: frozenset[str] = _TEXT) -> None:
        """Begin a text among the arguments, or a value of some JSON types."""
        self._types, self._value = types, []
        self.arguments('"' if types == _TEXT else "")

    def value(self, text: str) -> None:
        if self._types == _TEXT:
            self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def end_value(self) -> None:
        self.arguments('"' if self._types == _TEXT else _json_of("".join(self._value), self._types))

    def take_deltas(self) -> list[ChatDelta]:
        """Return what has come since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> None:
        """Give the content of an output that is nothing but white space."""
        if self._blank and not self._calls:
            self._add(Content("".join(self._blank)))

    def extend(self, deltas: Sequence[ChatDelta]) -> None:
        """Add deltas of another writer, at the end."""
        self._deltas += deltas
        self._blank.clear()

    def _add(self, delta: Content | Reasoning | CallArguments) -> None:
        if not self._deltas:  # as nearly always
            self._deltas.append(delta)
            return
        match self._deltas[-1], delta:
            case (Content(before), Content(text)):
                self._deltas[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                self._deltas[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                self._deltas[-1] = CallArguments(index, before + text)
            case _:
                self._deltas.append(delta)


class StreamParser:
    """Parses one output by a machine."""

    def __init__(self, machine: Machine, start: str, out: DeltaWriter, tools: Tools) -> None:
        self._machine = machine
        self._out = out
        self._tools = tools
        self._unread = ""
        self._raw: list[str] = []  # terminals and text that are content if no call or message comes of them
        self._held: list[str] = []  # text of this state that can't be given out yet
        self._value = JsonValue()
        self._called = ""  # the function that was called last
        self._ended = False
        self._state, self._patterns = machine.states[start]
        self.rescued = ""  # calls in reasoning that never ended, which count
        self.thought = self.thinks  # at any time

    @property
    def thinks(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        inside = self._state.sink in (Sink.REASONING, Sink.DRAFT) or self._state.otherwise == "reasoning"
        return inside and not self.rescued

    def feed(self, text: str) -> None:
        text, at, sink = self._unread + text, 0, self._state.sink
        if text and (sink is Sink.CONTENT or sink is Sink.REASONING) and not self._patterns.may_begin(text, 0):
            self._write(text)
            at = len(text)
        while at < len(text):
            before, state = at, self._state
            values = state.sink in (Sink.JSON, Sink.OBJECT, Sink.REST)
            at = self._read_value(text, at) if values else self._read_until(text, at)
            if at == before and self._state is state:
                break
        self._unread = text[at:]

    def finish(self, rescues: Callable[[], bool]) -> None:
        """Read the rest: no more comes. `rescues`: whether calls count in reasoning that has not ended."""
        self._ended = True
        self.feed("")
        if self._state.sink is Sink.DRAFT:
            self._finish_draft("".join(self._held), rescues)
        elif self._state.sink is Sink.ARGUMENTS:
            self._out.end_call()
        self._give_up()
        self._out.finish()

    def _finish_draft(self, draft: str, rescues: Callable[[], bool]) -> None:
        out = DeltaWriter(self._out.make_id)
        parser = StreamParser(self._machine, "content", out, self._tools)
        parser.feed(draft)
        parser.finish(rescues)
        deltas = out.take_deltas()
        if any(isinstance(delta, CallBegin) for delta in deltas) and rescues():
            self._out.extend(deltas)
            self.rescued = draft.replace(MARK, "")
        else:
            self._out.reasoning(draft.replace(MARK, ""))
        self._held = []

    def _read_until(self, text: str, at: int) -> int:
        state = self._state
        here = state.sink is Sink.NOTHING
        hit = self._patterns.find(text, at, ended=self._ended, here=here)
        if here and hit is None:
            self._divert(state.otherwise)
            return at
        stop = hit.start if hit else len(text)
        if state.sink is Sink.HEADER:
            room = _MOST_HEADER - sum(map(len, self._held))
            if stop - at > room:
                self._held.append(text[at : at + room])
                self._divert("content")
                return at + room
        if stop > at:
            self._write(text[at:stop])
        if hit is None or hit.number is None:
            return stop
        return self._follow(state.terminals[hit.number][1], hit, text[hit.start : hit.end])

    def _write(self, text: str) -> None:
        match self._state.sink:
            case Sink.CONTENT:
                self._out.content(text.replace(MARK, ""))
            case Sink.REASONING:
                self._out.reasoning(text.replace(MARK, ""))
            case Sink.HEADER | Sink.DRAFT:
                self._held.append(text)
            case Sink.VALUE:
                self._out.value(text.replace(MARK, ""))
            case Sink.NOWHERE:
                pass
            case _:
                self._out.arguments(text.replace(MARK, ""))

    def _follow(self, to: str, hit: Hit, matched: str) -> int:
        """Go where a terminal leads. Return the position from which on the text is unread."""
        state, groups = self._state, hit.groups
        id_ = groups.get("id", "")
        name = groups.get("name", id_.removeprefix("functions.").rpartition(":")[0] or id_).strip()
        key = groups.get("key")
        if state.sink is Sink.HEADER:
            to, name = self._after_header()
        elif name and not self._accepts(name):
            if state.sink is Sink.NOTHING:
                self._divert(state.otherwise)
                return hit.start
            self._write(matched)
            return hit.end
        if state.sink is Sink.DRAFT:
            self._out.reasoning("".join(self._held).replace(MARK, ""))
        new, _ = self._machine.states[to]
        if new.sink is Sink.DRAFT:
            name, key = "", None
        self._leave(new, another=bool(name))
        self._raw = [*self._raw, matched] if new.is_tentative else []
        if name:
            self._out.begin_call(name, id_)
            self._called = name
        if key is not None:
            self._out.begin_value(key.strip(), self._types_of(key.strip()))
        elif new.sink is Sink.VALUE:
            self._out.begin_text()
        elif state.sink is new.sink is Sink.ARGUMENTS:
            self._out.arguments(json.dumps(groups["member"]) if "member" in groups else matched)
        self._go(to)
        if new.sink is Sink.DRAFT:
            self._held.append(matched)
        return hit.end

    def _after_header(self) -> tuple[str, str]:
        """Return the state that a header leads to, and the function that it calls."""
        header = "".join((*self._raw, *self._held)).replace(MARK, "")
        for expression, to in self._state.headers:
            match = re.search(expression, header)
            groups = match.groupdict() if match else {}
            name, known = groups.get("name") or "", groups.get("known") or ""
            if match and (not name or _is_name(name)) and (not known or known in self._tools):
                return to, name or known
        return self._state.otherwise, ""

    def _divert(self, to: str) -> None:
        """Go on elsewhere: the text can't be in this state."""
        new, _ = self._machine.states[to]
        self._leave(new)
        if new.sink is Sink.CONTENT:
            self._give_up()
        self._go(to)

    def _give_up(self) -> None:
        """Take for content what was read as the beginning of a call or message."""
        self._out.content("".join((*self._raw, *self._held)).replace(MARK, ""))
        self._raw, self._held = [], []

    def _leave(self, new: State, *, another: bool = False) -> None:
        if self._state.sink is Sink.VALUE:
            self._out.end_value()
        if self._state.in_call and (another or not new.in_call):
            self._out.end_call()

    def _go(self, to: str) -> None:
        self._state, self._patterns = self._machine.states[to]
        self._held = []
        self._value = JsonValue("{" if self._state.sink is Sink.REST else "")
        if self._state.sink is Sink.REASONING:
            self.thought = True
            self._out.begin_reasoning()
        if self._state.call:
            self._out.begin_call(self._state.call)

    def _read_value(self, text: str, at: int) -> int:
        state, end = self._state, self._value.scan(text, at)
        if state.sink is Sink.JSON:
            self._out.arguments(text[at:end].replace(MARK, ""))
        elif state.sink is Sink.OBJECT:
            self._held.append(text[at:end])
        if self._value.verdict is Verdict.BAD or (
            self._value.verdict is Verdict.DONE and state.sink is Sink.OBJECT and not self._take_object()
        ):
            self._divert(state.otherwise)
        elif self._value.verdict is Verdict.DONE:
            new, _ = self._machine.states[state.then]
            self._leave(new)
            self._go(state.then)
        return end

    # --- calls -------------------------------------------------------------------------------------------------------

    def _accepts(self, name: str) -> bool:
        return name in self._tools if self._machine.known_only else _is_name(name)

    def _take_object(self) -> bool:
        """Take an object for a call. Return False if it is none."""
        value = decoded("".join(self._held))
        members = cast("Json", value) if isinstance(value, dict) else {}
        name = members.get("name")
        usual = not self._machine.known_only or members.keys() <= _USUAL_KEYS
        if not isinstance(name, str) or not _is_name(name) or not self._accepts(name) or not usual:
            return False
        self._raw = []
        self._out.begin_call(name)
        self._out.arguments(_arguments_of(next((members[key] for key in _ARGUMENTS if key in members), None)))
        return True

    def _types_of(self, key: str) -> frozenset[str]:
        """Return the JSON types that a parameter of the call may have; none if the tool's schema does not tell."""
        schema = self._tools.get(self._called, {})
        properties = schema.get("properties")
        return _types(cast("Json", properties).get(key), schema) if isinstance(properties, dict) else frozenset()


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MOST and name.isprintable()


def _arguments_of(value: object) -> str:
    """Return arguments as JSON. They may be a text that holds an object."""
    if isinstance(value, str) and isinstance(decoded(value), dict) and not _SURROGATE.search(value):
        return value
    if value is None or value == "null":
        return "{}"
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def _types(schema: Any, root: Json, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it names them."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return frozenset()
    schema = cast("Json", schema)
    match schema:
        case {"type": str(name)}:
            return frozenset({name, "null"} if schema.get("nullable") is True else {name})
        case {"type": [*names]}:
            return frozenset(name for name in names if isinstance(name, str))
        case {"enum": [*values]}:
            return frozenset(_TYPES.get(type(value), "object") for value in cast("list[object]", values))
        case {"const": value}:
            return frozenset({_TYPES.get(type(cast("object", value)), "object")})
        case {"$ref": str(reference)} if reference.startswith("#/"):
            target: Any = root
            for part in reference.removeprefix("#/").split("/"):
                target = cast("Json", target).get(part) if isinstance(target, dict) else None
            return _types(target, root, depth + 1)
        case _:
            inner = [one for name in ("anyOf", "oneOf", "allOf") for one in schema.get(name) or ()]
            return frozenset[str]().union(*(_types(one, root, depth + 1) for one in inner))


def _json_of(text: str, types: frozenset[str]) -> str:
    """Return a parameter as JSON: a text stays a text, and others are read as JSON if they are some."""
    raw = text.strip()
    if _LITERALS.get(raw.lower()) in types:
        raw = raw.lower().replace("none", "null")
    value = decoded(raw)
    is_text = ("string" in types and not (value is None and "null" in types)) or value is ...
    return (
        json.dumps(text, ensure_ascii=False) if is_text or (isinstance(value, float) and not isfinite(value)) else raw
    )


class AnalysisTokens:
    """Counts the tokens of gpt-oss's messages on the channel `analysis`, from behind their headers to their ends."""

    def __init__(self) -> None:
        self._read = self._count = self._header = 0
        self._reasons = False

    def count(self, tokens: Sequence[int], tokenizer: Tokenizer) -> int:
        """Return how many there are in an output, which may have grown since the last call."""
        channel, message, *ends = map(tokenizer.token_of, ("<|channel|>", "<|message|>", *_MESSAGE_ENDS))
        for at in range(self._read, len(tokens)):
            self._count += self._reasons
            if tokens[at] == channel:
                self._header = at + 1
            elif tokens[at] == message:
                self._reasons = tokenizer.decode(tokens[self._header : at]).lstrip().startswith("analysis")
            elif tokens[at] in ends:
                self._reasons = False
        self._read = len(tokens)
        return self._count


class ChatParser:
    """Parses one output. `output` is everything so far."""

    def __init__(
        self, reader: StreamParser, out: DeltaWriter, *, show_reasoning: bool = True, parallel_calls: bool = True,
        texts: Collection[str] = (), plain: bool = False, rescues: Callable[[], bool] = lambda: True,
        channels: bool = False,
    ) -> None:  # fmt: skip
        """Without `parallel_calls` only the first call is given. `texts` are the tools that take a text, and where the
        output is `plain` it is such a text itself. `rescues` says whether calls in reasoning that never ended count.
        With `channels` the model reasons in messages on a channel for it."""
        self._out = out
        self._reader = reader
        self._show_reasoning = show_reasoning
        self._parallel_calls = parallel_calls
        self._texts = texts
        self._filters = not show_reasoning or not parallel_calls or bool(texts)  # some deltas are not given as they are
        self._plain = plain
        self._rescues = rescues
        self._argument: TextArgument | None = None  # of the call that began last
        self._index = 0  # of that call
        self._reasoning_tokens: int | None = None  # once the reasoning has ended
        self._analysis = AnalysisTokens() if channels else None
        self.output = ChatOutput()

    def feed(self, text: str) -> Sequence[ChatDelta]:
        self._reader.feed(text)
        return self._next_deltas()

    def finish(self, *, cut: bool = False) -> Sequence[ChatDelta]:
        """Return what was held back: no more text comes. `cut`: because of a limit."""
        self._reader.finish(lambda: not cut and self._rescues())
        return self._next_deltas(last=True)

    def reasoning_tokens(self, tokens: Sequence[int], tokenizer: Tokenizer, end: str) -> int:
        """Return how many of the output's tokens are reasoning, with its markers. `end` is the text that ends it."""
        if self._analysis is not None:
            return self._analysis.count(tokens, tokenizer)
        if not self._reader.thought:
            return 0
        if self._reader.thinks:
            return len(tokens)
        if self._reasoning_tokens is None:
            self._reasoning_tokens = self._count(tokens, tokenizer, end)
        return self._reasoning_tokens

    def _count(self, tokens: Sequence[int], tokenizer: Tokenizer, end: str) -> int:
        decode = partial(tokenizer.decode, special_tokens=True)
        most = len(tokens)
        if draft := self._reader.rescued:
            return bisect_left(range(most), True, key=lambda count: draft not in decode(tokens[count + 1 :]))
        if (token := tokenizer.token_of(end)) in tokens:
            most = tokens.index(token) + 1
        if end in decode(tokens[: most - 1]):  # spelt in several tokens
            most = bisect_left(range(most), True, key=lambda count: end in decode(tokens[:count]))
        return most

    def _next_deltas(self, *, last: bool = False) -> Sequence[ChatDelta]:
        deltas = self._out.take_deltas()
        if self._filters:
            deltas = list(self._shown(deltas))
        if last:
            deltas += self._rest_of_text()
        for delta in deltas:
            self.output.add_delta(delta)
        return deltas

    def _shown(self, deltas: Iterable[ChatDelta]) -> Iterator[ChatDelta]:
        for delta in deltas:
            match delta:
                case Reasoning() if not self._show_reasoning:
                    pass
                case CallBegin(index=index) | CallArguments(index=index) if index and not self._parallel_calls:
                    pass
                case CallBegin(index, id_, name):
                    yield from self._rest_of_text()
                    takes_text = name in self._texts
                    self._argument = TextArgument() if takes_text and not self._plain else None
                    self._index = index
                    yield CallBegin(index, id_, name, takes_text)
                case CallArguments(index, text):
                    if shown := self._argument.feed(text) if self._argument else text:
                        yield CallArguments(index, shown)
                case _:
                    if self._argument is not None:
                        yield from self._rest_of_text()
                    yield delta

    def _rest_of_text(self) -> Iterator[ChatDelta]:
        if self._argument is not None and (text := self._argument.finish()):
            yield CallArguments(self._index, text)
