"""One request from the command line, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import InvalidRequest, Unavailable
from baton.v1 import generation_pb2 as pb
from deploy.client import Client


@dataclass
class Generated:
    """A finished generation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # seconds since the request left, one for each token
    finished: pb.Finished = field(default_factory=pb.Finished)

    @property
    def finish_reason(self) -> str:
        return pb.FinishReason.Name(self.finished.finish_reason).removeprefix("FINISH_REASON_").lower()

    def as_json(self) -> dict[str, Any]:
        usage, timing, work = self.finished.usage, self.finished.timing, self.finished.work
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
            },
            "timing": {descriptor.name: round(value, 3) for descriptor, value in timing.ListFields()},
            "work": {
                "attempts": work.attempts,
                "prefill_worker": work.prefill_worker,
                "decode_workers": list(work.decode_workers),
                "tokens_computed": work.tokens_computed,
                "pages_hit": work.pages_hit,
                "pages_shipped": work.pages_shipped,
                "pages_on_device": work.pages_on_device,
                "pages_fetched": work.pages_fetched,
            },
            "seed": self.finished.seed,
            "request_id": self.finished.request_id,
        }


def parse_token_ids(text: str) -> list[int]:
    """Parse token ids written as `1,2,3`. Raises InvalidRequest."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{text!r} is no list of token ids; write them as 1,2,3") from None
    for token in ids:
        if not 0 <= token < 2**32:
            raise InvalidRequest(f"{token} is no token id; they are 0 or more")
    return ids


def request(
    text: str | None,
    token_ids: Sequence[int] | None = None,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    model: str = "",
) -> pb.GenerateRequest:
    """Build a request. None stands for the model's default. Raises InvalidRequest if a value can't be encoded."""
    if (text is None) == (token_ids is None):
        raise InvalidRequest("give either a text or --token-ids")
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    try:
        return pb.GenerateRequest(
            model=model,
            text=text,
            token_ids=None if token_ids is None else pb.TokenIds(ids=token_ids),
            stop=stop,
            ignore_eos=ignore_eos,
            **{name: value for name, value in given.items() if value is not None},
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request can't be sent: {error}") from None


def run(
    client: Client,
    asked: pb.GenerateRequest,
    timeout: float | None = None,
    on_delta: Callable[[pb.Delta], None] | None = None,
) -> Generated:
    """Send the request and read its stream to the end. Raises BatonError."""
    made = Generated()
    begin = time.monotonic()
    for response in client.generate(asked, timeout=timeout):
        if response.HasField("finished"):
            made.finished = response.finished
            return made
        now = time.monotonic() - begin
        made.text += response.delta.text
        made.token_ids += response.delta.token_ids
        made.arrivals += [now] * len(response.delta.token_ids)
        if on_delta is not None:
            on_delta(response.delta)
    raise Unavailable("the stream ended without saying why; the router may have been killed")
