"""POST /v1/chat/completions: its request, and its response whole and in chunks."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from router.frontend.api.protocol import GenerationFields
from router.frontend.api.response_builder import Answer, Json, Sample
from router.frontend.api.token_logprobs import chat_logprobs
from router.frontend.chat.deltas import CallArguments, CallBegin, ChatDelta, ChatOutput, Content, Reasoning
from router.frontend.output_stream import Output


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
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

    @property
    def output_tokens(self) -> int | None:
        """How many tokens to generate at most; None: as many as the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatCompletion(Answer):
    """POST /v1/chat/completions."""

    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def opening(self) -> Iterator[Json]:
        for sample in self.samples:
            content = self.wanted.echo or ""
            chunk = self._chunk([_chat_choice(sample.index, {"role": "assistant", "content": content}, None, None)])
            if self.wanted.token_ids:
                chunk["prompt_token_ids"] = list(sample.prompt)
            yield chunk

    def _delta(self, sample: Sample, piece: Output) -> Json | None:
        delta = _chat_delta(sample.chat.feed(piece.text))
        if not delta and not self._shows_tokens(piece):
            return None
        texts = sample.added(piece.logprobs)
        logprobs = chat_logprobs(self.wanted.names, piece.logprobs, texts) if self.wanted.logprobs else None
        choice = _chat_choice(sample.index, delta or {"content": ""}, logprobs, None)
        return choice | {"token_ids": piece.tokens} if self.wanted.token_ids else choice

    def _end(self, sample: Sample) -> Json:
        return _chat_choice(sample.index, {}, None, sample.finish_reason) | {"stop_reason": sample.stop_reason}

    def ending(self, sample: Sample) -> Iterator[Json]:
        if delta := _chat_delta(sample.chat.finish()):
            yield self._chunk([_chat_choice(sample.index, delta, None, None)])
        yield from super().ending(sample)

    def whole(self) -> Json:
        answer = super().whole()
        if self.wanted.prompt_logprobs:
            answer["prompt_logprobs"] = self.prompt_logprobs(self.samples[0])
        if self.wanted.token_ids:
            answer["prompt_token_ids"] = list(self.samples[0].prompt)
        return answer

    def _choice(self, sample: Sample) -> Json:
        logprobs = chat_logprobs(self.wanted.names, sample.logprobs, sample.token_texts)
        choice: Json = {
            "index": sample.index,
            "message": self._message(sample.chat.output),
            "logprobs": logprobs if self.wanted.logprobs else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        return choice | {"token_ids": sample.tokens} if self.wanted.token_ids else choice

    def _message(self, output: ChatOutput) -> Json:
        text = (self.wanted.echo or "") + output.content
        hidden = not text and (output.calls or output.reasoning)
        message: Json = {"role": "assistant", "content": None if hidden else text, "refusal": None}
        if output.reasoning:
            message |= {"reasoning": output.reasoning, "reasoning_content": output.reasoning}
        if output.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in output.calls
            ]
        return message


def _chat_choice(index: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, "stop_reason": None}


def _chat_delta(deltas: Sequence[ChatDelta]) -> Json:
    """All deltas of one piece as one; each call once."""
    made: Json = {}
    calls: dict[int, Json] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                made["content"] = made.get("content", "") + text
            case Reasoning(text):
                made["reasoning"] = made["reasoning_content"] = made.get("reasoning", "") + text
            case CallBegin(index, id_, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": id_, "type": "function", "function": function}
            case CallArguments(index, text):
                calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                calls[index]["function"]["arguments"] += text
    return made | {"tool_calls": list(calls.values())} if calls else made
