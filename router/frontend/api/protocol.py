"""The requests of the HTTP APIs: OpenAI's fields, vLLM's extra ones, and Baton's objectives.

Unknown fields are ignored, as vLLM does. A null means that a field is left out. A field that Baton knows and can't
serve is refused with its name, unless its value changes nothing.
"""

# pyright: strict

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from baton.errors import InvalidRequest, UnsupportedField, shown
from router.frontend.parameter_bounds import check_bounds

R = TypeVar("R", bound="GenerationFields")


class StreamOptions(Struct, kw_only=True):
    """Which events of a stream carry the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    ttft_ms: int | None = None
    tpot_ms: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_logprobs: int | None = None
    length_penalty: float | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    # Known, and not served: see _NEUTRAL and _RENAMED.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structural_tag: Any = None
    spaces_between_special_tokens: bool | None = None
    suffix: str | None = None
    truncation_side: str | None = None


class TokenizeRequest(Struct, kw_only=True):
    """The body of POST /tokenize: a prompt, or messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "structural_tag": (),
    "truncation_side": ("left",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
}
"""Fields that change the output and can't be served, with the values that change nothing."""

_RENAMED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}
"""vLLM's older names of fields."""

T = TypeVar("T", bound=Struct)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a body. Raises InvalidRequest with the field and what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request's JSON is not as it must be: {shown(str(error), 300)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request's body is no JSON: {shown(str(error), 300)}") from None


def refuse_unserved(request: GenerationFields) -> None:
    """Raise InvalidRequest for a field that Baton knows and can't serve."""
    for name, new in _RENAMED.items():
        if getattr(request, name) is not None:
            raise unsupported(name, getattr(request, name), f"send {new}")
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise unsupported(name, value)
    if request.stream and (request.use_beam_search or (request.best_of or 0) > samples(request)):
        raise InvalidRequest("stream is set with best_of or use_beam_search, whose outputs are known at the end alone")
    if not request.use_beam_search and request.length_penalty not in (None, 1):
        raise InvalidRequest("length_penalty is set without use_beam_search; set both")


def refuse_fields(request: Struct, *names: str) -> None:
    """Raise UnsupportedField for one of these fields that is given and neither empty nor false."""
    for name in names:
        if value := getattr(request, name):
            raise unsupported(name, value)


def unsupported(field: str, value: Any, remedy: str = "") -> UnsupportedField:
    """The error for a field that can't be served with that value."""
    remedy = remedy or f"leave {field} out"
    error = UnsupportedField(f"{field} is {shown(repr(value))}, which this server does not support; {remedy}")
    error.field = field
    return error


def samples(request: GenerationFields) -> int:
    """How many outputs each prompt gets. Raises InvalidRequest."""
    n = 1 if request.n is None else request.n
    check_bounds({"n": n})
    return n
