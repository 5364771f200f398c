"""From public requests to what the state is told: every field checked, every default filled in, the seed drawn.

What needs no knowledge of the cluster is checked here, by field and value; the rest is the state's to check.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from baton.errors import ContextTooLong, InvalidRequest, shown
from baton.messages import MAX_TRACE_STEPS, LogitsRules, SamplingParams, WorkerRole
from baton.v1 import cache_pb2, cluster_pb2
from baton.v1 import generation_pb2 as pb
from kvstore.keys import pack_tokens
from router.frontend.detokenizer import DEFAULT_TEXT, TextOptions, TextStream, Tokenizer
from router.frontend.grammar_parsing import grammar_of
from router.frontend.prompt_tokens import kept_tokens, tokenized
from router.frontend.served_model import ServedModel

MAX_STOPS = 16
_MAX_STOP_LENGTH = 1_000
_MAX_STOP_TOKENS = 1_000
_MAX_SHOWN = 64
_MAX_LOGPROBS = 20
MAX_SAMPLES = 128  # of one prompt
_MAX_PROMPT_LOGPROBS = 2**20  # values of one request; each takes about 120 bytes here until its client reads it
_MAX_PENALTY = 2
_MAX_LENGTH_PENALTY = 10  # an exponent of the output's length
_MIN_REPETITION, _MAX_REPETITION = 1e-6, 1e6  # beyond these a logit of float32 may become infinite
_MAX_BIAS, _MAX_BIASES = 100, 1_024
_MAX_BAD_WORDS, _MAX_BAD_CHARACTERS = 1_000, 65_536
_MAX_SEED = 2**63 - 1
_MAX_ID = 80
_MAX_SALT, _NOT_IN_SALT = 128, frozenset("@/\\\0")
_DEFAULT_STEPS = 100
_DEFAULT_TTL_MS = 3_600_000
_MIN_TTL_MS, _MAX_TTL_MS = 1_000, 7 * 24 * 3_600_000


@dataclass(frozen=True)
class ValidatedRequest:
    """A checked request, before it has a name."""

    tokens: bytes  # packed
    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    request_id: str  # the client's name for it, or one that we made
    priority: int
    ttft: float | None  # objective, seconds
    tpot: float | None  # the same
    affinity: str  # a key, or ""
    salt: str = ""  # of its page keys, beside its tenant
    adapter: str = ""  # name of its LoRA adapter; "": the plain model
    text: TextOptions = DEFAULT_TEXT
    n: int = 1  # outputs for the client, ...
    best_of: int = 1  # ... the best of so many, which are also the beams of a search
    length_penalty: float | None = None  # of a beam search; none: tokens are drawn

    def text_stream(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> TextStream:
        """Return what turns an output's tokens into text."""
        return TextStream(tokenizer, self.prompt, stops, frozenset(self.stop_token_ids), self.text)

    def sample(self, number: int) -> ValidatedRequest:
        """The request for one of several samples."""
        seed = (self.sampling.seed + number) & _MAX_SEED
        sampling = msgspec.structs.replace(
            self.sampling, seed=seed, prompt_logprobs=self.sampling.prompt_logprobs if number == 0 else None
        )
        return replace(self, sampling=sampling)


@dataclass(frozen=True)
class ValidatedPin:
    """A checked prefix that is to be pinned."""

    tokens: bytes  # packed
    pin: str  # the client's name for it, or one that we made
    ttl: float  # seconds
    tenant: str = ""  # whose requests find it
    salt: str = ""  # of these requests
    adapter: str = ""  # the same


def name_of(request: pb.GenerateRequest) -> str:
    """What the request is called in logs, errors and its last message. Raises InvalidRequest."""
    return _named("request_id", request.request_id)


def pin_of(request: cache_pb2.PinPrefixRequest) -> str:
    """What the pin is called. Raises InvalidRequest."""
    return _named("id", request.id)


def steps_of(request: cluster_pb2.ProfileRequest) -> int:
    """How many steps to trace; 0 where a trace is to be stopped. Raises InvalidRequest."""
    if request.stop:
        if request.steps:
            raise InvalidRequest(f"steps is {request.steps} beside stop; ask for steps or for a stop, not for both")
        return 0
    if request.steps > MAX_TRACE_STEPS:
        raise InvalidRequest(f"steps is {request.steps}; it must be at most {MAX_TRACE_STEPS}")
    return request.steps or _DEFAULT_STEPS


