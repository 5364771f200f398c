"""What the router reads of a checkpoint: tokenizer, limits, what ends an output, how its authors want it sampled.

Never the weights: those are the workers' business, and so is whether the engine can run the model at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec

from baton.checkpoint_files import read_object, read_optional, text_settings
from baton.checkpoints import hub
from baton.config import ApiConfig, ModelConfig
from baton.errors import InvalidRequest, ModelError, ModelMismatch, ModelNotFound, shown
from baton.messages import DrawParams, SamplingParams
from baton.tokenizer_files import tokenizer_folder
from router.frontend.chat.formats import NO_FORMAT, ChatFormat, ResponseTemplate, chosen, read_template
from router.frontend.chat.template import ChatTemplate, special_token
from router.frontend.detokenizer import Tokenizer
from router.frontend.token_cache import TokenCache
from router.generation_request import check_bounds
from router.queueing.admission import ModelLimits

_READ = ("*.json", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja")  # of the hub: no weights


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
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])  # LoRA adapters by name: their directories
    folder: Path | None = None  # of its files
    chat_format: ChatFormat = NO_FORMAT  # how it writes reasoning
    tool_format: ChatFormat = NO_FORMAT  # the same, and tool calls, where its prompt shows tools
    json_whitespace: int = ApiConfig().json_whitespace  # most characters in one place of JSON by a schema
    notes: tuple[str, ...] = ()  # what is odd in its files and does no harm
    token_cache: TokenCache | None = None  # of its chats

    @cached_property
    def reasoning_end(self) -> str | None:
        """The text that ends reasoning, if one does."""
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
        """The special tokens with some texts."""
        return [self.tokenizer.special_tokens[text] for text in texts] if self.tokenizer else []

    def check(self, name: str | None) -> None:
        """Raise ModelMismatch if a request asks for another model; no name is this one."""
        if name and name not in (self.name, *self.aliases, *self.adapters):
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
    settings = text_settings(read_object(folder / "config.json"))
    limits = ModelLimits(_count(settings, "vocab_size"), _count(settings, "max_position_embeddings"))
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
        adapters=config.lora_modules,
        tokenizer=tokenizer,
        limits=limits,
        eos=eos,
        defaults=_defaults(generation),
        chat_template=template,
        chat_format=plain,
        tool_format=with_tools,
        tokenizer_file=of_tokenizer / "tokenizer.json" if of_tokenizer else None,
        folder=folder,
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
        raise ModelError(f"{name} is {value!r} in config.json; it must be a whole number above zero")
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
