"""What a front may mend in a request that a model can't take as it came, and what it tells of it.

Agents send whole conversations again and again. So one odd role, part or call would refuse every later turn. A
repair changes as little as it can. `api.repairs` turns each kind off: then the request is refused by its field.
"""

# pyright: strict

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from baton.config import REPAIRS, Repair
from baton.errors import InvalidRequest, shown

Json: TypeAlias = dict[str, Any]

HEADER = "baton-repairs"
"""Names the kinds of repairs in an answer."""

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)"
    rb"|\xed[\xa0-\xbf][\x80-\xbf]",
    re.DOTALL,
)
_TELEMETRY = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.IGNORECASE)
_SHORT = re.compile("[A-Za-z0-9]{9}")
_EFFORTS: Sequence[str] = ("minimal", "low", "medium", "high", "xhigh", "max")
_UNREADABLE = "INVALID_JSON"  # Anthropic's own name for arguments that were cut


class Repairs:
    """The repairs of one request: which kinds are allowed, and which were made."""

    def __init__(self, setting: bool | Sequence[Repair] = True) -> None:
        """`setting`: that of `api.repairs`."""
        self.allowed: Sequence[Repair] = (REPAIRS if setting else ()) if isinstance(setting, bool) else setting
        self.kinds: dict[Repair, None] = {}

    def make(self, kind: Repair) -> bool:
        """Note that a request is repaired. Return False if its kind is turned off."""
        if kind in self.allowed:
            self.kinds[kind] = None
            return True
        return False