def role_of(request: cluster_pb2.SetRoleRequest) -> WorkerRole:
    """The role that a worker is to have. Raises InvalidRequest."""
    match request.role:
        case cluster_pb2.ROLE_PREFILL:
            return "prefill"
        case cluster_pb2.ROLE_DECODE:
            return "decode"
        case _:
            raise InvalidRequest("role must be ROLE_PREFILL or ROLE_DECODE")


def _named(field: str, given: str) -> str:
    return _checked(field, given) or secrets.token_hex(8)


def _checked(field: str, given: str) -> str:
    # It may become a header of the answer, where gRPC takes nothing else.
    if len(given) > _MAX_ID or not given.isascii() or not given.isprintable() or " " in given:
        raise InvalidRequest(
            f"{field} is {shown(given)!r}; it must have at most {_MAX_ID} printable ASCII characters without spaces"
        )
    return given


def parse_generate_request(
    request: pb.GenerateRequest, request_id: str, model: ServedModel, draw_seed: Callable[[], int]
) -> ValidatedRequest:
    """Check a request. Raises ModelMismatch or InvalidRequest, naming the field and its value."""
    model.check(request.model)
    if len(request.stop_token_ids) > _MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"stop_token_ids has {len(request.stop_token_ids)} tokens; at most {_MAX_STOP_TOKENS} are allowed"
        )
    stop_ids = tuple(dict.fromkeys(request.stop_token_ids))
    if bad := [token for token in stop_ids if token >= model.limits.vocab_size]:
        raise InvalidRequest(f"stop_token_ids has {bad[0]}, and the vocabulary ends at {model.limits.vocab_size - 1}")
    sampling, stops = _sampling(request, model, draw_seed), _stops(request, model)
    prompt = _prompt(request, model, _kept(request, model))  # the only check that may take long comes last
    _check_prompt_logprobs(sampling, len(prompt))
    n, best_of = _samples(request)
    penalty = _length_penalty(request, sampling)
    # Behind a grammar's last token an end-of-sequence token comes in any case; the worker knows of `ignore_eos`.
    eos = () if request.ignore_eos and sampling.grammar is None else model.eos
    return ValidatedRequest(
        tokens=pack_tokens(prompt),
        prompt=prompt,
        sampling=sampling,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        stops=stops,
        stop_token_ids=tuple(dict.fromkeys((*eos, *stop_ids))),
        request_id=request_id,
        priority=request.priority,
        ttft=_objective("ttft_ms", request),
        tpot=_objective("tpot_ms", request),
        affinity=_checked("affinity", request.affinity),
        salt=_salt(request.cache_salt),
        adapter=model.adapter_of(request.model),
        text=TextOptions(request.min_tokens, request.include_stop, request.special_tokens, _shown(request)),
        n=n,
        best_of=best_of,
        length_penalty=penalty,
    )


def _samples(request: pb.GenerateRequest) -> tuple[int, int]:
    """Outputs for the client, and outputs to choose them from."""
    n = request.n if request.HasField("n") else 1
    best_of = request.best_of if request.HasField("best_of") else n
    if not 1 <= n <= MAX_SAMPLES:
        raise InvalidRequest(f"n is {n}; it must be from 1 to {MAX_SAMPLES}")
    if not n <= best_of <= MAX_SAMPLES:
        raise InvalidRequest(f"best_of is {best_of}; it must be from n, which is {n}, to {MAX_SAMPLES}")
    return n, best_of


def _length_penalty(request: pb.GenerateRequest, sampling: SamplingParams) -> float | None:
    """The length penalty of a beam search; none without one. Raises InvalidRequest for what a search can't honour."""
    if not request.HasField("beam_search"):
        return None
    penalty = request.beam_search.length_penalty if request.beam_search.HasField("length_penalty") else 1.0
    if not -_MAX_LENGTH_PENALTY <= penalty <= _MAX_LENGTH_PENALTY:
        raise InvalidRequest(
            f"length_penalty is {penalty}; it must be from -{_MAX_LENGTH_PENALTY} to {_MAX_LENGTH_PENALTY}"
        )
    if not request.HasField("max_tokens"):
        raise InvalidRequest("a beam search needs max_tokens")
    unserved = (sampling.rules, sampling.prompt_logprobs, sampling.grammar)
    if request.stop or any(each is not None for each in unserved):
        raise InvalidRequest(
            "a beam search knows no stop strings, prompt_logprobs, structured output, penalties, bias or rules for "
            "tokens; leave them out, or use stop_token_ids"
        )
    return penalty


