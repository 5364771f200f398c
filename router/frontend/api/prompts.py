"""From what a client sends to the tokens of a prompt: texts, token ids, and chats by their template.

A process of its own renders templates (`template_process`). One that hangs or takes too much memory costs its own
request and a restart of that process.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from baton.errors import InvalidRequest, shown
from baton.logs import RateLimitedLog
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.openai_completions import CompletionRequest
from router.frontend.api.protocol import TokenizeRequest, samples, token_ids
from router.frontend.chat.repairs import Repairs, arguments_of, content_of, refused, source_of, without_telemetry
from router.frontend.chat.scanning import TEXT_ARGUMENT
from router.frontend.generation import GenerationService
from router.frontend.identity import caller
from router.frontend.off_loop import HelperDied, HelperLate, HelperProcess
from router.frontend.served_model import kept_tokens, tokenized
from router.frontend.token_cache import TextOwner

log = RateLimitedLog(logging.getLogger(__name__))  # a client can cause these lines

MAX_SAMPLES = 2_048  # of one request: prompts times n
_END = 256  # characters
_OF_THE_CHAT = ("messages", "tools", "documents", "add_generation_prompt")  # what a template is told differs with these
MAX_MESSAGES = 100_000
_DEADLINE = 2.0  # seconds for one prompt; templates take less than a millisecond
_MARK = f"<end-{secrets.token_hex(8)}>"
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
"""The roles of OpenAI's chats, each with the one that stands for it in a template that does not know it."""


class ChatPrompt(Struct, frozen=True):
    """A chat as tokens."""

    tokens: Sequence[int]
    end: str  # of its text
    continued: str | None  # the message that the output continues, if it does


class ChatOrder(Struct, frozen=True):
    """A checked chat, ready to be rendered and tokenized."""

    rendering: bytes  # for the template's process
    continued: str | None
    special_tokens: bool  # are added
    keep: int | None  # the prompt's last tokens; none: all
    template: str  # digest of the template and of what it is told besides the chat
    salt: str  # of the request's caches


class PromptBuilder:
    """Makes prompts of one model.

    What takes time in proportion to a request is a plain function here: the doors run it by `apart`."""

    def __init__(self, service: GenerationService, templates: TemplateRenderer, *, trust_templates: bool) -> None:
        """`trust_templates`: requests may bring templates of their own."""
        self.service = service
        self._model = service.model
        self._trust_templates = trust_templates
        self._templates = templates

    def of_completion(self, fields: CompletionRequest, max_tokens: int, tenant: str) -> list[Sequence[int]]:
        """The tokens of each prompt, of which `max_tokens` are to be generated. Raises InvalidRequest."""
        value: Any = fields.prompt
        vocabulary = self._model.limits.vocab_size
        if isinstance(value, str) or (value and isinstance(value[0], int)):
            value = [value]
        prompts: list[Any] = value or []
        if not prompts:
            raise InvalidRequest("the prompt is an empty list; send at least one prompt")
        if len(prompts) * samples(fields) > MAX_SAMPLES:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n {samples(fields)} are more than {MAX_SAMPLES} outputs; send fewer"
            )
        context = self._model.limits.max_context
        keep = kept_tokens(fields.truncate_prompt_tokens, max_tokens, context)
        if all(isinstance(prompt, str) for prompt in prompts):
            special = fields.add_special_tokens is not False
            owner = TextOwner(tenant, fields.cache_salt or "")
            return tokenized(prompts, self._model, special_tokens=special, keep=keep, owner=owner)
        if not all(isinstance(prompt, list) for prompt in prompts):
            raise InvalidRequest("the prompt mixes texts and token ids; send a list of one kind")
        ends: list[list[Any]] = prompts if keep is None else [prompt[-keep:] for prompt in prompts]
        return [token_ids(prompt, vocabulary, context) for prompt in ends]

    def chat_order(self, fields: ChatCompletionRequest | TokenizeRequest, repairs: Repairs) -> ChatOrder:
        """Check a chat that the checkpoint's template or the request's own is to render. Raises InvalidRequest."""
        model = self._model
        template = model.chat_template
        own = template.named.get(fields.chat_template or "") if template else None
        if fields.chat_template and own is None and not self._trust_templates:
            raise InvalidRequest(
                "the request has a chat_template, and this server renders the checkpoint's alone; leave chat_template "
                "out, or set api.trust_request_chat_template"
            )
        source = own or fields.chat_template or (template and template.source(tools=bool(fields.tools)))
        if source is None:
            raise InvalidRequest(
                f"{model.name} has no chat template; send chat_template, or use /v1/completions with the whole prompt"
            )
        messages = normalized(fields.messages or (), source, repairs)
        last = messages[-1]
        prefix = last.pop("prefix", None) is True and last["role"] == "assistant" and bool(text_of(last).strip())
        continues = prefix if fields.continue_final_message is None else fields.continue_final_message
        generation = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
        if continues and generation:
            name = "messages[-1].prefix" if prefix else "continue_final_message"
            raise InvalidRequest(f"{name} and add_generation_prompt are both true; choose one", "add_generation_prompt")
        variables: dict[str, Any] = {
            **(template.special_tokens if template else {}),
            "tools": fields.tools or None,
            "documents": getattr(fields, "documents", None),
            "add_generation_prompt": generation,
            **(fields.chat_template_kwargs or {}),
            "messages": messages,
        }
        if effort := getattr(fields, "reasoning_effort", None):
            variables.setdefault("reasoning_effort", effort)
        continued = None
        if continues:
            continued = text_of(last)
            mark_end(last)
        keep = None
        if isinstance(fields, ChatCompletionRequest):
            keep = kept_tokens(fields.truncate_prompt_tokens, fields.max_tokens, model.limits.max_context)
        order = rendering(source, variables, repairs.allowed)
        others = {name: value for name, value in variables.items() if name not in _OF_THE_CHAT}
        template = sha256(source.encode() + repr(sorted(others.items())).encode()).hexdigest()[:16]
        salt = getattr(fields, "cache_salt", None) or ""
        return ChatOrder(order, continued, bool(fields.add_special_tokens), keep, template, salt)

    async def of_chat(self, order: ChatOrder, repairs: Repairs) -> ChatPrompt:
        """The prompt of a chat of this task's caller. Raises InvalidRequest and Overloaded."""
        owner = TextOwner(caller.get().tenant, order.salt)
        text = await self._templates.render(order.rendering, owner.tenant, repairs)
        return await self.service.apart(len(text), partial(self._chat_prompt, order, text, owner))

    def _chat_prompt(self, order: ChatOrder, text: str, owner: TextOwner) -> ChatPrompt:
        if order.continued is not None:
            text = cut_at_mark(text)
        (tokens,) = tokenized([text], self._model, special_tokens=order.special_tokens, keep=order.keep, owner=owner)
        return ChatPrompt(tokens, text[-_END:], order.continued)


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
    # Clients send back whole answers, with nulls. Templates ask whether a member is there.
    result = {name: value for name, value in message.items() if value is not None}
    result["role"] = role
    result["content"] = content_of(f"{at}.content", message.get("content"), source_of(role, before), repairs)
    # Clients have one name for it, templates the other.
    if isinstance(thought := message.get("reasoning"), str) and not message.get("reasoning_content"):
        result["reasoning_content"] = thought
    calls, older = result.pop("tool_calls", None), result.pop("function_call", None)
    if calls := calls or (older and [{"type": "function", "function": older}]):
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
