"""Log-probabilities of tokens, as the HTTP APIs show them.

A token of the output is shown by the text that it adds to it: joined, they are the output's text. Most tokens add their
own text. A token that ends inside a character adds none, the one that completes the character adds all of it, and a
special token that is hidden adds none. `bytes` are those that the token itself stands for.

An alternative to it was never part of a text. It is shown by its own text, or as `bytes:\\xf0\\x9f` if that is no whole
character.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from baton.messages import PromptTokenLogprob, TokenLogprob
from router.frontend.detokenizer import LOST, MARK, TextStream, Tokenizer

Json: TypeAlias = dict[str, Any]


class CompletionLogprobs(Struct, kw_only=True):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[Mapping[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct):
    """A token that could come at a place of a chat's output."""

    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(TopLogprob):
    """A token of a chat's output."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TokenNames(Struct, frozen=True):
    """How tokens are called: by their texts, or all as `token_id:N`."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def own(self, token: int) -> str:
        """A token's name by itself."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token}"
        return self.tokenizer.text_of(token)

    def in_text(self, token: int, added: str) -> str:
        """The name of a token that has added `added` to a text."""
        return self.own(token) if self.as_ids or self.tokenizer is None else added

    def bytes_of(self, token: int) -> bytes:
        return self.tokenizer.bytes_of(token) if self.tokenizer is not None else self.own(token).encode()

    def bytes_in_text(self, token: int, added: str) -> bytes:
        """The bytes of a token in the text to which it has added `added`: a space that begins a text, and a special
        token that is hidden, are not in it."""
        own = self.bytes_of(token)
        try:
            whole = own.decode()
        except UnicodeDecodeError:
            return own  # parts of a character
        return added.encode() if whole.endswith(added) and not whole.endswith(LOST) else own


def added_texts(stream: TextStream, tokens: Iterable[int]) -> list[str]:
    """Return what each of some tokens adds to a text without stop strings."""
    return [stream.feed([token]).text.replace(MARK, "") for token in tokens]


def cut_texts(texts: Sequence[str], length: int) -> tuple[list[str], int]:
    """Cut what tokens add to a text that ends after so many characters, as a stop string ends it. Return also how many
    tokens come before those that complete a character beyond the end, or begin one."""
    cut: list[str] = []
    whole = 0
    for number, text in enumerate(texts, start=1):
        cut.append(text[:length])
        if text and len(text) <= length:
            whole = number
        length = max(0, length - len(text))
    return cut, whole if cut != [*texts] else len(cut)


def completion_logprobs(
    names: TokenNames, logprobs: Sequence[TokenLogprob | PromptTokenLogprob], texts: Sequence[str], offset: int
) -> CompletionLogprobs:
    """Return those of OpenAI's completions. `texts`: what each token adds to the text, from `offset` on."""
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    scored = list(zip(logprobs, texts, strict=True))
    return CompletionLogprobs(
        tokens=[names.in_text(one.token, text) for one, text in scored],
        token_logprobs=[one.logprob for one, _ in scored],
        top_logprobs=[_by_name(names, one, text) for one, text in scored],
        text_offset=offsets,
    )


def _by_name(names: TokenNames, one: TokenLogprob | PromptTokenLogprob, text: str) -> Mapping[str, float]:
    """The likeliest tokens by their names. Of those with one name, the chosen or likeliest one has it, and the others
    are called `token_id:N`."""
    chosen = names.in_text(one.token, text)
    by_name: dict[str, float] = {}
    for token, value in one.top:
        name = chosen if token == one.token else names.own(token)
        is_taken = name in by_name or (name == chosen and token != one.token)
        by_name[f"token_id:{token}" if is_taken else name] = value
    return by_name


def chat_logprobs(
    names: TokenNames, logprobs: Sequence[TokenLogprob], texts: Sequence[str], whole: int | None = None
) -> ChatLogprobs:
    """Return those of OpenAI's chat completions. Only so many tokens have all of their bytes in the text; none: all."""
    content: list[ChatTokenLogprob] = []
    for number, (one, text) in enumerate(zip(logprobs, texts, strict=True)):
        name = names.in_text(one.token, text)
        is_cut = whole is not None and number >= whole
        encoded = [*(text.encode() if is_cut else names.bytes_in_text(one.token, text))]
        top = [
            TopLogprob(name, encoded, value)
            if token == one.token
            else TopLogprob(names.own(token), list(names.bytes_of(token)), value)
            for token, value in one.top
        ]
        content.append(ChatTokenLogprob(name, encoded, one.logprob, top))
    return ChatLogprobs(content)
