"""Anthropic's Messages API: its answers, in blocks of text, thinking and tool use."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from baton.errors import BatonError
from router.frontend.api import errors
from router.frontend.api.answers import Answer, AnswerOptions, Json, Sample
from router.frontend.chat.deltas import Content, Item, ItemBegins, ItemEnds, ItemGrows, ItemStep, ItemStream, ToolCall
from router.frontend.chat.json_calls import decoded
from router.frontend.output_stream import Output

_NO_TEXT: Json = {"type": "text", "text": ""}


class AnthropicMessage(Answer):
    """The answer of POST /v1/messages."""

    end_of_stream = b""

    def __init__(self, wanted: AnswerOptions, samples: Sequence[Sample]) -> None:
        super().__init__(wanted, samples)
        self._items = ItemStream()
        self._empty = True

    def event(self, chunk: Json) -> bytes:
        return b"event: " + chunk["type"].encode() + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def failed(self, error: BatonError) -> Json:
        return errors.anthropic_body(error)

    def opening(self) -> Iterator[Json]:
        (sample,) = self.samples
        usage = {"input_tokens": len(sample.prompt), "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, None, usage)}
        yield {"type": "ping"}

    def chunks(self, sample: Sample, piece: Output) -> Iterator[Json]:
        sample.tokens += piece.tokens
        yield from self._events(self._items.steps(sample.chat.feed(piece.text)))

    def ending(self, sample: Sample) -> Iterator[Json]:
        yield from self._events(self._items.steps(sample.chat.finish()))
        yield from self._events(self._items.end())
        if self._empty:
            yield {"type": "content_block_start", "index": 0, "content_block": _NO_TEXT}
            yield {"type": "content_block_stop", "index": 0}
        reason, sequence = _stop(sample)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": self.usage()}
        yield {"type": "message_stop"}

    def _events(self, steps: Iterable[ItemStep]) -> Iterator[Json]:
        for step in steps:
            self._empty = False
            match step:
                case ItemBegins(number, item):
                    yield {"type": "content_block_start", "index": number, "content_block": _begun(item)}
                case ItemGrows(number, item, text):
                    yield {"type": "content_block_delta", "index": number, "delta": _delta(item, text)}
                case ItemEnds(number):
                    yield {"type": "content_block_stop", "index": number}

    def closing(self) -> Iterator[Json]:
        yield from ()

    def whole(self) -> Json:
        (sample,) = self.samples
        content = [_block(item) for item in sample.chat.output.items] or [_NO_TEXT]
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


def _begun(item: Item) -> Json:
    if isinstance(item, ToolCall):
        return {"type": "tool_use", "id": item.id, "name": item.name, "input": {}}
    return _NO_TEXT if item.kind is Content else {"type": "thinking", "thinking": "", "signature": ""}


def _delta(item: Item, text: str) -> Json:
    if isinstance(item, ToolCall):
        return {"type": "input_json_delta", "partial_json": text}
    if item.kind is Content:
        return {"type": "text_delta", "text": text}
    return {"type": "thinking_delta", "thinking": text}


def _block(item: Item) -> Json:
    if isinstance(item, ToolCall):
        given: Any = decoded(item.arguments or "{}")
        # Anthropic's own way to tell of arguments that were cut.
        return _begun(item) | {"input": given if isinstance(given, dict) else {"INVALID_JSON": item.arguments}}
    return _begun(item) | {"text" if item.kind is Content else "thinking": item.text}


def _stop(sample: Sample) -> tuple[str, str | None]:
    match sample.finish_reason:
        case "length":
            return "max_tokens", None
        case "tool_calls":
            return "tool_use", None
        case _:
            sequence = sample.stop_reason
            return ("stop_sequence", sequence) if isinstance(sequence, str) else ("end_turn", None)
