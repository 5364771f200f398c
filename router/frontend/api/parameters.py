"""From the fields of the HTTP APIs to a `GenerateRequest` of `baton.v1`."""

# pyright: strict

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Sized

from baton.errors import ContextTooLong, InvalidRequest
from baton.v1 import generation_pb2 as pb
from router.frontend.api.protocol import GenerationFields
from router.frontend.api.structured_outputs import set_structured_output

_SESSION_HEADERS = (
    "x-session-id",
    "x-session-affinity",
    "x-smg-routing-key",
    "x-dynamo-session-id",
    "x-correlation-id",
)
"""Headers that name a session, the strongest first. The body's `session_id` comes before all of them."""
_MAX_KEY = 80
_MOST = {"stop": 16, "stop_token_ids": 1_000, "logit_bias": 1_024, "bad_words": 1_000, "allowed_token_ids": 2**18}
"""Entries of fields that are read one by one. `request_parsing` has the same limits or lower ones."""
_UINT32, _SINT32 = 2**32, 2**31
SEEDS = 2**63  # clients send any 64-bit number, negative ones too


def rule_entries(fields: GenerationFields) -> int:
    """Return how many tokens and words the rules of a request name: the work for each of its prompts."""
    return sum(len(given) for given in (fields.logit_bias, fields.allowed_token_ids, fields.bad_words) if given)


def generate_request(
    fields: GenerationFields, prompt: Sequence[int], *, max_tokens: int | None, logprobs: int | None,
    prompt_logprobs: int | None, affinity: str, shown: Sequence[int] = (),
) -> pb.GenerateRequest:  # fmt: skip
    """The request for all outputs of one prompt. `shown` are special tokens that stay in the text.

    Raises InvalidRequest for a number that no field can hold. `request_parsing` checks the rest."""
    for name, most in _MOST.items():
        given: Sized | None = getattr(fields, name)
        if given is not None and not isinstance(given, str) and len(given) > most:
            raise InvalidRequest(f"{name} has {len(given)} entries; at most {most} are allowed")
    request = pb.GenerateRequest(
        model=fields.model or "",
        stop=[fields.stop] if isinstance(fields.stop, str) else fields.stop or [],
        ignore_eos=bool(fields.ignore_eos),
        priority=_number("priority", fields.priority or 0, -_SINT32, _SINT32),
        affinity=affinity,
        cache_salt=fields.cache_salt or "",
    )
    request.token_ids.ids.extend(prompt)
    request.stop_token_ids.extend(_number("stop_token_ids", one, 0, _UINT32) for one in fields.stop_token_ids or ())
    if fields.temperature is not None:
        request.temperature = _float("temperature", fields.temperature)
    if fields.top_p is not None:
        request.top_p = _float("top_p", fields.top_p)
    if fields.min_p is not None:
        request.min_p = _float("min_p", fields.min_p)
    if fields.top_k is not None:
        request.top_k = 0 if fields.top_k == -1 else _number("top_k", fields.top_k, 0, _UINT32)
    if fields.seed is not None:
        request.seed = fields.seed % SEEDS
    if max_tokens is not None:
        request.max_tokens = _number("max_tokens", max_tokens, 1, _UINT32)
    if logprobs is not None:
        request.logprobs = _number("logprobs", logprobs, 0, _UINT32)
    if prompt_logprobs is not None:
        request.prompt_logprobs = _number("prompt_logprobs", prompt_logprobs, 0, _UINT32)
    _set_samples(request, fields)
    _set_rules(request, fields)
    request.shown_special_tokens.extend(shown)
    set_structured_output(request, fields)
    if fields.ttft_ms is not None:
        request.ttft_ms = _number("ttft_ms", fields.ttft_ms, 1, _UINT32)
    if fields.tpot_ms is not None:
        request.tpot_ms = _number("tpot_ms", fields.tpot_ms, 1, _UINT32)
    return request


def _set_samples(request: pb.GenerateRequest, fields: GenerationFields) -> None:
    if fields.n is not None:
        request.n = _number("n", fields.n, 1, _UINT32)
    if fields.best_of is not None:
        request.best_of = _number("best_of", fields.best_of, 1, _UINT32)
    if fields.use_beam_search:
        penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
        request.beam_search.length_penalty = _float("length_penalty", penalty)


def _set_rules(request: pb.GenerateRequest, fields: GenerationFields) -> None:
    request.presence_penalty = _float("presence_penalty", fields.presence_penalty or 0.0)
    request.frequency_penalty = _float("frequency_penalty", fields.frequency_penalty or 0.0)
    if fields.repetition_penalty is not None:
        request.repetition_penalty = _float("repetition_penalty", fields.repetition_penalty)
    for token, value in (fields.logit_bias or {}).items():
        request.logit_bias[_number("logit_bias", token, 0, _UINT32)] = _float("logit_bias", value)
    request.min_tokens = _number("min_tokens", fields.min_tokens or 0, 0, _UINT32)
    request.bad_words.extend(fields.bad_words or ())
    request.allowed_token_ids.extend(
        _number("allowed_token_ids", token, 0, _UINT32) for token in fields.allowed_token_ids or ()
    )
    request.include_stop = bool(fields.include_stop_str_in_output)
    request.special_tokens = fields.skip_special_tokens is False


def affinity_of(session: str | None, headers: Mapping[str, str]) -> str:
    """The affinity key of a request's session; a name that is no key is hashed into one."""
    names = (session, *map(headers.get, _SESSION_HEADERS))
    name = next((name for name in names if name), "")
    if len(name) <= _MAX_KEY and name.isascii() and name.isprintable() and " " not in name:
        return name
    return hashlib.sha256(name.encode()).hexdigest()


def token_ids(given: Sequence[object], vocabulary: int, context: int) -> list[int]:
    """A prompt of token ids. Raises InvalidRequest, for one that is too long before it looks at every token."""
    if len(given) > context:
        raise ContextTooLong(f"a prompt of {len(given)} tokens exceeds the model's context of {context}")
    ids: list[int] = []
    for token in given:
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise InvalidRequest(f"the prompt has {token!r}; token ids are from 0 to {vocabulary - 1}")
        ids.append(token)
    if not ids:
        raise InvalidRequest("the prompt is empty; send at least one token")
    return ids


def _number(name: str, value: int, least: int, end: int) -> int:
    if not least <= value < end:
        raise InvalidRequest(f"{name} is {value}; it must be from {least} to {end - 1}")
    return value


def _float(name: str, value: float) -> float:
    if not abs(value) <= 3e38:  # NaN compares false
        raise InvalidRequest(f"{name} is {value}; it must be a number that 32 bits can hold")
    return value
