"""From the fields of a request to what the state is told: every field checked, every default filled in.

A door gives the fields that its client has set, by their names in `baton.v1.GenerateRequest`. What needs no knowledge
of the cluster is checked here, by field and value; the rest is the state's to check.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from typing import Any, TypeAlias

from google.protobuf.message import Message
from msgspec.structs import replace

from baton.errors import ContextTooLong, InvalidRequest, shown
from baton.messages import LogitsRules, SamplingParams
from baton.v1 import generation_pb2 as pb
from kvstore.keys import pack_tokens
from router.frontend.grammar_parsing import grammar_of
from router.frontend.parameter_bounds import check_bounds
from router.frontend.prompt_tokens import kept_tokens, tokenized
from router.frontend.served_model import ServedModel
from router.generation_request import GenerationRequest, TextOptions

Fields: TypeAlias = Mapping[str, Any]
"""The fields that a client has set, by their names in `baton.v1.GenerateRequest`. A message is a mapping, too."""

_MAX_STOP_LENGTH = 1_000
_MAX_PROMPT_LOGPROBS = 2**20  # values of one request; each takes about 120 bytes here until its client reads it
_MAX_BIAS = 100
_MAX_BAD_CHARACTERS = 65_536
_MAX_ID = 80
_MAX_SALT, _NOT_IN_SALT = 128, frozenset("@/\\\0")


def name_of(request: pb.GenerateRequest) -> str:
    """What the request is called in logs, errors and its last message. Raises InvalidRequest."""
    return checked_name("request_id", request.request_id) or secrets.token_hex(8)


def checked_name(field: str, name: str) -> str:
    """Return a name that a caller chose. Raises InvalidRequest."""
    # It may become a header of the answer, where gRPC takes nothing else.
    if len(name) > _MAX_ID or not name.isascii() or not name.isprintable() or " " in name:
        raise InvalidRequest(
            f"{field} is {shown(name)!r}; it must have at most {_MAX_ID} printable ASCII characters without spaces"
        )
    return name


def message_fields(message: Message) -> Fields:
    """Return the fields that are set in a message of gRPC."""
    return {
        field.name: message_fields(value) if isinstance(value, Message) else value
        for field, value in message.ListFields()
    }


def generation_request(
    fields: Fields, name: str, model: ServedModel, draw_seed: Callable[[], int]
) -> GenerationRequest:
    """Check a request. Raises ModelMismatch or InvalidRequest, naming the field and its value."""
    model.check(fields.get("model"))
    check_bounds(fields)
    # Floats have 32 bits at every door, so that one request draws the same tokens at each.
    values: dict[str, Any] = {
        name: c_float(value).value if isinstance(value, float) else value for name, value in fields.items()
    }
    stop_ids = tuple(dict.fromkeys(values.get("stop_token_ids", ())))
    for token in stop_ids:
        _check_token("stop_token_ids", token, model)
    sampling, stops = _sampling(values, model, draw_seed), _stops(values, model)
    prompt = _prompt(values, model)  # the only check that may take long comes last
    _check_prompt_logprobs(sampling, len(prompt))
    n = values.get("n", 1)
    if (best_of := values.get("best_of", n)) < n:
        raise InvalidRequest(f"best_of is {best_of}; it must be at least n, which is {n}")
    # Behind a grammar's last token an end-of-sequence token comes in any case; the worker knows of `ignore_eos`.
    eos = () if values.get("ignore_eos") and sampling.grammar is None else model.eos
    return GenerationRequest(
        name=name,
        tokens=pack_tokens(prompt),
        sampling=sampling,
        max_tokens=values.get("max_tokens"),
        stop_token_ids=tuple(dict.fromkeys((*eos, *stop_ids))),
        salt=checked_salt(values.get("cache_salt", "")),
        adapter=model.adapter_of(values.get("model")),
        priority=values.get("priority", 0),
        ttft=_seconds(values.get("ttft_ms")),
        tpot=_seconds(values.get("tpot_ms")),
        affinity=(affinity := checked_name("affinity", values.get("affinity", ""))),
        session=values.get("session", affinity),
        template=values.get("template", ""),
        stops=stops,
        text=TextOptions(
            values.get("min_tokens", 0),
            values.get("include_stop", False),
            values.get("special_tokens", False),
            frozenset(values.get("shown_special_tokens", ())),
            values.get("marked", False),
        ),
        n=n,
        best_of=best_of,
        length_penalty=_length_penalty(values, sampling),
    )


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1_000


def _length_penalty(fields: Fields, sampling: SamplingParams) -> float | None:
    """The length penalty of a beam search; none without one. Raises InvalidRequest for what a search can't honour."""
    if (search := fields.get("beam_search")) is None:
        return None
    check_bounds(search)
    if "max_tokens" not in fields:
        raise InvalidRequest("a beam search needs max_tokens")
    unserved = (sampling.rules, sampling.prompt_logprobs, sampling.grammar)
    if fields.get("stop") or any(each is not None for each in unserved):
        raise InvalidRequest(
            "a beam search knows no stop strings, prompt_logprobs, structured output, penalties, bias or rules for "
            "tokens; leave them out, or use stop_token_ids"
        )
    return c_float(search.get("length_penalty", 1.0)).value


def checked_salt(salt: str) -> str:
    """Return a request's cache salt, which has vLLM's limits. Raises InvalidRequest."""
    if len(salt) > _MAX_SALT or _NOT_IN_SALT & set(salt):
        raise InvalidRequest(
            f"cache_salt is {shown(repr(salt))}; it must have at most {_MAX_SALT} characters, without @, /, \\ and NUL"
        )
    return salt


