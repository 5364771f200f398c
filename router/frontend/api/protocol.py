"""The requests of the HTTP APIs: OpenAI's fields, vLLM's extra ones, Baton's objectives, and what becomes of them.

Unknown fields are ignored, as vLLM does. A null means that a field is left out. A field that Baton knows and can't
serve is refused with its name, unless its value changes nothing.
"""

# pyright: strict

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from baton.errors import ContextTooLong, InvalidGrammar, InvalidRequest, UnsupportedField, shown
from router.generation_request import check_bounds

R = TypeVar("R", bound="GenerationFields")
Json = dict[str, Any]

_GRAMMARS = ("structured_outputs", "response_format")
_MOST_CHOICES = 10_000
_IGNORED = {"disable_fallback", "backend", "_backend", "_backend_was_auto"}
"""Members that choose one of vLLM's libraries."""
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


class StreamOptions(Struct, kw_only=True):
    """Which events of a stream carry the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(Struct, kw_only=True):
    """What means the same in completions, chat completions and the Responses API."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    user: str | None = None
    ttft_ms: int | None = None
    tpot_ms: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    kv_compression: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    structured_outputs: dict[str, Any] | None = None


class GenerationFields(SharedFields, kw_only=True):
    """What completions and chat completions have in common."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    length_penalty: float | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    response_format: dict[str, Any] | None = None
    # Known, and not served: see _NEUTRAL and _RENAMED.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    logprob_token_ids: Any = None
    prompt_embeds: Any = None
    moderation: Any = None
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
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "logprob_token_ids": ([],),
    "prompt_embeds": ([],),
    "moderation": (),
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
    "json_schema": "structured_outputs.json",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
}
"""vLLM's older names of fields, and those of SGLang and llama.cpp."""

T = TypeVar("T", bound=Struct)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a body. Raises InvalidRequest with the field and what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request's JSON is not as it must be: {shown(str(error), 300)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request's body is no JSON: {shown(str(error), 300)}") from None


@contextlib.contextmanager
def in_words_of(body: Struct) -> Generator[None]:
    """Let an error name its field as the body does. A message begins with the name that all doors have for it."""
    try:
        yield
    except InvalidRequest as error:
        field = error.field or str(error).partition(" ")[0]
        own = getattr(body, "OWN_NAMES", {}).get(field, "")
        name = own if own and getattr(body, own.partition(".")[0], None) is not None else field
        if name != field or field in body.__struct_fields__:
            error.args, error.field = (str(error).replace(field, name, 1),), name
        raise


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
    return UnsupportedField(f"{field} is {shown(repr(value))}, which this server does not support; {remedy}", field)


def samples(request: GenerationFields) -> int:
    """How many outputs each prompt gets. Raises InvalidRequest."""
    n = 1 if request.n is None else request.n
    check_bounds({"n": n})
    return n


# --- structured output: OpenAI's `response_format` and vLLM's `structured_outputs` ------------------------------------


def structured_output(fields: GenerationFields) -> Json | None:
    """Return the `structured_output` that a request's fields ask for; None without one. Raises InvalidRequest."""
    forms = {name: value for name in _GRAMMARS if (value := getattr(fields, name))}
    if forms.get("response_format", {}).get("type") == "text":
        del forms["response_format"]
    if len(forms) > 1:
        raise _wrong("response_format", "it is set beside structured_outputs; choose one")
    if "structured_outputs" in forms:
        return _of_vllm(forms["structured_outputs"])
    return _of_openai(forms["response_format"]) if forms else None


def _of_openai(form: Json) -> Json:
    match form:
        case {"type": "json_object"} if isinstance(form.get("schema"), dict):  # as llama.cpp and others have it
            return {"json_schema": _schema_text("response_format", form["schema"])}
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": _schema_text("response_format", schema)}
        case {"type": "json_schema"}:
            raise _wrong("response_format", "it has no schema; send it as json_schema.schema")
        case _:
            raise unsupported("response_format", form, "its type must be text, json_object or json_schema")


