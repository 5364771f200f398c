"""The way of every door's requests: checked, tokenized where that takes no other request's time, submitted, abandoned.

A door (gRPC, HTTP) gives the fields that its client has set, by their names in `baton.v1.GenerateRequest`. It turns the
output into its own answer. Nothing behind this module learns which door a request came through.

What needs no knowledge of the cluster is checked here, by field and value, and every default is filled in. What needs
llguidance is checked by `grammar_checker`, and the rest by the state.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from google.protobuf.message import Message
from msgspec import Struct
from msgspec.structs import replace

from baton.clock import Clock
from baton.errors import (
    BatonError,
    ContextTooLong,
    InvalidGrammar,
    InvalidRequest,
    ModelMismatch,
    UnsupportedField,
    shown,
)
from baton.messages import MAX_GRAMMAR, Grammar, KvCompression, LogitsRules, SamplingParams
from baton.operator_api import CascadeChoice
from baton.v1 import generation_pb2 as pb
from kvstore.keys import pack_tokens
from router.frontend.beam_search import beam_search, check_width
from router.frontend.detokenizer import TextStream
from router.frontend.grammar_checker import GrammarChecker
from router.frontend.identity import caller
from router.frontend.off_loop import TokenizerThreads
from router.frontend.output_stream import OutputStream, ReadableStream, ResultSet, best_of
from router.frontend.router_driver import RouterDriver
from router.frontend.served_model import ServedModel, kept_tokens, tokenized
from router.frontend.token_cache import TextOwner
from router.generation_request import GenerationRequest, TextOptions, check_bounds
from router.tracing.origin import origin
from router.tracing.request_spans import RequestSpans, SpanSink
from router.tracing.span import Value

T = TypeVar("T")

Fields: TypeAlias = Mapping[str, Any]
"""The fields that a client has set, by their names in `baton.v1.GenerateRequest`. A message is a mapping, too."""

_MAX_STOP_LENGTH = 1_000
_MAX_PROMPT_LOGPROBS = 2**20  # values of one request; each takes about 120 bytes here until its client reads it
_MAX_BIAS = 100
_MAX_BAD_CHARACTERS = 65_536
_MAX_ID = 80
_MAX_SALT, _NOT_IN_SALT = 128, frozenset("@/\\\0")


class Generation(Struct, frozen=True):
    """One output under way. Call `close` when its client needs no more of it."""

    request: GenerationRequest
    stream: ReadableStream
    close: Callable[[], None]  # cancels what has not ended


class GenerationService:
    """Starts requests. One object serves all doors."""

    def __init__(
        self,
        driver: RouterDriver,
        clock: Clock,
        tokenizing: TokenizerThreads,
        *,
        tracer: SpanSink | None = None,
        beside: Sequence[GenerationService] = (),
    ) -> None:
        """`tracer`: takes the spans of requests; none: there are none. `beside`: the services of further models, which
        share the doors with this one."""
        self.driver = driver
        self.all: tuple[GenerationService, ...] = (self, *beside)
        self.clock = clock
        self.tracer = tracer
        self.tokenizing = tokenizing
        self.grammars = GrammarChecker(driver.model)

    async def close(self) -> None:
        """End what runs beside the services."""
        for service in self.all:
            await service.grammars.close()

    @property
    def model(self) -> ServedModel:
        return self.driver.model

    def of(self, name: str | None) -> GenerationService:
        """Return the service of the model that a request names; without a name, this one. Raises ModelMismatch."""
        if not name or len(self.all) == 1:
            self.model.check(name)
            return self
        if (service := next((one for one in self.all if one.model.has(name)), None)) is not None:
            return service
        known = ", ".join(repr(one.model.name) for one in self.all)
        raise ModelMismatch(f"model {shown(name)!r} is not served here; this cluster serves {known}")

    @property
    def unready(self) -> str | None:
        """Why no request of any model can be served now; none: one can."""
        reasons = [one.driver.unready for one in self.all]
        return None if None in reasons else reasons[0]

    @property
    def most_bytes(self) -> tuple[int, int]:
        """The most tokens of a prompt, and bytes of its text, that any of the models takes."""
        limits = [one.model.limits.max_context for one in self.all]
        texts = [one.model.tokenizer.max_bytes(one.model.limits.max_context) for one in self.all if one.model.tokenizer]
        return max(limits), max(texts, default=0)

    def fingerprint(self, model: str) -> str:
        """What decides the tokens of a request that has begun to be answered, besides the request: see
        `kvstore.keys.system_fingerprint`. `model`: as the request names it."""
        return self.driver.fingerprint(self.model.adapter_of(model))

    async def start(
        self, name: str, received: float, size: int, read: Callable[[], Fields], deadline: float | None = None,
        *, further: bool = False, cascade: CascadeChoice | None = None,
    ) -> list[Generation]:  # fmt: skip
        """Check and submit a request of this task's caller that came at `received`. Return its outputs, one for each
        that the client gets. `read` returns its fields, whose size is about so many bytes. `further`: another prompt
        of the same body has begun. `cascade`: why this model answers. Times are seconds of the clock. Raises
        BatonError."""
        spans = self._traced(name, received)
        try:
            request = await self._checked(name, size, read)
            tenant = caller.get().tenant
            request = replace(request, received=received, deadline=deadline, tenant=tenant, cascade=cascade)
            if spans is not None:
                outputs = 1 if request.length_penalty is not None else request.best_of
                spans.add_attributes(_span_attributes(request), outputs)
            return await self._begun(request, spans, further)
        except BatonError as error:
            if spans is not None:
                spans.refused(error, self.clock.now())
            raise

    async def _begun(self, request: GenerationRequest, spans: RequestSpans | None, further: bool) -> list[Generation]:
        complete = None if spans is None else spans.complete
        submit = partial(self.driver.submit, spans=spans, further=further)
        if request.length_penalty is not None:
            search = beam_search(request, submit, self.driver.abandon, self._text_of(request), self.clock.now)
            return _chosen(request, ResultSet(request.n, request.received, search, complete))
        logprobs = request.sampling.logprobs
        if request.best_of > request.n and logprobs is None:  # the choice needs them
            request = replace(request, sampling=replace(request.sampling, logprobs=0))
        streams = await self._submitted(request, submit)
        if complete is not None:
            complete()
        if request.best_of > request.n:
            choice = best_of(streams, request.n, logprobs, self.driver.abandon)
            return _chosen(request, ResultSet(request.n, request.received, choice))
        return [
            Generation(request.sample(number), stream, partial(self._close, stream))
            for number, stream in enumerate(streams)
        ]

    async def _checked(self, name: str, size: int, read: Callable[[], Fields]) -> GenerationRequest:
        """Return the checked request of this task's caller. Raises BatonError."""
        model, draw_seed, identity = self.model, self.driver.draw_seed, caller.get()
        request = await self.apart(size, lambda: generation_request(read(), name, model, draw_seed, identity.tenant))
        if identity.max_prompt_tokens is not None and request.prompt > identity.max_prompt_tokens:
            raise ContextTooLong(
                f"The maximum context length is {identity.max_prompt_tokens} tokens for the API key {identity.name!r}. "
                f"However, your prompt contains {request.prompt} input tokens; send fewer",
                prompt=request.prompt, context=identity.max_prompt_tokens,
            )  # fmt: skip
        if request.length_penalty is not None:
            check_width(request.best_of, len(request.stop_token_ids))
        if (grammar := request.sampling.grammar) is not None:
            grammar = await self.grammars.check(grammar, identity.tenant)
            return replace(request, sampling=replace(request.sampling, grammar=grammar))
        return request

    async def _submitted(self, request: GenerationRequest, submit: Callable[..., OutputStream]) -> list[OutputStream]:
        """Submit each sample in a turn of its own: many samples of a long prompt take a while."""
        streams = [submit(request.sample(0))]
        try:
            for number in range(1, request.best_of):
                await asyncio.sleep(0)
                streams.append(submit(request.sample(number), leader=streams[0]))
            await asyncio.sleep(0)
        except BaseException:
            for stream in streams:
                self._close(stream)
            raise
        return streams

    def _traced(self, request_id: str, received: float) -> RequestSpans | None:
        """What collects the spans of a request of this task's caller; None where tracing is off."""
        if self.tracer is None:
            return None
        attributes: dict[str, Value] = {"gen_ai.request.id": request_id, "gen_ai.response.model": self.model.name}
        if tenant := caller.get().tenant:
            attributes["baton.tenant"] = tenant
        return RequestSpans(self.tracer, origin.get(), received, attributes)

    def _close(self, stream: OutputStream) -> None:
        if not stream.ended:
            self.driver.abandon(stream)

    def _text_of(self, request: GenerationRequest) -> Callable[[tuple[int, ...]], str]:
        """The text of a whole output."""

        def text_of(tokens: tuple[int, ...]) -> str:
            text = TextStream.of(self.model.tokenizer, request)
            return text.feed(tokens).text + text.flush().text

        return text_of

    async def apart(self, size: int, work: Callable[[], T]) -> T:
        """Do work on so many bytes: here if that is quick, else on a thread. Raises Overloaded."""
        return await self.tokenizing.run(size, work, caller.get().tenant)


