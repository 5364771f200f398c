"""From a prompt's text to its tokens, and which of a prompt's tokens are kept.

A text that can't fit the context is refused before it is tokenized: that would take seconds. With
`truncate_prompt_tokens` its end is tokenized instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import ContextTooLong, InvalidRequest
from router.frontend.detokenizer import Tokenizer
from router.frontend.served_model import ServedModel
from router.frontend.token_cache import TextOwner

_BYTES_PER_TOKEN = 8  # of text; where a prompt has more it may have far too many tokens, so those are counted first


def tokenized(
    texts: Sequence[str], model: ServedModel, *, special_tokens: bool = True, keep: int | None = None,
    owner: TextOwner | None = None,
) -> list[Sequence[int]]:  # fmt: skip
    """Return the tokens of each text, the last `keep` of them if that is set. Special tokens that the tokenizer adds
    are among these and stay, as with vLLM. `owner`: the texts are chats, whose tokens are cached for later ones.

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
    if owner is not None and model.token_cache is not None and not special_tokens:
        return [model.token_cache.encode(text, owner) for text in texts]
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