def _shown(request: pb.GenerateRequest) -> frozenset[int]:
    if len(request.shown_special_tokens) > _MAX_SHOWN:
        raise InvalidRequest(
            f"shown_special_tokens has {len(request.shown_special_tokens)} tokens; at most {_MAX_SHOWN} are allowed"
        )
    return frozenset(request.shown_special_tokens)


def parse_pin_request(request: cache_pb2.PinPrefixRequest, pin: str, model: ServedModel) -> ValidatedPin:
    """Check a prefix that is to be pinned. Raises ModelMismatch or InvalidRequest, naming the field and its value."""
    model.check(request.model)
    ttl_ms = request.ttl_ms if request.HasField("ttl_ms") else _DEFAULT_TTL_MS
    if not _MIN_TTL_MS <= ttl_ms <= _MAX_TTL_MS:
        raise InvalidRequest(f"ttl_ms is {ttl_ms}; it must be from {_MIN_TTL_MS} (1 second) to {_MAX_TTL_MS} (7 days)")
    tenant, salt = _checked("tenant", request.tenant), _salt(request.cache_salt)
    adapter = model.adapter_of(request.model)
    return ValidatedPin(pack_tokens(_prompt(request, model)), pin, ttl_ms / 1_000, tenant, salt, adapter)


def _salt(given: str) -> str:
    """Return a request's cache salt, which has vLLM's limits. Raises InvalidRequest."""
    if len(given) > _MAX_SALT or _NOT_IN_SALT & set(given):
        raise InvalidRequest(
            f"cache_salt is {shown(repr(given))}; it must have at most {_MAX_SALT} characters, without @, /, \\ and NUL"
        )
    return given


def _kept(request: pb.GenerateRequest, model: ServedModel) -> int | None:
    """Return how many of the prompt's last tokens are kept; None: all. Raises InvalidRequest."""
    asked = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    return kept_tokens(asked, request.max_tokens, model.limits.max_context)


def _prompt(
    request: pb.GenerateRequest | cache_pb2.PinPrefixRequest, model: ServedModel, keep: int | None = None
) -> Sequence[int]:
    """Return its last `keep` tokens, or all. Raises InvalidRequest. Raises ContextTooLong before any work per token,
    which would keep the router from other requests for seconds."""
    tokens = _tokens(request, model, keep)
    if len(tokens) > model.limits.max_context:
        raise ContextTooLong(
            f"a prompt of {len(tokens)} tokens exceeds the model's context of {model.limits.max_context}"
        )
    return tokens


def _tokens(
    request: pb.GenerateRequest | cache_pb2.PinPrefixRequest, model: ServedModel, keep: int | None
) -> Sequence[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("the request has no prompt; set text or token_ids")
    if kind == "token_ids":
        return request.token_ids.ids if keep is None else request.token_ids.ids[-keep:]
    return tokenized([request.text], model, keep=keep)[0]


def _objective(field: Literal["ttft_ms", "tpot_ms"], request: pb.GenerateRequest) -> float | None:
    """Seconds."""
    if not request.HasField(field):
        return None
    if (asked := getattr(request, field)) < 1:
        raise InvalidRequest(f"{field} is 0; it must be at least 1, or unset")
    return asked / 1_000


def _sampling(request: pb.GenerateRequest, model: ServedModel, draw_seed: Callable[[], int]) -> SamplingParams:
    defaults = model.defaults
    temperature = request.temperature if request.HasField("temperature") else defaults.temperature
    top_p = request.top_p if request.HasField("top_p") else defaults.top_p
    min_p = request.min_p if request.HasField("min_p") else defaults.min_p
    # Written so that NaN, which compares false with everything, is refused.
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise InvalidRequest(f"temperature is {temperature}; it must be 0 (greedy) or a finite number above")
    if not 0 < top_p <= 1:
        raise InvalidRequest(f"top_p is {top_p}; it must be above 0 and at most 1")
    if not 0 <= min_p <= 1:
        raise InvalidRequest(f"min_p is {min_p}; it must be from 0 to 1")
    if request.HasField("seed") and request.seed > _MAX_SEED:
        raise InvalidRequest(f"seed is {request.seed}; it must be below 2**63")
    if request.HasField("logprobs") and request.logprobs > _MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs is {request.logprobs}; at most {_MAX_LOGPROBS} alternatives are reported")
    if request.HasField("prompt_logprobs") and request.prompt_logprobs > _MAX_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {request.prompt_logprobs}; at most {_MAX_LOGPROBS} alternatives are reported"
        )
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=request.top_k if request.HasField("top_k") else defaults.top_k,
        min_p=min_p,
        seed=request.seed if request.HasField("seed") else draw_seed(),
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        rules=_rules(request, model),
        grammar=grammar_of(request, model),
    )