def refused(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {reason}", field)


# --- texts ------------------------------------------------------------------------------------------------------------


def with_whole_characters(body: bytes) -> bytes:
    """Return JSON with U+FFFD for each half of a surrogate pair that stands alone."""
    return _ESCAPE.sub(_whole, body)


def _whole(escape: re.Match[bytes]) -> bytes:
    match len(escape[0]):
        case 3:
            return b"\xef\xbf\xbd"
        case 6:
            return b"\\ufffd"
        case _:  # a whole pair, or no surrogate
            return escape[0]


def content_of(at: str, content: Any, role: Any, repairs: Repairs) -> str | list[Json]:
    """Return a message's content as a text or as parts of text. In results of tools and in the model's own turns, a
    part that is no text becomes a placeholder. Raises InvalidRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refused(at, f"is {shown(repr(content))}; it must be a text or a list of parts")
    parts = cast("list[Any]", content)
    return [part_of(f"{at}[{number}]", part, role, repairs) for number, part in enumerate(parts)]


def source_of(role: Any, before: Sequence[Mapping[str, Any]]) -> Any:
    """Return the role that the parts of a message come from. A user's message right behind the results of tools has
    their pictures, for which a result in a chat has no place."""
    if role != "user":
        return role
    roles = (message["role"] for message in reversed(before))
    latest = next((one for one in roles if one not in ("system", "developer")), "")
    return "tool" if latest == "tool" else "user"


def part_of(at: str, part: Any, role: Any, repairs: Repairs) -> Json:
    """Return a part of a message's content as text, or as a placeholder. Raises InvalidRequest."""
    text = _text_of(part)
    if text is None:
        kind: object = cast("Json", part).get("type") if isinstance(part, dict) else part
        if role in ("user", "system", "developer") or not repairs.make("placeholder"):
            raise refused(at, f"is a part of type {shown(repr(kind))}; this server takes text alone")
        text = placeholder(kind)
    return {"type": "text", "text": text}


def placeholder(kind: object) -> str:
    """Return the text that stands for something that the model can't read."""
    return f"[{shown(str(kind), 80)} left out: this model reads text alone]"


def _text_of(part: Any) -> str | None:
    match part:
        case str():
            return part
        case {"type": "text" | "input_text" | "output_text" | "refusal", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {
            "type": "document",
            "source": {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)},
        }:
            return _titled(part, [text])
        case {"type": "document", "source": {"type": "content", "content": [*inner]}} | {
            "type": "search_result", "content": [*inner]
        }:  # fmt: skip
            texts: list[Any] = [cast("Json", one).get("text") if isinstance(one, dict) else None for one in inner]
            return _titled(part, texts) if all(isinstance(text, str) for text in texts) else None
        case {"type": "compaction", "content": str(text)}:  # what an earlier server made of the turns before
            return text
        case _:
            return None


def _titled(part: Json, texts: Sequence[str]) -> str:
    """Return the texts of a document behind what its client says of it."""
    heads: list[Any] = [part.get("title"), part.get("source"), part.get("context")]
    return "\n".join([*(head for head in heads if isinstance(head, str) and head), *texts])


# --- calls ------------------------------------------------------------------------------------------------------------


def arguments_of(at: str, arguments: Any, repairs: Repairs) -> Json:
    """Return a call's arguments as the object that templates expect. Raises InvalidRequest."""
    if isinstance(arguments, dict):
        return cast("Json", arguments)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    value = _value_of(text)
    if isinstance(value, dict):
        return cast("Json", value)
    if not repairs.make("arguments"):
        raise refused(at, f"is {shown(repr(arguments))}, which is no JSON object")
    twice: Any = _value_of(value) if isinstance(value, str) else {} if text.strip() == "null" else None
    return cast("Json", twice) if isinstance(twice, dict) else {_UNREADABLE: text}


def _value_of(text: str) -> Any:
    """Return what a text is as JSON; None if it is none."""
    try:
        value = json.loads(with_whole_characters(text.encode(errors="replace")).decode())
        msgspec.json.encode(value)  # not too deep for it
    except (ValueError, RecursionError):
        return None
    return value


# --- effort -----------------------------------------------------------------------------------------------------------


def other_efforts(effort: Any) -> list[str]:
    """Return the other efforts of reasoning, the nearest first; of two, the lower one."""
    if effort not in _EFFORTS:
        return []
    at = _EFFORTS.index(effort)
    return sorted(_EFFORTS, key=lambda other: abs(_EFFORTS.index(other) - at))[1:]


# --- messages ---------------------------------------------------------------------------------------------------------


def without_telemetry(messages: list[Json], repairs: Repairs) -> list[Json]:
    """Return the messages without the line that Claude Code puts before its system prompt. It differs in each request,
    so no prompt behind it would be found in a cache."""
    for number, message in enumerate(messages):
        if message["role"] not in ("system", "developer"):
            break
        parts: Any = message["content"]
        first: str = parts if isinstance(parts, str) else parts[0]["text"] if parts else ""
        if (match := _TELEMETRY.match(first)) is None or not repairs.make("telemetry"):
            continue
        rest = first[match.end() :]
        if not isinstance(parts, str):
            rest = [*([{"type": "text", "text": rest}] if rest.strip() else []), *parts[1:]]
        more = [message | {"content": rest}] if rest else []
        return [*messages[:number], *more, *messages[number + 1 :]]
    return messages


def with_one_system(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with all that are the system's as one, before all others."""
    system = [message for message in messages if message["role"] in ("system", "developer")]
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": _joined([one["content"] for one in system])}, *rest] if system else rest


def with_turns(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with neighbours of one role as one."""
    turns: list[Json] = []
    for message in messages:
        last = turns[-1] if turns else None
        if last is not None and last["role"] == message["role"] in ("user", "assistant") and not last.get("tool_calls"):
            turns[-1] = last | message | {"content": _joined([last["content"], message["content"]])}
        else:
            turns.append(message)
    return turns


def with_system_in_user(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with a leading one of the system at the beginning of the first user's."""
    for number, message in enumerate(messages):
        if message["role"] == "user" and messages[0]["role"] == "system":
            joined = _joined([messages[0]["content"], message["content"]])
            return [*messages[1:number], message | {"content": joined}, *messages[number + 1 :]]
    return [*messages]


def with_single_calls(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with each call in a turn of its own, and its result behind it."""
    turns: list[Json] = []
    rest = deque(messages)
    while rest:
        turn = rest.popleft()
        calls: Any = turn.get("tool_calls") or ()
        for number, call in enumerate(calls):
            first = turn if number == 0 else {"role": turn["role"], "content": ""}
            turns.append(first | {"tool_calls": [call]})
            behind = itertools.takewhile(lambda one: one["role"] == "tool", rest)
            result = next((one for one in behind if one.get("tool_call_id") == call.get("id")), None)
            if result is not None:
                rest.remove(result)
                turns.append(result)
        if not calls:
            turns.append(turn)
    return turns


def with_short_ids(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with calls by names of nine letters and digits, which Mistral's templates insist on. A name
    depends on the given one alone, so a conversation keeps its prefix from turn to turn."""
    renamed: list[Json] = []
    for message in messages:
        calls: Any = message.get("tool_calls")
        changes: Json = {}
        if calls:
            changes["tool_calls"] = [call | {"id": _short(call.get("id"))} for call in calls]
        if "tool_call_id" in message:
            changes["tool_call_id"] = _short(message["tool_call_id"])
        renamed.append(message | changes)
    return renamed


def _short(name: Any) -> str:
    if isinstance(name, str) and _SHORT.fullmatch(name):
        return name
    return hashlib.sha256(str(name).encode()).hexdigest()[:9]


FOR_STRICT_TEMPLATES: Mapping[Repair, Callable[[Sequence[Json]], list[Json]]] = {
    "system": with_one_system,
    "turns": with_turns,
    "system_in_user": with_system_in_user,
    "single_calls": with_single_calls,
}
"""How messages are changed, one kind after the other, until a template takes them."""


def system_texts(messages: Sequence[Json]) -> list[str]:
    """Return what the system says, part by part."""
    texts: list[str] = []
    for message in messages:
        if message["role"] in ("system", "developer"):
            content: Any = message["content"]
            texts += [content] if isinstance(content, str) else [part["text"] for part in content]
    return texts


def _joined(contents: Sequence[Any]) -> str | list[Json]:
    """Return several contents as one, with an empty line between them."""
    some = [content for content in contents if content]
    if all(isinstance(content, str) for content in some):
        return "\n\n".join(some)
    parts: list[Json] = []
    for content in some:
        if parts:
            parts.append({"type": "text", "text": "\n\n"})
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
