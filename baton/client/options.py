"""What a request may ask for: one keyword argument for each field of `baton.v1.GenerateRequest`, and the chat API's.

`proto/baton/v1/generation.proto` and docs/http-api.md say what the fields mean. A field that is left out, or None, has
the served model's default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeGuard

import msgspec

from baton.errors import InvalidRequest
from baton.operator_api import PinPrefix

if TYPE_CHECKING:
    from baton.v1 import generation_pb2


class _SharedOptions(TypedDict, total=False):
    """What `generate` and `chat` have in common."""

    model: str
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    n: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    min_tokens: int
    kv_compression: Mapping[str, Any] | None
    priority: int
    ttft_ms: int | None
    tpot_ms: int | None
    cache_salt: str | None
    request_id: str | None
    truncate_prompt_tokens: int | None


class SamplingOptions(_SharedOptions, total=False):
    """Keyword arguments of `generate`. A message is a mapping, such as `structured_output={"regex": "[ab]+"}`."""

    max_tokens: int | None
    stop: Sequence[str]
    logprobs: int | None
    prompt_logprobs: int | None
    affinity: str
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    include_stop: bool
    special_tokens: bool
    shown_special_tokens: Sequence[int]
    structured_output: Mapping[str, Any] | None
    best_of: int | None
    beam_search: Mapping[str, Any] | None


class ChatOptions(_SharedOptions, total=False):
    """Keyword arguments of `chat`: the fields of /v1/chat/completions."""

    max_completion_tokens: int | None
    stop: str | Sequence[str] | None
    logit_bias: Mapping[str, float] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    session_id: str | None


class PinOptions(TypedDict, total=False):
    """Keyword arguments of `pin_prefix`: `id` is the pin's name, which the router makes if there is none."""

    model: str
    ttl_ms: int | None
    id: str
    tenant: str
    cache_salt: str


Prompt: TypeAlias = str | Sequence[int]
Params: TypeAlias = SamplingOptions | Sequence[SamplingOptions] | None
"""Options of all prompts, or one for each."""


def generate_request(prompt: Prompt, options: SamplingOptions) -> generation_pb2.GenerateRequest:
    """Build the request of a text or of token ids. Raises InvalidRequest for an unknown field, or for a value that the
    field can't hold."""
    from baton.v1 import generation_pb2 as pb

    fields = _present(options, pb.GenerateRequest.DESCRIPTOR.fields_by_name)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    try:
        if isinstance(prompt, str):
            return pb.GenerateRequest(text=prompt, **fields)
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **fields)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request can't be sent: {error}") from None


def is_many(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Sequence[Prompt]]:
    """Whether these are several prompts, and not one as a text or token ids."""
    return not isinstance(prompts, str) and len(prompts) > 0 and isinstance(prompts[0], str | Sequence)


def options_of(prompts: int, params: Params, common: SamplingOptions) -> list[SamplingOptions]:
    """Return the options of each of so many prompts. Raises InvalidRequest if there are not as many parameters."""
    each: Sequence[SamplingOptions] = (
        [params or {}] * prompts if params is None or isinstance(params, Mapping) else params
    )
    if len(each) != prompts:
        raise InvalidRequest(f"there are {prompts} prompts and {len(each)} params; give one for each, or one for all")
    return [{**common, **one} for one in each]


def pin_call(prompt: str | Sequence[int], options: PinOptions, timeout: float | None) -> PinPrefix:
    """Build the call that pins a prefix within `timeout` seconds. Raises InvalidRequest as `generate_request` does."""
    fields = _present(options, PinPrefix.__struct_fields__)
    fields |= {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
    if timeout is not None:
        fields["timeout_ms"] = max(1, int(timeout * 1_000))
    try:
        return msgspec.convert(fields, PinPrefix, from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request can't be sent: {error}") from None


def _present(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the options that are set. Raises InvalidRequest for an unknown one."""
    if unknown := {name for name, value in options.items() if value is not None} - {*known}:
        raise InvalidRequest(f"{min(unknown)} is no field of a request; the fields are {', '.join(known)}")
    return {name: value for name, value in options.items() if value is not None}
