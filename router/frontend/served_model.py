"""What the router reads of a checkpoint: tokenizer, limits, chat templates, what ends an output, how its authors want
it sampled. The tokens of a prompt's text follow from these.

Never the weights: those are the workers' business, and so is whether the engine can run the model at all.

A text that can't fit the context is refused before it is tokenized: that would take seconds. With
`truncate_prompt_tokens` its end is tokenized instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec

from baton.checkpoint_files import canonical, read_config, read_optional, text_settings
from baton.checkpoints import hub
from baton.config import ApiConfig, ModelConfig
from baton.errors import ContextTooLong, InvalidRequest, ModelError, ModelMismatch, ModelNotFound, shown
from baton.messages import DrawParams, SamplingParams
from baton.tokenizer_files import tokenizer_folder
from router.frontend.chat.formats import NO_FORMAT, ChatFormat, ResponseTemplate, chosen, read_template
from router.frontend.detokenizer import Tokenizer
from router.frontend.token_cache import TextOwner, TokenCache
from router.generation_request import check_bounds
from router.queueing.admission import ModelLimits

_CONTEXT = "max_position_embeddings"
_READ = ("*.json", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja")  # of the hub: no weights
_TEMPLATE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"  # a folder with others, by name
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # names of these
_BYTES_PER_TOKEN = 8  # of text; where a prompt has more it may have far too many tokens, so those are counted first


@dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's templates by name, and the special tokens that they may name."""

    named: Mapping[str, str]
    special_tokens: Mapping[str, str]

    def source(self, *, tools: bool = False) -> str:
        """Return the template that transformers would choose, or the first one where it would find none."""
        named = (tools and self.named.get(_WITH_TOOLS)) or self.named.get(_DEFAULT)
        return named or next(iter(self.named.values()))

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """Read a checkpoint's templates; None if it has none. Raises ModelError."""
        settings = read_optional(folder / "tokenizer_config.json")
        source = settings.get("chat_template")
        named: dict[str, Any] = {_DEFAULT: source}
        if isinstance(source, list):
            named = {str(one.get("name")): one.get("template") for one in source if isinstance(one, dict)}
        files = {file.stem: _template_text(file) for file in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
        if os.path.lexists(folder / _TEMPLATE):  # as with transformers, the settings' ones then count for nothing
            named = {_DEFAULT: _template_text(folder / _TEMPLATE)}
        named = {name: text for name, text in (named | files).items() if text}
        for name, text in named.items():
            if not isinstance(text, str):
                raise ModelError(
                    f"chat_template {name!r} of {folder} is a {type(text).__name__}; it must be a text, or a list of "
                    "named texts"
                )
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        tokens = {name: _content(settings.get(name)) for name in names}
        return cls(named, {name: text for name, text in tokens.items() if text is not None}) if named else None


@dataclass(frozen=True)
class ServedModel:
    """A model as its clients see it."""

    name: str
    tokenizer: Tokenizer | None  # none: token ids only
    limits: ModelLimits
    eos: tuple[int, ...]
    defaults: SamplingParams  # for what a request leaves open
    chat_template: ChatTemplate | None = None
    tokenizer_file: Path | None = None  # where the tokenizer was read
    aliases: tuple[str, ...] = ()  # further names that a request may use
    adapters: dict[str, str] = field(default_factory=dict[str, str])  # LoRA adapters now, by name: their directories
    folder: Path | None = None  # of its files
    config: bytes = b""  # `baton.checkpoint_files.canonical`
    chat_format: ChatFormat = NO_FORMAT  # how it writes reasoning
    tool_format: ChatFormat = NO_FORMAT  # the same, and tool calls, where its prompt shows tools
    json_whitespace: int = ApiConfig().json_whitespace  # most characters in one place of JSON by a schema
    notes: tuple[str, ...] = ()  # what is odd in its files and does no harm
    token_cache: TokenCache | None = None

    @cached_property
    def reasoning_end(self) -> str | None:
        return self.chat_format.reasoning_end or self.tool_format.reasoning_end

    @cached_property
    def grammar_end(self) -> int | None:
        """The token that stands for the end of an output in grammars: one of `eos` that the tokenizer has."""
        tokenizer = self.tokenizer
        return next((token for token in self.eos if tokenizer is not None and tokenizer.has(token)), None)

    def format_of(self, *, tools: object) -> ChatFormat:
        """How the model writes an output whose prompt shows such tools."""
        return self.tool_format if tools else self.chat_format

    def special_tokens(self, texts: Iterable[str]) -> list[int]:
        return [self.tokenizer.special_tokens[text] for text in texts] if self.tokenizer else []

    def has(self, name: str) -> bool:
        return name in (self.name, *self.aliases, *self.adapters)

    def check(self, name: str | None) -> None:
        """Raise ModelMismatch if a request asks for another model; no name is this one."""
        if name and not self.has(name):
            raise ModelMismatch(f"model {shown(name)!r} is not served here; this cluster serves {self.name!r}")

    def adapter_of(self, name: str | None) -> str:
        """The LoRA adapter that a request asks for, by the model's name in it; "" for none."""
        return name if name and name in self.adapters else ""

    def answered_as(self, name: str | None) -> str:
        """What an answer calls the model: an adapter by its name, else the first of the model's."""
        return self.adapter_of(name) or self.name


def load(config: ModelConfig) -> ServedModel:
    """Read the model's files. Raises ModelNotFound or ModelError."""
    folder = _folder(config.path)
    raw = read_config(folder)
    settings = text_settings(raw)
    if settings.get(_CONTEXT) is None:  # as with Mamba 2, whose states bound no context
        settings = {**settings, _CONTEXT: config.max_model_len or None}
    limits = ModelLimits(_count(settings, "vocab_size"), _count(settings, _CONTEXT))
    generation = read_optional(folder / "generation_config.json")
    of_tokenizer = None if config.skip_tokenizer_init else tokenizer_folder(folder)
    tokenizer = Tokenizer.load(of_tokenizer / "tokenizer.json") if of_tokenizer else None
    named = _eos_text(of_tokenizer) if of_tokenizer else None
    token_of = tokenizer.token_of if tokenizer else lambda _: None
    response, odd = _response_template(of_tokenizer, config) if of_tokenizer else (None, ())
    eos, notes = end_tokens(named, token_of, generation, settings, limits.vocab_size)
    template = ChatTemplate.load(folder)
    special = tokenizer.special_tokens if tokenizer else ()
    parsers = config.tool_call_parser, config.reasoning_parser
    written = (*template.named.values(), *template.special_tokens.values()) if template else ()
    plain, with_tools = (
        chosen(template and template.source(tools=tools), *parsers, special, response) for tools in (False, True)
    )
    return ServedModel(
        name=config.served_name,
        aliases=config.served_names[1:],
        adapters=dict(config.lora_modules),
        tokenizer=tokenizer,
        limits=limits,
        eos=eos,
        defaults=_defaults(generation),
        chat_template=template,
        chat_format=plain,
        tool_format=with_tools,
        tokenizer_file=of_tokenizer / "tokenizer.json" if of_tokenizer else None,
        folder=folder,
        config=canonical(raw),
        notes=(*notes, *odd),
        token_cache=TokenCache(tokenizer, tokenizer.borders(written)) if tokenizer else None,
    )


def _response_template(folder: Path, config: ModelConfig) -> tuple[ResponseTemplate | None, tuple[str, ...]]:
    """Return how the tokenizer's settings describe answers, and what is odd in that. Raises ModelError if it can't be
    read and the configuration names it."""
    spec = read_optional(folder / "tokenizer_config.json").get("response_template")
    try:
        if spec is not None:
            return read_template(spec), ()
        reason = "there is none in tokenizer_config.json"
    except ValueError as error:
        reason = f"that of tokenizer_config.json can't be read: {error}"
    if "hf" in (config.tool_call_parser, config.reasoning_parser):
        raise ModelError(f"a parser is hf, the tokenizer's response_template: {reason}; name another parser")
    return None, (f"response_template: {reason}",) if spec is not None else ()


def _eos_text(folder: Path) -> str | None:
    """Return the text of the tokenizer's own end-of-sequence token; None if it names none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (text := special_token(read_optional(folder / name), "eos_token", name)) is not None:
            return text
    return None


def _folder(path: str) -> Path:
    """The checkpoint's directory; a hub id is fetched, without its weights."""
    if not path:
        raise ModelNotFound("model.path is empty; give the directory of a checkpoint, or a hub id")
    return hub.resolve(path, _READ)


def _count(settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        advice = ", or set model.max_model_len" if name == _CONTEXT and value is None else ""
        raise ModelError(f"{name} is {value!r} in config.json; it must be a whole number above zero{advice}")
    return value


def _defaults(generation: Mapping[str, Any]) -> SamplingParams:
    """What the model's authors recommend, where they recommend sampling; otherwise plain sampling at temperature 1."""
    if not generation.get("do_sample"):
        return SamplingParams()
    values = {name: generation[name] for name in DrawParams.__struct_fields__ if generation.get(name)}
    if values.get("top_k") == -1:
        del values["top_k"]  # no limit
    try:
        result = msgspec.convert(values, SamplingParams)
        check_bounds(values)  # Python's JSON knows NaN and Infinity, and whole numbers of any size
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ModelError(
            f"generation_config.json recommends {values}, which is no sampling: {error}; correct it or remove it"
        ) from None
    return result


def end_tokens(
    named: str | None,
    token_of: Callable[[str], int | None],
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    vocab_size: int,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids of the tokens that end an output, the tokenizer's own first, and what of them is odd.

    A chat model's config.json often has the base model's token, and only its tokenizer, with the text `named`, the one
    that ends a turn. So the files add up. What the model can't write ends nothing, as with transformers.
    Raises ModelError for a value that is no token id.
    """
    ids: list[int] = []
    notes: list[str] = []
    if named is not None:
        if (own := token_of(named)) is not None:
            ids.append(own)
        else:
            notes.append(f"eos_token {named!r} of the tokenizer's settings is no token of it; it ends no output")
    ids += _ids(generation, "generation_config.json") + _ids(config, "config.json")
    for one in dict.fromkeys(ids):
        if one >= vocab_size:
            notes.append(f"end-of-sequence token {one} is beyond the vocabulary of {vocab_size}; it ends no output")
    known = tuple(one for one in dict.fromkeys(ids) if one < vocab_size)
    if not known:
        notes.append("the checkpoint names no end-of-sequence token; its outputs end at max_tokens or a stop string")
    return known, tuple(notes)


def _ids(settings: Mapping[str, Any], file: str) -> list[int]:
    value: Any = settings.get("eos_token_id")
    ids = cast("list[Any]", value if isinstance(value, list) else [] if value is None else [value])
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise ModelError(f"eos_token_id is {value!r} in {file}; it must be a token id or a list of them")
    return ids


def _template_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} can't be read: {error}; fetch the checkpoint again") from None


def special_token(settings: Mapping[str, Any], name: str, file: str) -> str | None:
    """Return the text of a special token; None if the settings name none. Raises ModelError for anything else."""
    if (token := settings.get(name)) is not None and _content(token) is None:
        raise ModelError(f"{name} is {token!r} in {file}; it must be a text, or an object with its content")
    return _content(token)


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def tokenized(
    texts: Sequence[str], model: ServedModel, *, special_tokens: bool = True, keep: int | None = None,
    owner: TextOwner | None = None,
) -> list[Sequence[int]]:  # fmt: skip
    """Return the tokens of each text, the last `keep` of them if that is set. Special tokens that the tokenizer adds
    are among these and stay, as with vLLM. The tokens of an `owner` are cached for its later texts.

    Raises InvalidRequest without a tokenizer, and without `keep` ContextTooLong before it tokenizes a text that can't
    fit."""
    if not all(texts):
        raise InvalidRequest("the prompt's text is empty; send at least one character")
    if model.tokenizer is None:
        raise InvalidRequest(f"{model.name} has no tokenizer.json, so its prompt can't be text; send token_ids")
    if keep is not None:
        return [model.tokenizer.encode_end(text, keep, special_tokens=special_tokens) for text in texts]
    for text in texts:
        _check_size(text, model.tokenizer, model.limits.max_context)
    if owner is not None and (cache := model.token_cache) is not None:
        return [cache.encode(text, owner, special_tokens=special_tokens) for text in texts]
    return [*model.tokenizer.encode_all(texts, special_tokens=special_tokens)]


def _check_size(text: str, tokenizer: Tokenizer, most: int) -> None:
    """Raise ContextTooLong for a text that certainly has more than `most` tokens."""
    bound = tokenizer.max_bytes(most)
    size = len(text.encode())
    if size > bound:
        least = -(-size * most // bound)
        raise ContextTooLong(
            f"This model's maximum context length is {most} tokens, which are at most {bound} bytes. However, "
            f"your prompt has {size} bytes; shorten it",
            prompt=least, context=most,
        )  # fmt: skip
    if size > most * _BYTES_PER_TOKEN and tokenizer.exceeds(text, most):
        raise ContextTooLong(
            f"This model's maximum context length is {most} tokens. However, your prompt of {size} bytes has more; "
            "shorten it",
            prompt=most + 1, context=most,
        )  # fmt: skip


def kept_tokens(truncation: int | None, max_tokens: int | None, context: int) -> int | None:
    """Return how many of a prompt's last tokens are kept; None: all.

    `truncation` is `truncate_prompt_tokens`. -1 stands for as many as the context has room for beside `max_tokens` of
    output. Raises InvalidRequest, as vLLM does, if it is more than that."""
    if truncation is None:
        return None
    if truncation < -1 or truncation == 0:
        raise InvalidRequest(f"truncate_prompt_tokens is {truncation}; it must be -1 or at least 1")
    room = context - max(1, max_tokens or 0)
    if room < max(1, truncation):
        raise InvalidRequest(
            f"truncate_prompt_tokens is {truncation}, and the model's context of {context} has room for {max(0, room)} "
            f"prompt tokens beside {max(1, max_tokens or 0)} to generate"
        )
    return room if truncation == -1 else truncation
