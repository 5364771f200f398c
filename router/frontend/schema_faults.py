"""Finds the keywords of a JSON schema that llguidance can't enforce, and makes a schema without them.

llguidance refuses a schema as a whole and does not say where it is wrong. So each part is compiled by itself, within
the whole, because its references mean something there. A part that fails while all parts within it compile is at fault,
and so is each of its keywords that fails alone.

What is left out makes a schema accept more, never less. A schema that nothing can meet stays as it is.
"""

# pyright: strict

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from urllib.parse import quote, urljoin

from llguidance import LLMatcher, LLTokenizer

from baton.grammars import LIMITS

Schema: TypeAlias = Any  # an object, or true or false

_MEMBERS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains")
_NEVER_ENFORCED = ("not", "if", "then", "else", "contains", "dependentSchemas")
_WELL_FORMED: dict[str, type | tuple[type, ...]] = {
    "$defs": dict, "definitions": dict, "properties": dict, "items": (dict, list, bool), "prefixItems": list,
    "additionalProperties": (dict, bool), "required": list, "anyOf": list, "$id": str, "$ref": str, "type": (str, list),
}  # fmt: skip
"""Keywords that stay, unless their values are of other types."""
_WHOLE = "http://whole.invalid/"
_SECONDS = 1.0  # of a search
_UNMET = "Unsatisfiable schema"


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
        """Return a part with one of its keywords alone."""
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
        reason = LLMatcher.validate_grammar(grammar, self._tokenizer, limits=LIMITS)
        return " ".join(reason.split("\n  while processing")[0].split())


def _may_go(keyword: str, value: Any) -> bool:
    """Whether a keyword can be left out."""
    return keyword not in _WELL_FORMED or not isinstance(value, _WELL_FORMED[keyword])