def _check_prompt_logprobs(sampling: SamplingParams, prompt: int) -> None:
    if sampling.prompt_logprobs is None:
        return
    if (values := prompt * (1 + sampling.prompt_logprobs)) > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {sampling.prompt_logprobs} for a prompt of {prompt} tokens, {values} values; at most "
            f"{_MAX_PROMPT_LOGPROBS} are reported: ask for fewer, or send a shorter prompt"
        )


def _rules(request: pb.GenerateRequest, model: ServedModel) -> LogitsRules | None:
    """How logits are changed; None if they are not."""
    repetition = request.repetition_penalty if request.HasField("repetition_penalty") else 1.0
    for name in ("presence_penalty", "frequency_penalty"):
        if not -_MAX_PENALTY <= (given := getattr(request, name)) <= _MAX_PENALTY:
            raise InvalidRequest(f"{name} is {given}; it must be from -{_MAX_PENALTY} to {_MAX_PENALTY}")
    if not _MIN_REPETITION <= repetition <= _MAX_REPETITION:
        raise InvalidRequest(
            f"repetition_penalty is {repetition}; it must be from {_MIN_REPETITION:g} to {_MAX_REPETITION:g}"
        )
    if len(request.logit_bias) > _MAX_BIASES:
        raise InvalidRequest(f"logit_bias has {len(request.logit_bias)} tokens; at most {_MAX_BIASES} are allowed")
    for token, value in request.logit_bias.items():
        _check_token("logit_bias", token, model)
        if not -_MAX_BIAS <= value <= _MAX_BIAS:
            raise InvalidRequest(f"logit_bias of token {token} is {value}; it must be from -{_MAX_BIAS} to {_MAX_BIAS}")
    for token in request.allowed_token_ids:
        _check_token("allowed_token_ids", token, model)
    if request.min_tokens and request.HasField("max_tokens") and request.min_tokens > request.max_tokens:
        raise InvalidRequest(f"min_tokens is {request.min_tokens}, above max_tokens, which is {request.max_tokens}")
    rules = LogitsRules(
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=repetition,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        min_tokens=request.min_tokens,
        bad_words=_bad_words(request.bad_words, model),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids)),
    )
    return None if rules == LogitsRules() else rules


def _check_token(field: str, token: int, model: ServedModel) -> None:
    if token >= model.limits.vocab_size:
        raise InvalidRequest(f"{field} has token {token}, and the vocabulary ends at {model.limits.vocab_size - 1}")


def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, at the beginning of a text and after a space."""
    if not words:
        return ()
    if model.tokenizer is None:
        raise InvalidRequest(f"{model.name} has no tokenizer.json, so bad_words can't be tokenized; leave them out")
    if len(words) > _MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words has {len(words)} words; at most {_MAX_BAD_WORDS} are allowed")
    for word in words:
        if not word.strip() or len(word) > _MAX_STOP_LENGTH:
            raise InvalidRequest(f"bad_words has a word of {len(word)} characters; each needs 1 to {_MAX_STOP_LENGTH}")
    if (characters := sum(map(len, words))) > _MAX_BAD_CHARACTERS:
        raise InvalidRequest(f"bad_words has {characters} characters in all; at most {_MAX_BAD_CHARACTERS} are allowed")
    bare = [word.lstrip() for word in words]
    tokens = model.tokenizer.encode_all([*bare, *(" " + word for word in bare)], special_tokens=False)
    found: dict[tuple[int, ...], None] = {}
    for plain, spaced in zip(tokens[: len(bare)], tokens[len(bare) :], strict=True):
        found[tuple(plain)] = None
        if len(spaced) == len(plain):  # else it begins with a token that is the space alone
            found[tuple(spaced)] = None
    # A tokenizer may have more tokens than the model, which never draws them.
    return tuple(word for word in found if word and max(word) < model.limits.vocab_size)


def _stops(request: pb.GenerateRequest, model: ServedModel) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(request.stop))
    if stops and model.tokenizer is None:
        raise InvalidRequest(f"{model.name} has no tokenizer.json, so there is no text to find stop strings in")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not 0 < len(stop) <= _MAX_STOP_LENGTH:
            raise InvalidRequest(f"stop has a string of {len(stop)} characters; 1 to {_MAX_STOP_LENGTH} are allowed")
    return stops
