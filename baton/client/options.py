"""What a request may ask for: one keyword argument for each field of `baton.v1.GenerateRequest`, and the chat API's.

`proto/baton/v1/generation.proto` and docs/http-api.md say what the fields mean. A field that is left out, or None, has
the served model's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from baton.errors import InvalidRequest

if TYPE_CHECKING:
    from baton.v1 import cache_pb2, generation_pb2


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `generate`. A message is a mapping, such as `structured_output={"regex": "[ab]+"}`."""

    model: str
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    request_id: str
    priority: int
    ttft_ms: int | None
    tpot_ms: int | None
    affinity: str
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    min_tokens: int
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    include_stop: bool
    special_tokens: bool
    shown_special_tokens: Sequence[int]
    cache_salt: str
    structured_output: Mapping[str, Any] | None
    n: int | None
    best_of: int | None
    beam_search: Mapping[str, Any] | None
    truncate_prompt_tokens: int | None


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of `chat`: the fields of /v1/chat/completions."""

    model: str
    max_completion_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    logit_bias: Mapping[str, float] | None
    min_tokens: int
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    priority: int
    ttft_ms: int | None
    tpot_ms: int | None
    cache_salt: str | None
    session_id: str | None
    request_id: str | None
    truncate_prompt_tokens: int | None


class PinOptions(TypedDict, total=False):
    """Keyword arguments of `pin_prefix`: `id` is the pin's name, which the router makes if there is none."""

    model: str
    ttl_ms: int | None
    id: str
    tenant: str
    cache_salt: str


def generate_request(prompt: str | Sequence[int], options: SamplingOptions) -> generation_pb2.GenerateRequest:
    """Build the request of a text or of token ids. Raises InvalidRequest for an unknown field, or for a value that the
    field can't hold."""
    from baton.v1 import generation_pb2 as pb

    fields: dict[str, Any] = dict(options)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    return _message(pb.GenerateRequest, prompt, fields)


def pin_request(prompt: str | Sequence[int], options: PinOptions) -> cache_pb2.PinPrefixRequest:
    """Build the order to pin a prefix. Raises InvalidRequest as `generate_request` does."""
    from baton.v1 import cache_pb2

    return _message(cache_pb2.PinPrefixRequest, prompt, options)


def _message(kind: Any, prompt: str | Sequence[int], options: Mapping[str, Any]) -> Any:
    from baton.v1 import generation_pb2 as pb

    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    known = kind.DESCRIPTOR.fields_by_name
    if unknown := fields.keys() - known.keys():
        raise InvalidRequest(f"{min(unknown)} is no field of a request; the fields are {', '.join(known)}")
    try:
        if isinstance(prompt, str):
            return kind(text=prompt, **fields)
        return kind(token_ids=pb.TokenIds(ids=prompt), **fields)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request can't be sent: {error}") from None
