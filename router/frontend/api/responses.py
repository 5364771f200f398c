"""OpenAI's Responses API: its answers, in items of text, reasoning and function calls."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from baton.errors import BatonError
from router.frontend.api import errors
from router.frontend.api.answers import Answer, AnswerOptions, Json, Sample
from router.frontend.api.responses_input import ResponsesRequest
from router.frontend.chat.deltas import (
    ChatDelta,
    Content,
    Item,
    ItemBegins,
    ItemEnds,
    ItemGrows,
    ItemStep,
    ItemStream,
    Reasoning,
    Text,
    ToolCall,
)
from router.frontend.output_stream import Output

_NO_TEXT = Text(Content)
_EVENTS = {Content: "output_text", Reasoning: "reasoning_text"}


class ModelResponse(Answer):
    """The answer of POST /v1/responses: one message with one text."""

    end_of_stream = b""

    def __init__(self, request: ResponsesRequest, wanted: AnswerOptions, samples: Sequence[Sample]) -> None:
        super().__init__(wanted, samples)
        self._request = request
        self._name = wanted.id.removeprefix("resp_")
        self._items = ItemStream()
        self._events = 0

    def event(self, chunk: Json) -> bytes:
        chunk |= {"sequence_number": self._events}
        self._events += 1
        return b"event: " + chunk["type"].encode() + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def failed(self, error: BatonError) -> Json:
        if not self._events:
            return errors.body_of(error)
        return {"type": "error", "code": error.reason, "message": str(error), "param": None}

    def opening(self) -> Iterator[Json]:
        begun = self._response("in_progress", [])
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}

    def chunks(self, sample: Sample, piece: Output) -> Iterator[Json]:
        sample.tokens += piece.tokens
        yield from self._item_events(sample.chat.feed(piece.text))

    def ending(self, sample: Sample) -> Iterator[Json]:
        yield from self._item_events(sample.chat.finish())
        for step in self._items.end():
            yield from self._events_of(step)
        whole = self.whole()
        if not sample.chat.output.items:
            yield from self._events_of(ItemBegins(0, _NO_TEXT))
            yield from self._events_of(ItemEnds(0, _NO_TEXT))
        yield {"type": f"response.{whole['status']}", "response": whole}

    def _item_events(self, deltas: Sequence[ChatDelta]) -> Iterator[Json]:
        for step in self._items.steps(deltas):
            yield from self._events_of(step)

    def _events_of(self, step: ItemStep) -> Iterator[Json]:
        number, item = step.number, step.item
        place: Json = {"item_id": self._id_of(number, item), "output_index": number}
        part = place | {"content_index": 0}
        kind = "function_call_arguments" if isinstance(item, ToolCall) else _EVENTS[item.kind]
        extra: Json = {"logprobs": []} if kind == "output_text" else {}
        match step:
            case ItemBegins():
                begun = self._output_item(number, item, "in_progress", begun=True)
                yield {"type": "response.output_item.added", "output_index": number, "item": begun}
                if isinstance(item, Text):
                    yield {"type": "response.content_part.added", **part, "part": _part(item, "")}
            case ItemGrows(text=text):
                where = place if isinstance(item, ToolCall) else part
                yield {"type": f"response.{kind}.delta", **where, "delta": text, **extra}
            case ItemEnds():
                if isinstance(item, ToolCall):
                    yield {"type": f"response.{kind}.done", **place, "name": item.name, "arguments": item.arguments}
                else:
                    yield {"type": f"response.{kind}.done", **part, "text": item.text, **extra}
                    yield {"type": "response.content_part.done", **part, "part": _part(item, item.text)}
                done = self._output_item(number, item, "completed")
                yield {"type": "response.output_item.done", "output_index": number, "item": done}

    def closing(self) -> Iterator[Json]:
        yield from ()

    def whole(self) -> Json:
        (sample,) = self.samples
        status = "incomplete" if sample.finish_reason == "length" else "completed"
        items = sample.chat.output.items or [_NO_TEXT]
        last = len(items) - 1  # it is the one that was cut
        output = [
            self._output_item(number, item, status if number == last else "completed")
            for number, item in enumerate(items)
        ]
        return self._response(status, output) | {"usage": self.usage(), "metrics": self.metrics()}

    def usage(self) -> Json:
        counted = super().usage()
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": counted["total_tokens"],
        }

    def _id_of(self, number: int, item: Item) -> str:
        prefix = "fc" if isinstance(item, ToolCall) else "msg" if item.kind is Content else "rs"
        return f"{prefix}_{self._name}" + (f"_{number}" if number else "")

    def _output_item(self, number: int, item: Item, status: str, *, begun: bool = False) -> Json:
        """An item with its text, or as it is when it has begun."""
        made: Json = {"id": self._id_of(number, item), "status": status}
        if isinstance(item, ToolCall):
            arguments = "" if begun else item.arguments
            return made | {"type": "function_call", "call_id": item.id, "name": item.name, "arguments": arguments}
        content = [] if begun else [_part(item, item.text)]
        if item.kind is Content:
            return made | {"type": "message", "role": "assistant", "content": content}
        return made | {"type": "reasoning", "summary": [], "content": content}

    def _response(self, status: str, output: list[Json]) -> Json:
        asked = self._request
        return {
            "id": self.wanted.id,
            "object": "response",
            "created_at": self.wanted.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.wanted.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": asked.metadata or {},
        }


def _part(item: Text, text: str) -> Json:
    if item.kind is Content:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
