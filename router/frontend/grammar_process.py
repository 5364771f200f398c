"""A process that compiles clients' grammars, to find out whether decode workers can.

`python -m router.frontend.grammar_process TOKENIZER VOCABULARY EOS` is a helper process (`off_loop`). It works on
a thread with a smaller stack than those of decode workers, so a grammar that is nested too deeply ends this process and
no worker.

`check_ends` finds parts of a JSON schema from which an output could never come to an end. llguidance refuses what can't
be met at once, such as an empty range. Two kinds it does not see: a part that needs itself again and again, and a
`patternProperties` whose names are all declared in `properties` (llguidance#265). There a comma is allowed and then
nothing but white space.

`faults_of` finds the keywords of a JSON schema that llguidance can't enforce, and makes a schema without them.
llguidance refuses a schema as a whole and does not say where it is wrong. So each part is compiled by itself, within
the whole, because its references mean something there. A part that fails while all parts within it compile is at fault,
and so is each of its keywords that fails alone. What is left out makes a schema accept more, never less. A schema that
nothing can meet stays as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import quote, urljoin

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from baton import grammars
from baton.errors import BatonError, InvalidGrammar, shown
from baton.messages import MAX_GRAMMAR, Grammar
from router.frontend.helper_main import serve

_MEMORY = 2 << 30  # bytes of address space: a tokenizer of 256,000 tokens takes a quarter of it
_STACK = 1 << 20
_MOST_PATHS, _MOST_PATH = 32, 200  # of what was left out, and characters of one
_QUOTE = ord('"')

Schema: TypeAlias = Any  # an object, or true or false

_MEMBERS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains")
_NEVER_ENFORCED = ("not", "if", "then", "else", "contains", "dependentSchemas")
_WELL_FORMED: dict[str, type | tuple[type, ...]] = {
    "$defs": dict, "definitions": dict, "properties": dict, "items": (dict, list, bool), "prefixItems": list,
    "additionalProperties": (dict, bool), "required": list, "anyOf": list, "$id": str, "$ref": str,
}  # fmt: skip
"""Keywords that stay, unless their values are of other types."""
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_WHOLE = "http://whole.invalid/"
_SECONDS = 1.0  # of a search
_UNMET = "Unsatisfiable schema"


@lru_cache
def _tokenizer(file: str, vocab_size: int, eos: int) -> LLTokenizer:
    return grammars.load_tokenizer(Path(file), vocab_size, eos)


def _answer(order: dict[str, Any], file: str, vocab_size: int, eos: int) -> dict[str, Any]:
    grammar = msgspec.convert(order["grammar"], Grammar)
    try:
        if grammar.kind == "lark":
            grammar = replace(grammar, text=grammars.lark_of(grammar.text))
            if len(grammar.text) > MAX_GRAMMAR:
                raise InvalidGrammar(
                    f"the grammar has {len(grammar.text)} characters in Lark; at most {MAX_GRAMMAR} may be"
                )
        try:
            _try_out(grammar, file, vocab_size, eos)
            return {"text": grammar.text}
        except InvalidGrammar as error:
            if grammar.kind != "json_schema":
                raise
            return _without_faults(
                grammar, error, partial(_try_out, file=file, vocab_size=vocab_size, eos=eos), lenient=order["lenient"]
            )
    except BatonError as error:
        return {"reason": error.reason, "error": str(error)}
    except RecursionError:
        return {"reason": "invalid_grammar", "error": "it is nested too deeply"}
    except MemoryError:
        return {"reason": "invalid_grammar", "error": "it takes too much memory"}


def _try_out(grammar: Grammar, file: str, vocab_size: int, eos: int) -> None:
    grammars.try_out(_tokenizer(file, vocab_size, eos), grammar)
    if grammar.kind == "json_schema":
        check_ends(json.loads(grammar.text))


def _without_faults(
    grammar: Grammar, error: InvalidGrammar, try_out: Callable[[Grammar], None], *, lenient: bool
) -> dict[str, Any]:
    """Answer with a schema without the keywords that can't be enforced, and their paths. Raises InvalidGrammar for a
    schema that must stay, or fails without them: with the path of a fault, else `error`."""
    faults = faults_of(json.loads(grammar.text))
    keywords = faults.left_out | faults.others
    if lenient and faults.left_out:
        loose = replace(grammar, text=json.dumps(faults.schema, ensure_ascii=False))
        try:
            try_out(loose)
            paths = [shown(path, _MOST_PATH) for path in list(faults.left_out)[:_MOST_PATHS]]
            return {"text": loose.text, "left_out": paths}
        except InvalidGrammar as again:
            error, keywords = again, faults.others
    for path, reason in keywords.items():
        raise grammars.refusal(grammar, f"{shown(path, _MOST_PATH)}: {reason}")
    raise error


# --- parts that no output can complete --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """An object of a schema that is a schema itself."""

    path: str  # a JSON pointer behind "#"
    base: str  # the path of the resource that it belongs to: the nearest part around it with an `$id`
    schema: dict[str, Any]


def check_ends(schema: Schema) -> None:
    """Raise InvalidGrammar with the path of a part that no output can complete."""
    parts = {part.path: part for part in _parts(schema)}
    for part in parts.values():
        patterns, declared = part.schema.get("patternProperties"), list(part.schema.get("properties") or {})
        closed = part.schema.get("additionalProperties") is False
        if patterns and declared and closed and not any(_names_more(pattern, declared) for pattern in patterns):
            raise InvalidGrammar(
                f"{part.path}: patternProperties {shown(repr(list(patterns)))} match declared properties alone, so "
                "an output would wait for a name that can't come; put their schemas into these properties"
            )
    finite, possible = _inhabited(parts, start=False), _inhabited(parts, start=True)
    for path in parts:
        if possible[path] and not finite[path]:
            raise InvalidGrammar(f"{path}: it needs itself again and again, so no output that follows it ends")


def _parts(schema: Schema) -> Iterator[_Part]:
    waiting = [("#", "#", schema)]
    while waiting:
        path, base, schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        base = path if "$id" in schema else base
        yield _Part(path, base, schema)
        members = [(f"{path}/{step}", base, holder[key]) for step, holder, key in members_of(schema)]
        waiting += reversed(members)


def _inhabited(parts: Mapping[str, _Part], *, start: bool) -> dict[str, bool]:
    """Return which parts a value can meet, by path: the least solution from False, the greatest from True."""
    known = dict.fromkeys(parts, start)
    changed = True
    while changed:
        changed = False
        for path, part in parts.items():
            if known[path] == start and _is_met(part, known) != start:
                known[path] = not start
                changed = True
    return known


def _is_met(part: _Part, known: Mapping[str, bool]) -> bool:
    """Return whether a value can meet a part, by what is known of the others. References that are not pointers count
    as met."""
    schema = part.schema

    def holds(step: str, member: Schema = True) -> bool:
        return known.get(f"{part.path}/{step}", member is not False)

    reference = schema.get("$ref")
    if isinstance(reference, str) and not known.get(part.base + reference.removeprefix("#"), True):
        return False
    steps = {step: holder[key] for step, holder, key in members_of(schema)}
    for name in ("anyOf", "oneOf"):
        chosen = [holds(step, member) for step, member in steps.items() if step.startswith(f"{name}/")]
        if chosen and not any(chosen):
            return False
    if not all(holds(step, member) for step, member in steps.items() if step.startswith("allOf/")):
        return False
    kinds = schema.get("type")
    match kinds if isinstance(kinds, str) else kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else None:
        case "object":
            declared = schema.get("properties") or {}
            names = [name if name in declared else None for name in schema.get("required") or ()]
            return all(_holds_property(name, schema, holds) for name in names)
        case "array":
            first = len(schema.get("prefixItems") or ())
            needed = min(int(schema.get("minItems") or 0), first + 1)
            return all(
                holds(f"prefixItems/{number}") if number < first else holds("items", schema.get("items", True))
                for number in range(needed)
            )
        case _:
            return True


def _holds_property(name: str | None, schema: Mapping[str, Any], holds: Callable[..., bool]) -> bool:
    """Return whether a required property can be met; None: it is not declared."""
    if name is None:
        return holds("additionalProperties", schema.get("additionalProperties", True))
    escaped = name.replace("~", "~0").replace("/", "~1")
    return holds(f"properties/{escaped}", schema["properties"][name])


def _names_more(pattern: str, declared: list[str]) -> bool:
    """Return whether a pattern of names matches one that is not declared, by what llguidance lets follow the declared
    ones."""
    members: Any = {name: {"const": 0} for name in declared}
    probe = {
        "type": "object", "properties": members, "required": declared, "patternProperties": {pattern: {"const": 0}},
        "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
    }  # fmt: skip
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(probe)), log_level=0)
    text = "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:0" for name in declared) + ","
    if matcher.is_error() or not matcher.consume_tokens(list(text.encode(errors="replace"))):
        return True  # llguidance refuses or never allows a further name; the schema itself is judged elsewhere
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return bool(mask[_QUOTE])


@dataclass
class Faults:
    """What is wrong with a schema: keywords and reasons by their paths, which are JSON pointers."""

    schema: Schema  # without the keywords in `left_out`
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    others: dict[str, str] = field(default_factory=dict[str, str])  # parts that fail, or may, with all their keywords


def faults_of(schema: Schema) -> Faults:
    """Return the faults of a schema that llguidance refuses."""
    search = _Search(schema)
    with contextlib.suppress(TimeoutError):  # what was found until then is right
        search.run()
    return search.faults


def members_of(schema: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place of each schema directly within one: its part of a JSON pointer, what holds it, and its key there.
    Definitions come first."""
    names = [name for name in _MEMBERS if name in schema] + [name for name in schema if name not in _MEMBERS]
    for name in names:
        members = schema[name]
        if name in _MEMBERS and isinstance(members, dict):
            for key in cast("dict[str, Any]", members):
                yield f"{name}/{key.replace('~', '~0').replace('/', '~1')}", members, key
        elif name in _LISTS and isinstance(members, list):
            for number in range(len(cast("list[Any]", members))):
                yield f"{name}/{number}", members, number
        elif name in _SINGLE:
            yield name, schema, name


