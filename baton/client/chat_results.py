"""What the stream of /v1/chat/completions says, as plain typed values. Pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.client.connection import http_error
from baton.client.results import TokenUsage
from baton.errors import Unavailable

_DONE = b"[DONE]"


@dataclass(frozen=True)
class ChatToolCall:
    """A function that the model calls, with its arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatDelta:
    """New output of a chat. `tool_calls` holds the pieces of calls as the API streams them."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    index: int = 0


@dataclass(frozen=True)
class ChatAnswer:
    """One finished answer. A request with `n` above 1 has one for each, in the order of `index`.

    `metrics` has vLLM's times and every hop, in milliseconds: see docs/http-api.md."""

    content: str
    reasoning: str
    tool_calls: tuple[ChatToolCall, ...]
    finish_reason: str
    stop_reason: str | int | None
    usage: TokenUsage
    metrics: Mapping[str, Any]
    request_id: str
    index: int = 0


@dataclass
class _Choice:
    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])
    finish_reason: str = ""
    stop_reason: str | int | None = None


class EventDecoder:
    """Cuts the bytes of server-sent events into their JSON objects."""

    def __init__(self) -> None:
        self._held = b""
        self.done = False  # the stream said that it has ended

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the objects of all whole lines so far. Raises Unavailable for a line that is no JSON."""
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            body = line[5:].strip()
            if body == _DONE:
                self.done = True
                return
            try:
                event = json.loads(body)
            except ValueError:
                raise Unavailable(f"the server sent an event that is no JSON: {body[:80]!r}") from None
            if not isinstance(event, dict):
                raise Unavailable(f"the server sent an event that is no object: {body[:80]!r}")
            yield event


class ChatCollector:
    """Puts the chunks of one stream together."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}
        self._id = ""
        self._usage = TokenUsage()
        self._metrics: Mapping[str, Any] = {}

    def add_chunk(self, chunk: Mapping[str, Any]) -> list[ChatDelta]:
        """Add a chunk; return what is new in it. Raises BatonError if it is an error."""
        if (error := chunk.get("error")) is not None:
            raise http_error(int(error.get("code") or 500), str(error.get("message")))
        self._id = chunk.get("id") or self._id
        if usage := chunk.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            self._usage = TokenUsage(
                usage.get("prompt_tokens", 0), details.get("cached_tokens", 0), usage.get("completion_tokens", 0)
            )
        self._metrics = chunk.get("metrics") or self._metrics
        return [delta for choice in chunk.get("choices", ()) if (delta := self._take(choice)) is not None]

    def answers(self) -> tuple[ChatAnswer, ...]:
        """The answers, once the stream has ended. Raises Unavailable if an answer did not end."""
        if not self._choices or any(not choice.finish_reason for choice in self._choices.values()):
            raise Unavailable("the stream ended without saying why; the router may have been killed")
        return tuple(self._answer(index) for index in sorted(self._choices))

    def _take(self, choice: Mapping[str, Any]) -> ChatDelta | None:
        index, delta = choice.get("index", 0), choice.get("delta") or {}
        known = self._choices.setdefault(index, _Choice())
        known.finish_reason = choice.get("finish_reason") or known.finish_reason
        if choice.get("stop_reason") is not None:
            known.stop_reason = choice["stop_reason"]
        content = delta.get("content") or ""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        pieces = tuple(delta.get("tool_calls") or ())
        known.content.append(content)
        known.reasoning.append(reasoning)
        for piece in pieces:
            call = known.calls.setdefault(piece.get("index", 0), {"id": "", "name": "", "arguments": ""})
            function = piece.get("function") or {}
            call["id"] = piece.get("id") or call["id"]
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""
        return ChatDelta(content, reasoning, pieces, index) if content or reasoning or pieces else None

    def _answer(self, index: int) -> ChatAnswer:
        choice = self._choices[index]
        return ChatAnswer(
            content="".join(choice.content),
            reasoning="".join(choice.reasoning),
            tool_calls=tuple(ChatToolCall(**choice.calls[number]) for number in sorted(choice.calls)),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            usage=self._usage,
            metrics=self._metrics,
            request_id=self._id.removeprefix("chatcmpl-"),
            index=index,
        )
