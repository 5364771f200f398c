"""The prompt of a chat: the checkpoint's template, rendered by a process of its own (`template_process`).

A template that hangs or takes too much memory costs its own request and a restart of that process.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton.checkpoint_files import read_optional
from baton.errors import InvalidRequest, ModelError, shown
from baton.logs import RateLimitedLog
from router.frontend.chat.repairs import Repairs, arguments_of, content_of, refused, source_of, without_telemetry
from router.frontend.chat.scanning import TEXT_ARGUMENT
from router.frontend.off_loop import HelperDied, HelperLate, HelperProcess

log = RateLimitedLog(logging.getLogger(__name__))  # a client can cause these lines

MAX_MESSAGES = 100_000
_DEADLINE = 2.0  # seconds for one prompt; templates take less than a millisecond
_MARK = f"<end-{secrets.token_hex(8)}>"
_FILE = "chat_template.jinja"
_MORE = "additional_chat_templates"  # a folder with others, by name
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # names of templates
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
"""The roles of OpenAI's chats, each with the one that stands for it in a template that does not know it."""


@dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's templates by name, and the special tokens that they may name."""

    named: Mapping[str, str]
    special_tokens: Mapping[str, str]

    def source(self, *, tools: bool = False) -> str:
        """Return the template that transformers would choose, or the first one where it would find none."""
        named = (tools and self.named.get(_WITH_TOOLS)) or self.named.get(_DEFAULT)
        return named or next(iter(self.named.values()))

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """Read a checkpoint's templates; None if it has none. Raises ModelError."""
        settings = read_optional(folder / "tokenizer_config.json")
        source = settings.get("chat_template")
        named: dict[str, Any] = {_DEFAULT: source}
        if isinstance(source, list):
            named = {str(one.get("name")): one.get("template") for one in source if isinstance(one, dict)}
        files = {file.stem: _text(file) for file in sorted((folder / _MORE).glob("*.jinja"))}
        if os.path.lexists(folder / _FILE):  # as with transformers, the settings' ones then count for nothing
            named = {_DEFAULT: _text(folder / _FILE)}
        named = {name: text for name, text in (named | files).items() if text}
        for name, text in named.items():
            if not isinstance(text, str):
                raise ModelError(
                    f"chat_template {name!r} of {folder} is a {type(text).__name__}; it must be a text, or a list of "
                    "named texts"
                )
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        tokens = {name: _content(settings.get(name)) for name in names}
        return cls(named, {name: text for name, text in tokens.items() if text is not None}) if named else None