class _Search:
    """Leaves out one keyword after the other, until the schema compiles or nothing more can be found."""

    def __init__(self, schema: Schema) -> None:
        self._tokenizer = LLTokenizer("byte")
        self._end = time.monotonic() + _SECONDS
        self._root: dict[str, Any] = {"whole": json.loads(json.dumps(schema))}
        self._identifier = _WHOLE
        self._blames_references = False
        self._references: dict[str, str] = {}  # as they came, by how they stand here
        self.faults = Faults(self._root["whole"])

    def run(self) -> None:
        """Search. Raises TimeoutError if it takes too long."""
        whole = self._root["whole"]
        if not isinstance(whole, dict):
            self.faults.others["#"] = self._reason_of(whole)
            return
        whole = cast("dict[str, Any]", whole)
        own = whole.get("$id")
        if isinstance(own, str) and own:
            self._identifier = own.removesuffix("#")
        self._prepare("#", whole)
        whole["$id"] = self._identifier
        try:
            for self._blames_references in (False, True):
                before = -1
                while before < len(self.faults.left_out):
                    before = len(self.faults.left_out)
                    self._mend("#", self._root, "whole")
        finally:
            whole["$id"] = own
            if own is None:
                del whole["$id"]
            self._restore(whole)
            self.faults.schema = self._root["whole"]

    def _prepare(self, path: str, part: Schema) -> None:
        """Leave out each `$schema` that is not known: it fails the whole schema, wherever it stands. Make references
        absolute: llguidance resolves them wrongly where it enters the schema in the middle."""
        if not isinstance(part, dict):
            return
        part = cast("dict[str, Any]", part)
        if "$schema" in part and (reason := self._reason_of({"$schema": part["$schema"]})):
            self.faults.left_out[f"{path}/$schema"] = reason
            del part["$schema"]
        reference = part.get("$ref")
        if isinstance(reference, str):
            part["$ref"] = urljoin(self._identifier, reference)
            self._references[part["$ref"]] = reference
        for step, holder, key in members_of(part):
            if not isinstance(holder[key], dict) or "$id" not in holder[key]:
                self._prepare(f"{path}/{step}", holder[key])

    def _restore(self, part: Schema) -> None:
        """Write references as they came."""
        if isinstance(part, dict):
            part = cast("dict[str, Any]", part)
            if part.get("$ref") in self._references:
                part["$ref"] = self._references[part["$ref"]]
            for _, holder, key in members_of(part):
                self._restore(holder[key])

    def _mend(self, path: str, holder: Any, key: Any) -> bool:
        """Leave out what fails of a part. Return whether it compiles, or nothing can meet it."""
        part = holder[key]
        if not isinstance(part, dict | bool):
            self.faults.left_out[path] = f"it is {part!r}; a schema must be an object or a boolean"
            part = holder[key] = True
        reason = self._reason(path)
        if not reason:
            return True
        if isinstance(part, bool) or (path != "#" and "$id" in part):
            self.faults.others[path] = reason
            return reason.startswith(_UNMET)
        part = cast("dict[str, Any]", part)
        places = [place for place in members_of(part) if place[0].split("/")[0] not in _NEVER_ENFORCED]
        inner = [self._mend(f"{path}/{step}", inner, key) for step, inner, key in places]
        if not all(inner):
            return not self._reason(path)
        for keyword in list(part):
            if holder[key] is part and keyword in part and (reason := self._fault(path, holder, key, keyword)):
                self._leave_out(path, holder, key, keyword, reason)
        if holder[key] is not part or not (reason := self._reason(path)):
            return True
        for keyword in list(part) if not reason.startswith(_UNMET) else ():
            rest = {name: value for name, value in part.items() if name != keyword}
            if _may_go(keyword, part[keyword]) and not self._reason_with(path, holder, key, rest):
                self._leave_out(path, holder, key, keyword, reason)
                return True
        single = (name for name in part if self._reason_with(path, holder, key, self._alone(path, part, name)))
        at = path if reason.startswith(_UNMET) else "/".join([path, *itertools.islice(single, 1)])
        self.faults.others[at] = reason
        return reason.startswith(_UNMET)

    def _alone(self, path: str, part: dict[str, Any], keyword: str) -> dict[str, Any]:
        return {keyword: part[keyword]} | ({"$id": part["$id"]} if path == "#" else {})

    def _fault(self, path: str, holder: Any, key: Any, keyword: str) -> str:
        """Return why a keyword fails without its neighbours; "" if it does not, or must stay."""
        value = holder[key][keyword]
        alone = self._alone(path, holder[key], keyword)
        if keyword == "$ref" and isinstance(value, str) and self._blames_references:
            reason = self._reason_with(path, holder, key, alone)
            resource, _, pointer = value.partition("#")
            return reason if f"'{pointer}'" in reason or f"'{resource}'" in reason else ""
        if not _may_go(keyword, value):
            return ""
        reason = self._reason_with(path, holder, key, alone)
        return "" if reason.startswith(_UNMET) else reason

    def _leave_out(self, path: str, holder: Any, key: Any, keyword: str, reason: str) -> None:
        part: dict[str, Any] = holder[key]
        value = part.pop(keyword)
        self.faults.left_out[f"{path}/{keyword}"] = reason
        match keyword:
            case "not" if value in (True, {}):
                holder[key] = False
            case "oneOf" if isinstance(value, list):
                part["allOf"] = [*part.get("allOf", ()), {"anyOf": value}]
            case "patternProperties":
                part.pop("additionalProperties", None)  # else the names would be refused
            case _:
                pass

    def _reason(self, path: str) -> str:
        """Return why a part fails; "" if it compiles."""
        if not isinstance(self._root["whole"], dict):
            return self._reason_of(self._root["whole"])
        return self._reason_of({"$ref": f"{self._identifier}#{quote(path[1:])}", "$defs": self._root})

    def _reason_with(self, path: str, holder: Any, key: Any, part: dict[str, Any]) -> str:
        """Return why another part would fail in the place of one."""
        before, holder[key] = holder[key], part
        try:
            return self._reason(path)
        finally:
            holder[key] = before

    def _reason_of(self, schema: Schema) -> str:
        if time.monotonic() > self._end:
            raise TimeoutError
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        reason = LLMatcher.validate_grammar(grammar, self._tokenizer, limits=grammars.LIMITS)
        return " ".join(reason.split("\n  while processing")[0].split())


def _may_go(keyword: str, value: Any) -> bool:
    if keyword == "type":
        return not all(
            isinstance(one, str) and one in _TYPES for one in (value if isinstance(value, list) else [value])
        )
    return keyword not in _WELL_FORMED or not isinstance(value, _WELL_FORMED[keyword])


def main() -> None:
    """Answer until stdin ends."""
    file, vocab_size, eos = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    threading.stack_size(_STACK)
    with ThreadPoolExecutor(1) as thread:
        with contextlib.suppress(BatonError):  # each order then says so
            thread.submit(_tokenizer, file, vocab_size, eos).result()
        serve(lambda order: thread.submit(_answer, order, file, vocab_size, eos).result(), _MEMORY)


if __name__ == "__main__":
    main()