def _chosen(request: GenerationRequest, results: ResultSet) -> list[Generation]:
    return [Generation(request, stream, results.close) for stream in results.streams]


def _span_attributes(request: GenerationRequest) -> dict[str, Value]:
    """Return what a request sets, by the names of OpenTelemetry."""
    sampling = request.sampling
    attributes: dict[str, Value] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": request.n,
        "baton.priority": request.priority,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if request.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = request.max_tokens
    return attributes


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
    fields: Fields, name: str, model: ServedModel, draw_seed: Callable[[], int], tenant: str = ""
) -> GenerationRequest:
    """Check a tenant's request. Raises ModelMismatch or InvalidRequest, naming the field and its value."""
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
    prompt = _prompt(values, model, tenant)  # the only check that may take long comes last
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
        kv_compression=_kv_compression(values),
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


def _kv_compression(fields: Fields) -> KvCompression | None:
    """Raises InvalidRequest."""
    if (order := fields.get("kv_compression")) is None:
        return None
    if "beam_search" in fields:
        raise InvalidRequest("a beam search knows no kv_compression; leave it out", "kv_compression")
    try:
        compression = msgspec.convert(order, KvCompression)
        if (compression.kind != "window") != (compression.keep > 0):
            raise msgspec.ValidationError('"snapkv" and "h2o" need a `keep` of at least 1, and "window" has none')
    except msgspec.ValidationError as error:
        what = f'{shown(repr(order))}: {error}; it must be such as {{"kind": "window", "window": 1024, "sinks": 4}} '
        what += 'or {"kind": "snapkv", "window": 256, "sinks": 4, "keep": 512}'
        raise InvalidRequest(f"kv_compression is {what}", "kv_compression") from None
    return compression