def rendering(template: str, variables: Mapping[str, Any], repairs: Sequence[str] = ()) -> bytes:
    """Return the order to render a template, as JSON, with kinds of repairs that are allowed if the template can't take
    the messages. Raises InvalidRequest for variables that JSON can't hold."""
    try:
        return msgspec.json.encode({"template": template, "variables": variables, "repairs": repairs})
    except (OverflowError, RecursionError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the chat can't be handed to its template: {shown(str(error), 300)}") from None


class TemplateRenderer:
    """Renders templates in a process that is started when it is first needed. One event loop may use it."""

    def __init__(self, max_characters: int) -> None:
        self._helper = HelperProcess(
            "router.frontend.chat.template_process", str(max_characters), deadline=_DEADLINE, most=max_characters
        )

    async def render(self, order: bytes, tenant: str = "", repairs: Repairs | None = None) -> str:
        """Return the prompt that `rendering` asks for, and note what was repaired. Raises InvalidRequest if the
        template fails, hangs or takes too much, and Overloaded where too much of the tenant waits."""
        try:
            answer = await self._helper.ask(order, tenant)
        except HelperLate:
            log.warning("a chat template took longer than %g s; its process was ended", _DEADLINE)
            raise InvalidRequest(
                f"the chat template takes longer than {_DEADLINE:g} s for these messages; send fewer or shorter ones"
            ) from None
        except HelperDied:
            log.warning("a chat template ended its process")
            raise InvalidRequest("the chat template ended its process, perhaps by its use of memory") from None
        if answer.text is None:
            raise InvalidRequest(f"the chat template can't render these messages: {shown(answer.error, 300)}")
        if repairs is not None:
            for kind in answer.repairs:
                repairs.make(kind)
        return answer.text

    async def close(self) -> None:
        """End the process."""
        await self._helper.close()


def normalized(
    messages: Sequence[Mapping[str, Any]], template: str = "", repairs: Repairs | None = None
) -> list[dict[str, Any]]:
    """Check a chat's messages and bring them into the form that a template expects. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"there are {len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    repairs = repairs or Repairs()
    roles: dict[Any, str] = {}
    result: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        at, role = f"messages[{number}]", message.get("role")
        known = roles.get(role) if isinstance(role, str) else None
        if known is None:
            known = roles[role] = _role(f"{at}.role", role, template, repairs)
        result.append(_message(at, message, known, result, repairs))
    return without_telemetry(result, repairs)


def _message(
    at: str, message: Mapping[str, Any], role: str, before: Sequence[Mapping[str, Any]], repairs: Repairs
) -> dict[str, Any]:
    result = dict(message)
    result["role"] = role
    result["content"] = content_of(f"{at}.content", message.get("content"), source_of(role, before), repairs)
    # Clients have one name for it, templates the other.
    if isinstance(thought := message.get("reasoning"), str) and not message.get("reasoning_content"):
        result["reasoning_content"] = thought
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise refused(f"{at}.tool_calls", f"is {shown(repr(calls))}; it must be a list")
        result["tool_calls"] = [_call(f"{at}.tool_calls[{number}]", call, repairs) for number, call in enumerate(calls)]
    return result


def _role(at: str, role: Any, template: str, repairs: Repairs) -> str:
    """A role that the template knows, or that the API has."""
    if not isinstance(role, str) or not role:
        raise refused(at, f"is {shown(repr(role))}; it must be a text such as 'user'")
    if not template or f"'{role}'" in template or f'"{role}"' in template:
        return role
    if role not in _ROLES:
        raise refused(at, f"is {shown(repr(role))}; it must be {', '.join(_ROLES)}, or a role of the chat template")
    other = _ROLES[role]
    return other if other != role and repairs.make("role") else role


def _call(at: str, call: Any, repairs: Repairs) -> Any:
    """A tool call with its arguments as an object: templates print them as JSON themselves."""
    match call:
        case {"type": "custom", "custom": {"name": name, "input": str(text)}}:
            function = {"name": name, "arguments": {TEXT_ARGUMENT: text}}
            return {"id": call.get("id"), "type": "function", "function": function}
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        raise refused(at, f"is {shown(repr(call))}, which is no tool call")
    arguments = arguments_of(f"{at}.function.arguments", function.get("arguments"), repairs)
    return call | {"function": function | {"arguments": arguments}}


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a normalized message."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def mark_end(message: dict[str, Any]) -> None:
    """Mark the end of the message that the output is to continue. Raises InvalidRequest if it has no text."""
    content = message["content"]
    if isinstance(content, str) and content.strip():
        message["content"] = f"{content}{_MARK} "
    elif isinstance(content, list) and content:
        content[-1]["text"] += f"{_MARK} "
    else:
        raise InvalidRequest("continue_final_message is true, and the last message has no text to continue")


def cut_at_mark(text: str) -> str:
    """Return the prompt up to the mark. Where the template has trimmed the message, its end is trimmed, too. Raises
    InvalidRequest if the template does not show the message."""
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequest("continue_final_message is true, and the chat template does not show the last message")
    return before if after.startswith(" ") else before.rstrip()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} can't be read: {error}; fetch the checkpoint again") from None


def special_token(settings: Mapping[str, Any], name: str, file: str) -> str | None:
    """Return the text of a special token; None if the settings name none. Raises ModelError for anything else."""
    if (token := settings.get(name)) is not None and _content(token) is None:
        raise ModelError(f"{name} is {token!r} in {file}; it must be a text, or an object with its content")
    return _content(token)


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