def _prompt(fields: Fields, model: ServedModel) -> Sequence[int]:
    """Return the prompt's tokens, or the last that are to be kept. Raises InvalidRequest. Raises ContextTooLong before
    any work per token, which would keep the router from other requests for seconds."""
    most = model.limits.max_context
    keep = kept_tokens(fields.get("truncate_prompt_tokens"), fields.get("max_tokens"), most)
    if (text := fields.get("text")) is not None:
        tokens = tokenized([text], model, keep=keep)[0]
    elif (token_ids := fields.get("token_ids")) is not None:
        ids = token_ids.get("ids", ())
        tokens = ids if keep is None else ids[-keep:]
    else:
        raise InvalidRequest("the request has no prompt; set text or token_ids")
    check_length(tokens, model)
    return tokens


def check_length(tokens: Sequence[int], model: ServedModel) -> None:
    """Raise ContextTooLong for a prompt that the model can't take."""
    if len(tokens) > (most := model.limits.max_context):
        raise ContextTooLong(prompt=len(tokens), context=most)


def _sampling(fields: Fields, model: ServedModel, draw_seed: Callable[[], int]) -> SamplingParams:
    """Return how tokens are drawn: as the model's authors recommend where the request leaves it open."""
    chosen = {name: fields[name] for name in SamplingParams.__struct_fields__ if name in fields}
    chosen["seed"] = fields["seed"] if "seed" in fields else draw_seed()
    grammar = grammar_of(fields.get("structured_output"), model, ignore_eos=fields.get("ignore_eos", False))
    return replace(model.defaults, **chosen, rules=_rules(fields, model), grammar=grammar)


def _check_prompt_logprobs(sampling: SamplingParams, prompt: int) -> None:
    if sampling.prompt_logprobs is None:
        return
    if (values := prompt * (1 + sampling.prompt_logprobs)) > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {sampling.prompt_logprobs} for a prompt of {prompt} tokens, {values} values; at most "
            f"{_MAX_PROMPT_LOGPROBS} are reported: ask for fewer, or send a shorter prompt"
        )


def _rules(fields: Fields, model: ServedModel) -> LogitsRules | None:
    """How logits are changed; None if they are not."""
    biases = fields.get("logit_bias", {})
    for token, value in biases.items():
        _check_token("logit_bias", token, model)
        if not -_MAX_BIAS <= value <= _MAX_BIAS:
            raise InvalidRequest(f"logit_bias of token {token} is {value}; it must be from -{_MAX_BIAS} to {_MAX_BIAS}")
    allowed = fields.get("allowed_token_ids", ())
    for token in allowed:
        _check_token("allowed_token_ids", token, model)
    least, most = fields.get("min_tokens", 0), fields.get("max_tokens")
    if most is not None and least > most:
        raise InvalidRequest(f"min_tokens is {least}, above max_tokens, which is {most}")
    rules = LogitsRules(
        presence_penalty=fields.get("presence_penalty", 0.0),
        frequency_penalty=fields.get("frequency_penalty", 0.0),
        repetition_penalty=fields.get("repetition_penalty", 1.0),
        logit_bias=tuple((token, c_float(biases[token]).value) for token in sorted(biases)),
        min_tokens=least,
        bad_words=_bad_words(fields.get("bad_words", ()), model),
        allowed_token_ids=tuple(dict.fromkeys(allowed)),
    )
    return None if rules == LogitsRules() else rules


def _check_token(field: str, token: int, model: ServedModel) -> None:
    if not 0 <= token < model.limits.vocab_size:
        raise InvalidRequest(f"{field} has {token}, and the vocabulary ends at {model.limits.vocab_size - 1}")


def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, at the beginning of a text and after a space."""
    if not words:
        return ()
    if model.tokenizer is None:
        raise InvalidRequest(f"{model.name} has no tokenizer.json, so bad_words can't be tokenized; leave them out")
    for word in words:
        if not word.strip() or len(word) > _MAX_STOP_LENGTH:
            raise InvalidRequest(f"bad_words has a word of {len(word)} characters; each needs 1 to {_MAX_STOP_LENGTH}")
    if (characters := sum(map(len, words))) > _MAX_BAD_CHARACTERS:
        raise InvalidRequest(f"bad_words has {characters} characters in all; at most {_MAX_BAD_CHARACTERS} are allowed")
    bare = [word.lstrip() for word in words]
    tokens = model.tokenizer.encode_all([*bare, *(" " + word for word in bare)], special_tokens=False)
    result: dict[tuple[int, ...], None] = {}
    for plain, spaced in zip(tokens[: len(bare)], tokens[len(bare) :], strict=True):
        result[tuple(plain)] = None
        if len(spaced) == len(plain):  # else it begins with a token that is the space alone
            result[tuple(spaced)] = None
    # A tokenizer may have more tokens than the model, which never draws them.
    return tuple(word for word in result if word and max(word) < model.limits.vocab_size)


def _stops(fields: Fields, model: ServedModel) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(fields.get("stop", ())))
    if stops and model.tokenizer is None:
        raise InvalidRequest(f"{model.name} has no tokenizer.json, so there is no text to find stop strings in")
    for stop in stops:
        if not 0 < len(stop) <= _MAX_STOP_LENGTH:
            raise InvalidRequest(f"stop has a string of {len(stop)} characters; 1 to {_MAX_STOP_LENGTH} are allowed")
    return stops
