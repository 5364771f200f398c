"""A process that compiles clients' grammars, to find out whether decode workers can.

`python -m router.frontend.grammar_process TOKENIZER VOCABULARY EOS` is a helper process (`helper_process`). It works on
a thread with a smaller stack than those of decode workers, so a grammar that is nested too deeply ends this process and
no worker.

`check_ends` finds parts of a JSON schema from which an output could never come to an end. llguidance refuses what can't
be met at once, such as an empty range. Two kinds it does not see: a part that needs itself again and again, and a
`patternProperties` whose names are all declared in `properties` (llguidance#265). There a comma is allowed and then
nothing but white space.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from baton import grammars
from baton.errors import BatonError, InvalidGrammar, shown
from baton.messages import MAX_GRAMMAR, Grammar
from router.frontend.helper_main import serve
from router.frontend.schema_faults import Schema, faults_of, members_of

_MEMORY = 2 << 30  # bytes of address space: a tokenizer of 256,000 tokens takes a quarter of it
_STACK = 1 << 20
_MOST_PATHS, _MOST_PATH = 32, 200  # of what was left out, and characters of one
_QUOTE = ord('"')


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