def checked_salt(salt: str) -> str:
    """Return a request's cache salt, which has vLLM's limits. Raises InvalidRequest."""
    if len(salt) > _MAX_SALT or _NOT_IN_SALT & set(salt):
        raise InvalidRequest(
            f"cache_salt is {shown(repr(salt))}; it must have at most {_MAX_SALT} characters, without @, /, \\ and NUL"
        )
    return salt


def _prompt(fields: Fields, model: ServedModel, tenant: str) -> Sequence[int]:
    """Return the prompt's tokens, or the last that are to be kept. Raises InvalidRequest. Raises ContextTooLong before
    any work per token, which would keep the router from other requests for seconds."""
    most = model.limits.max_context
    keep = kept_tokens(fields.get("truncate_prompt_tokens"), fields.get("max_tokens"), most)
    if (text := fields.get("text")) is not None:
        tokens = tokenized([text], model, keep=keep, owner=TextOwner(tenant, fields.get("cache_salt", "")))[0]
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


# --- grammars ---------------------------------------------------------------------------------------------------------


def grammar_of(output: Mapping[str, Any] | None, model: ServedModel, *, ignore_eos: bool = False) -> Grammar | None:
    """Return the grammar of a request with this `structured_output`; None without one. Raises InvalidGrammar, and
    UnsupportedField where the checkpoint has no tokenizer or no end of sequence."""
    if output is None or output.get("json_object") is False:
        return None
    if model.tokenizer_file is None or model.grammar_end is None:
        missing = "end-of-sequence token" if model.tokenizer_file else "tokenizer.json"
        raise UnsupportedField(f"{model.name} has no {missing}, so its output can't follow a grammar; leave it out")
    kind: Any = "lark"
    compact = output.get("compact", False)
    match output:
        case {"json_schema": schema}:
            kind, text = "json_schema", _json(schema, model, compact=compact)
        case {"json_object": True}:
            kind, text = "json_schema", _json('{"type":"object"}', model, compact=compact)
        case {"regex": text}:
            kind = "regex"
        case {"choice": choices}:
            text = _choice(choices.get("texts", ()))
        case {"grammar": text}:
            pass
        case _:
            raise InvalidGrammar("structured_output is empty; it needs a schema, a regex, a choice or a grammar")
    if not 0 < len(text) <= MAX_GRAMMAR:
        raise InvalidGrammar(f"the grammar has {len(text)} characters; it must have 1 to {MAX_GRAMMAR}")
    return Grammar(kind, text, model.grammar_end, ignore_eos, output.get("frame", ""))


def _json(text: str, model: ServedModel, *, compact: bool) -> str:
    """Return a schema as it is compiled: with a bound on white space, unless it has its own."""
    if len(text) > MAX_GRAMMAR:
        return text  # refused by its size, before it is parsed
    try:
        schema = msgspec.json.decode(text, type=dict[str, Any] | bool)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGrammar(f"the schema must be a JSON object, or true: {error}") from None
    members = {"anyOf": [schema]} if isinstance(schema, bool) else schema
    return json.dumps(
        bounded(members, 0 if compact else model.json_whitespace, own=not compact),
        ensure_ascii=False,
        separators=(",", ":"),
    )


def bounded(schema: dict[str, Any], spaces: int, *, own: bool = True) -> dict[str, Any]:
    """Return a schema with at most so many characters of white space in one place; `own`: unless it says so itself."""
    guidance: Any = schema.get("x-guidance")
    options: dict[str, Any] = {**guidance} if isinstance(guidance, dict) else {}
    if not own or not options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        options |= {"whitespace_pattern": rf"[ \t\r\n]{{1,{spaces}}}"} if spaces else {"whitespace_flexible": False}
    return schema | {"x-guidance": options}


def _choice(texts: Sequence[str]) -> str:
    """Return the choices as a grammar in Lark, whose strings are those of JSON."""
    if not all(texts):
        raise InvalidGrammar("one of the choices is empty; an output needs at least one character")
    if not texts:
        raise InvalidGrammar("there are no choices; give at least one")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
