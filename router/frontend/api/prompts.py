"""From what a client sends to the tokens of a prompt: texts, token ids, and chats by their template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

from baton.errors import InvalidRequest
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.openai_completions import CompletionRequest
from router.frontend.api.protocol import TokenizeRequest, samples, token_ids
from router.frontend.chat.formats import ChatFormat
from router.frontend.chat.repairs import Repairs
from router.frontend.chat.template import TemplateRenderer, cut_at_mark, mark_end, normalized, rendering, text_of
from router.frontend.generation import GenerationService
from router.frontend.identity import caller
from router.frontend.prompt_tokens import kept_tokens, tokenized
from router.frontend.token_cache import TextOwner

MAX_SAMPLES = 2_048  # of one request: prompts times n
_END = 256  # characters
_OF_THE_CHAT = ("messages", "tools", "documents", "add_generation_prompt")  # what a template is told differs with these


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as tokens."""

    tokens: Sequence[int]
    end: str  # of its text
    continued: str | None  # the message that the output continues, if it does


@dataclass(frozen=True)
class ChatOrder:
    """A checked chat, ready to be rendered and tokenized."""

    rendering: bytes  # for the template's process
    continued: str | None
    closes: ChatFormat | None  # the prompt leaves no reasoning in this format open
    special_tokens: bool  # are added
    keep: int | None  # the prompt's last tokens; none: all
    template: str  # digest of the template and of what it is told besides the chat
    salt: str  # of the request's caches


class PromptBuilder:
    """Makes prompts. It owns the process that renders chat templates.

    What takes time in proportion to a request is a plain function here: the doors run it by `apart`."""

    def __init__(self, service: GenerationService, max_text: int, *, trust_templates: bool) -> None:
        """`max_text`: characters of a rendered chat. `trust_templates`: requests may bring templates of their own."""
        self._service = service
        self._model = service.model
        self._trust_templates = trust_templates
        self._templates = TemplateRenderer(max_text)

    async def close(self) -> None:
        """End the process that renders templates."""
        await self._templates.close()

    def of_completion(self, fields: CompletionRequest, max_tokens: int) -> list[Sequence[int]]:
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
            return self.encode(prompts, special=fields.add_special_tokens is not False, keep=keep)
        if not all(isinstance(prompt, list) for prompt in prompts):
            raise InvalidRequest("the prompt mixes texts and token ids; send a list of one kind")
        ends: list[list[Any]] = prompts if keep is None else [prompt[-keep:] for prompt in prompts]
        return [token_ids(prompt, vocabulary, context) for prompt in ends]

    def chat_order(
        self, fields: ChatCompletionRequest | TokenizeRequest, repairs: Repairs, *, constrained: bool = False
    ) -> ChatOrder:
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
        continues = bool(fields.continue_final_message)
        generation = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
        if continues and generation:
            raise InvalidRequest("continue_final_message and add_generation_prompt are both true; choose one")
        variables: dict[str, Any] = {
            **(template.special_tokens if template else {}),
            "messages": messages,
            "tools": fields.tools or None,
            "documents": getattr(fields, "documents", None),
            "add_generation_prompt": generation,
            **(fields.chat_template_kwargs or {}),
        }
        if effort := getattr(fields, "reasoning_effort", None):
            variables.setdefault("reasoning_effort", effort)
        continued = None
        if continues:
            continued = text_of(messages[-1])
            mark_end(messages[-1])
        keep = None
        if isinstance(fields, ChatCompletionRequest):
            keep = kept_tokens(fields.truncate_prompt_tokens, fields.max_tokens, model.limits.max_context)
        order = rendering(source, variables, repairs.allowed)
        closes = model.format_of(tools=fields.tools) if constrained else None
        others = {name: value for name, value in variables.items() if name not in _OF_THE_CHAT}
        template = sha256(source.encode() + repr(sorted(others.items())).encode()).hexdigest()[:16]
        salt = getattr(fields, "cache_salt", None) or ""
        return ChatOrder(order, continued, closes, bool(fields.add_special_tokens), keep, template, salt)

    async def of_chat(self, order: ChatOrder, repairs: Repairs) -> ChatPrompt:
        """The prompt of a chat of this task's caller. Raises InvalidRequest and Overloaded."""
        owner = TextOwner(caller.get().tenant, order.salt)
        text = await self._templates.render(order.rendering, owner.tenant, repairs)
        return await self._service.apart(len(text), partial(self._chat_prompt, order, text, owner))

    def _chat_prompt(self, order: ChatOrder, text: str, owner: TextOwner) -> ChatPrompt:
        if order.continued is not None:
            text = cut_at_mark(text)
        elif order.closes is not None:
            text = order.closes.without_reasoning(text)
        (tokens,) = self.encode([text], special=order.special_tokens, keep=order.keep, owner=owner)
        return ChatPrompt(tokens, text[-_END:], order.continued)

    def encode(
        self, texts: Sequence[str], *, special: bool, keep: int | None = None, owner: TextOwner | None = None
    ) -> list[Sequence[int]]:
        """The tokens of each text, or the last `keep` of them. `owner`: of chats."""
        return tokenized(texts, self._model, special_tokens=special, keep=keep, owner=owner)

    def decode(self, tokens: Sequence[int]) -> str:
        tokenizer = self._model.tokenizer
        return tokenizer.decode(tokens) if tokenizer else ""