def _of_vllm(options: Json) -> Json | None:
    members = {name: value for name, value in options.items() if value is not None and value is not False}
    compact = members.pop("disable_any_whitespace", False) is True
    for name, value in members.items():
        if name not in _KINDS and name not in _IGNORED:
            raise unsupported(f"structured_outputs.{name}", value)
    kinds = [name for name in members if name in _KINDS]
    if len(kinds) > 1:
        raise _wrong("structured_outputs", f"it has {' and '.join(kinds)}; choose one")
    for name in kinds:
        return _KINDS[name](members[name]) | {"compact": compact}
    return None


def _schema_text(field: str, schema: Any) -> str:
    """A schema comes as JSON within the request, or as its text."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict | bool):
        raise _wrong(field, f"the schema is {shown(repr(schema))}; it must be an object")
    return msgspec.json.encode(schema).decode()


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(f"structured_outputs.{name}", f"it is {shown(repr(value))}; it must be a text")
    return value


def _choices(value: Any) -> list[str]:
    field = "structured_outputs.choice"
    texts: list[Any] = value
    if not isinstance(value, list) or not texts:
        raise _wrong(field, "it must be a list of at least one text")
    if len(texts) > _MOST_CHOICES:
        raise _wrong(field, f"it has {len(texts)} texts; at most {_MOST_CHOICES} are allowed")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _wrong(field, f"it has {shown(repr(text))}; each must be a text of at least one character")
    return texts


_KINDS: Mapping[str, Callable[[Any], Json]] = {
    "json": lambda value: {"json_schema": _schema_text("structured_outputs.json", value)},
    "json_object": lambda value: {"json_object": value is True},
    "regex": lambda value: {"regex": _text("regex", value)},
    "choice": lambda value: {"choice": {"texts": _choices(value)}},
    "grammar": lambda value: {"grammar": _text("grammar", value)},
}


def _wrong(field: str, reason: str) -> InvalidGrammar:
    return InvalidGrammar(f"{field}: {reason}", field)


def name_field(error: InvalidGrammar, fields: GenerationFields) -> InvalidGrammar:
    """Return the same error with the name of the field that holds the grammar."""
    if not error.field and (field := next((name for name in _GRAMMARS if getattr(fields, name)), "")):
        return _wrong(field, str(error))
    return error


# --- what a request is made of ----------------------------------------------------------------------------------------


def rule_entries(fields: GenerationFields) -> int:
    """Return how many tokens and words the rules of a request name: the work for each of its prompts."""
    return sum(len(rule) for rule in (fields.logit_bias, fields.allowed_token_ids, fields.bad_words) if rule)


class GenerationOrder(Struct, frozen=True):
    """A checked request: what to generate for each of its prompts."""

    fields: GenerationFields
    prompts: Sequence[Sequence[int]]
    max_tokens: int | None
    logprobs: int | None
    clamped: bool  # max_tokens may be lowered to what fits beside the prompt
    prompt_logprobs: int | None = None
    shown_tokens: Sequence[int] = ()  # special tokens that stay in the text
    grammar_of: str = ""  # the field that the output's grammar comes from, if it is not in the fields
    template: str = ""  # digest of what rendered a chat
    frame: str = ""  # of that grammar: see `tools`


def request_fields(
    order: GenerationOrder, prompt: Sequence[int], max_tokens: int | None, *, affinity: str, session: str
) -> dict[str, Any]:
    """Return the fields of a request for all outputs of one prompt. Most have the same name in all APIs. Raises
    InvalidRequest for a grammar that is none."""
    fields = order.fields
    output = structured_output(fields)
    values = asdict(fields)
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
        "logprobs": order.logprobs,
        "prompt_logprobs": order.prompt_logprobs,
        "length_penalty": None,
        "include_stop": fields.include_stop_str_in_output,
        "special_tokens": fields.skip_special_tokens is False,
        "shown_special_tokens": order.shown_tokens,
        "marked": True,
        "affinity": affinity,
        "session": session,
        "template": order.template,
        "structured_output": output and output | {"frame": order.frame},
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
