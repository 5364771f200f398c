"""Anthropic's Messages API: its requests as chats, and its answers."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from baton.errors import BatonError, InvalidRequest
from router.frontend.api import errors
from router.frontend.api.answers import Answer, Json, Sample
from router.frontend.api.protocol import ChatCompletionRequest
from router.frontend.output_stream import Output


class MessagesRequest(Struct, kw_only=True):
    """The body of POST /v1/messages."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class CountTokensRequest(Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def as_message(self) -> MessagesRequest:
        """The request whose prompt is counted."""
        return MessagesRequest(max_tokens=1, **asdict(self))


def chat_of_messages(request: MessagesRequest) -> ChatCompletionRequest:
    """The same request as a chat, whose parts are blocks of text. Raises InvalidRequest if thinking is enabled."""
    if request.thinking and request.thinking.get("type") != "disabled":
        raise InvalidRequest("thinking is enabled, which this server does not support yet; leave thinking out")
    system = [{"role": "system", "content": request.system}] if request.system else []
    messages = request.messages
    continued = bool(messages) and messages[-1].get("role") == "assistant"
    return ChatCompletionRequest(
        messages=[*system, *messages],
        model=request.model,
        max_completion_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        tools=request.tools,
        continue_final_message=continued,
        add_generation_prompt=not continued,
    )


class Message(Answer):
    """The answer of POST /v1/messages: one text."""

    end_of_stream = b""

    def event(self, chunk: Json) -> bytes:
        return b"event: " + chunk["type"].encode() + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def failed(self, error: BatonError) -> Json:
        return errors.anthropic_body(error)

    def opening(self) -> Iterator[Json]:
        (sample,) = self.samples
        usage = {"input_tokens": len(sample.prompt), "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, None, usage)}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        yield {"type": "ping"}

    def chunk(self, sample: Sample, piece: Output) -> Json | None:
        sample.tokens += piece.tokens
        if not piece.text:
            return None
        return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece.text}}

    def ending(self, sample: Sample) -> Iterator[Json]:
        yield {"type": "content_block_stop", "index": 0}
        reason, sequence = _stop(sample)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": self.usage()}
        yield {"type": "message_stop"}

    def closing(self) -> Iterator[Json]:
        yield from ()

    def whole(self) -> Json:
        (sample,) = self.samples
        content = [{"type": "text", "text": "".join(sample.text)}]
        return self._message(content, *_stop(sample), self.usage())

    def usage(self) -> Json:
        """Tokens. Anthropic counts those that were cached apart from the others."""
        counted = super().usage()
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counted["completion_tokens"],
        }

    def _message(self, content: list[Json], reason: str | None, sequence: str | None, usage: Json) -> Json:
        return {
            "id": self.wanted.id,
            "type": "message",
            "role": "assistant",
            "model": self.wanted.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }


def _stop(sample: Sample) -> tuple[str, str | None]:
    if sample.finish_reason == "length":
        return "max_tokens", None
    if isinstance(sample.stop_reason, str):
        return "stop_sequence", sample.stop_reason
    return "end_turn", None
