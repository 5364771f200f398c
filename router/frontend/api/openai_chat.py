"""POST /v1/chat/completions: its request, and its response whole and in chunks."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from baton.messages import TokenLogprob
from router.frontend.api.protocol import GenerationFields
from router.frontend.api.response_builder import (
    Choice,
    Count,
    OpenAiResponse,
    PromptLogprobs,
    ResponseBuilder,
    StopCause,
)
from router.frontend.api.token_logprobs import ChatLogprobs, Json, chat_logprobs
from router.frontend.chat.deltas import CallArguments, CallBegin, ChatDelta, ChatOutput, Content, Reasoning, ToolCall
from router.frontend.output_stream import Output


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    OWN_NAMES: ClassVar = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None  # its newer name for max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    # Known, and not served: see protocol._NEUTRAL.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class FunctionCall(Struct):
    """A function and its arguments as JSON."""

    name: str
    arguments: str


class ChatToolCall(Struct, tag_field="type", tag="function"):
    """A call that the model makes."""

    id: str
    function: FunctionCall


class CustomCall(Struct):
    """A tool that takes a text, and its text."""

    name: str
    input: str


class ChatCustomCall(Struct, tag_field="type", tag="custom"):
    """A call of a tool that takes a text."""

    id: str
    custom: CustomCall


class AssistantMessage(Struct, kw_only=True, tag_field="role", tag="assistant"):
    """What the model answers."""

    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall | ChatCustomCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One output."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: StopCause
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatPart(Struct):
    """More of an output."""

    index: Count
    delta: Json
    logprobs: ChatLogprobs | None = None
    finish_reason: StopCause | None = None  # None: more may come
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(OpenAiResponse, kw_only=True, tag="chat.completion"):
    """The answer of POST /v1/chat/completions."""

    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatBuilder(ResponseBuilder):
    """Builds the response of POST /v1/chat/completions."""

    prefix = "chatcmpl-"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> Iterator[Json]:
        for choice in self.choices:
            delta = {"role": "assistant", "content": self.options.echo or ""}
            chunk = self._chunk([ChatPart(choice.index, delta)])
            if self.options.token_ids:
                chunk["prompt_token_ids"] = list(choice.prompt)
            yield chunk

    def _delta(self, choice: Choice, piece: Output) -> ChatPart | None:
        chat = choice.chat
        delta = _chat_delta(chat.feed(piece.text), chat.output)
        scored, texts = choice.released(piece)
        if not delta and not scored and not self._shows_tokens(piece):
            return None
        token_ids = piece.tokens if self.options.token_ids else UNSET
        logprobs = self._logprobs(scored, texts)
        return ChatPart(choice.index, delta or {"content": ""}, logprobs, token_ids=token_ids)

    def ending(self, choice: Choice) -> Iterator[Json]:
        if delta := _chat_delta(choice.finish_chat(), choice.chat.output):
            yield self._chunk([ChatPart(choice.index, delta)])
        choice.finish_tokens()
        rest = self._logprobs(choice.logprobs, choice.token_texts, choice.whole_tokens) if choice.logprobs else None
        yield self._chunk([ChatPart(choice.index, {}, rest, choice.finish_reason, choice.stop_reason)])

    def whole(self) -> ChatCompletion:
        first = self.choices[0]
        return ChatCompletion(
            **self._about,
            choices=[self._whole_choice(choice) for choice in self.choices],
            usage=self.usage(),
            metrics=self.metrics(),
            prompt_logprobs=self.prompt_logprobs(first) if self.options.prompt_logprobs else UNSET,
            prompt_token_ids=list(first.prompt) if self.options.token_ids else UNSET,
        )

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=self._message(choice.chat.output),
            logprobs=self._logprobs(choice.logprobs, choice.token_texts, choice.whole_tokens),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.tokens if self.options.token_ids else UNSET,
        )

    def _logprobs(
        self, logprobs: Sequence[TokenLogprob], texts: Sequence[str], whole: int | None = None
    ) -> ChatLogprobs | None:
        return chat_logprobs(self.options.names, logprobs, texts, whole) if self.options.logprobs else None

    def _message(self, output: ChatOutput) -> AssistantMessage:
        text = (self.options.echo or "") + output.content
        hidden = not text and (output.calls or output.reasoning)
        calls = [_call(call) for call in output.calls]
        reasoning = output.reasoning or UNSET
        return AssistantMessage(
            content=None if hidden else text, refusal=None, reasoning=reasoning, reasoning_content=reasoning,
            tool_calls=calls or UNSET,
        )  # fmt: skip


def _call(call: ToolCall) -> ChatToolCall | ChatCustomCall:
    if call.takes_text:
        return ChatCustomCall(call.id, CustomCall(call.name, call.arguments))
    return ChatToolCall(call.id, FunctionCall(call.name, call.arguments))


def _chat_delta(deltas: Sequence[ChatDelta], output: ChatOutput) -> Json:
    """All deltas of one piece as one; each call once. The output has them already."""
    whole: Json = {}
    calls: dict[int, Json] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                whole["content"] = whole.get("content", "") + text
            case Reasoning(text):
                whole["reasoning"] = whole["reasoning_content"] = whole.get("reasoning", "") + text
            case CallBegin(index, id_, name, takes_text):
                kind, member = ("custom", "input") if takes_text else ("function", "arguments")
                # The published chunks know no other type; there a call's member tells what it is.
                typed: Json = {} if takes_text else {"type": kind}
                calls[index] = {"index": index, "id": id_, **typed, kind: {"name": name, member: ""}}
            case CallArguments(index, text):
                kind, member = ("custom", "input") if output.calls[index].takes_text else ("function", "arguments")
                call = calls.setdefault(index, {"index": index, kind: {member: ""}})
                call[kind][member] += text
    return whole | {"tool_calls": list(calls.values())} if calls else whole
