"""From the fields of the HTTP APIs to those of a request, as `request_parsing` checks them."""

# pyright: strict

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.errors import ContextTooLong, InvalidRequest
from router.frontend.api.protocol import GenerationFields
from router.frontend.api.structured_outputs import structured_output

_SESSION_HEADERS = (
    "x-session-id",
    "x-session-affinity",
    "x-smg-routing-key",
    "x-dynamo-session-id",
    "x-correlation-id",
)
"""Headers that name a session, the strongest first. The body's `session_id` comes before all of them."""
_CONVERSATION_HEADERS = ("x-claude-code-session-id", "session_id", "session-id")
"""Headers in which agents name a conversation, and ask for no affinity with it."""
_MAX_KEY = 80
SEEDS = 2**63  # clients send any 64-bit number, negative ones too


def rule_entries(fields: GenerationFields) -> int:
    """Return how many tokens and words the rules of a request name: the work for each of its prompts."""
    return sum(len(rule) for rule in (fields.logit_bias, fields.allowed_token_ids, fields.bad_words) if rule)


def request_fields(
    fields: GenerationFields, prompt: Sequence[int], *, max_tokens: int | None, logprobs: int | None,
    prompt_logprobs: int | None, affinity: str, session: str, template: str, shown: Sequence[int] = (),
    frame: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of a request for all outputs of one prompt. Most have the same name in all APIs. `shown` are
    special tokens that stay in the text, with a mark, `frame` is that of the output's grammar. Raises InvalidRequest
    for a grammar that is none."""
    output = structured_output(fields)
    values: dict[str, Any] = {name: getattr(fields, name) for name in fields.__struct_fields__}
    if fields.use_beam_search:
        penalty = fields.length_penalty
        values["beam_search"] = {} if penalty is None else {"length_penalty": penalty}
    values |= {
        "token_ids": {"ids": prompt},
        "truncate_prompt_tokens": None,  # the prompt is truncated
        "stop": [fields.stop] if isinstance(fields.stop, str) else fields.stop,
        "top_k": 0 if fields.top_k == -1 else fields.top_k,
        "seed": None if fields.seed is None else fields.seed % SEEDS,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "length_penalty": None,
        "include_stop": fields.include_stop_str_in_output,
        "special_tokens": fields.skip_special_tokens is False,
        "shown_special_tokens": shown,
        "marked": True,
        "affinity": affinity,
        "session": session,
        "template": template,
        "structured_output": output and output | {"frame": frame},
    }
    return {name: value for name, value in values.items() if value is not None}


def affinity_of(session: str | None, headers: Mapping[str, str]) -> str:
    """The affinity key of a request's session."""
    return _key((session, *map(headers.get, _SESSION_HEADERS)))


def session_of(affinity: str, fields: GenerationFields, headers: Mapping[str, str]) -> str:
    """The conversation that a request is a turn of: its affinity key, or else the name that its agent has for it."""
    return _key((affinity, *map(headers.get, _CONVERSATION_HEADERS), fields.prompt_cache_key))


def _key(names: Iterable[str | None]) -> str:
    """The first name that there is; one that is no key is hashed into one."""
    name = next((name for name in names if name), "")
    if len(name) <= _MAX_KEY and name.isascii() and name.isprintable() and " " not in name:
        return name
    return hashlib.sha256(name.encode()).hexdigest()


def token_ids(prompt: Sequence[object], vocabulary: int, context: int) -> list[int]:
    """A prompt of token ids. Raises InvalidRequest, for one that is too long before it looks at every token."""
    if len(prompt) > context:
        raise ContextTooLong(prompt=len(prompt), context=context)
    ids: list[int] = []
    for token in prompt:
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise InvalidRequest(f"the prompt has {token!r}; token ids are from 0 to {vocabulary - 1}")
        ids.append(token)
    if not ids:
        raise InvalidRequest("the prompt is empty; send at least one token")
    return ids
