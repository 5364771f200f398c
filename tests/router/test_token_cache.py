"""Tokens of recent chats: they are those of a whole tokenizing, by kind of tokenizer, and each tenant has its own."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from baton.client import AsyncClient
from router.frontend import token_cache
from router.frontend.detokenizer import Tokenizer
from router.frontend.token_cache import TextOwner, TokenCache
from tests.router import tokenizers
from tests.router.test_api import door
from tests.router.test_detokenizer_long_prompts import KINDS, PROSE, Counting, copy
from tests.support.eventually import eventually_async

OWNER = TextOwner("", "")
END = "<|im_end|>"
PIECES = [
    END, "<s>", "</s>", "<mask>", "<|im_start|>", "<|im_end|>\n", "<|im_", "end|>", "|>", "<", ">", "x<", " ", "  ",
    "\n", "\u00a0", "the", "hello world", "Größe", "東京", "🚀", "ﬁ", "e\u0301", "123", "_", "stop", "x",
]  # fmt: skip


def unigram(scheme: str) -> RawTokenizer:
    """Like T5's and Llama 2's: it begins each text, or only the first piece of one, with a space of its own."""
    words = ["<unk>", "▁", "▁the", "▁hello", "▁world", "the", "hello", "st", "op", "stop", *map(chr, range(33, 127))]
    raw = RawTokenizer(models.Unigram([(word, -float(len(words) - len(word))) for word in words], unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()])
    return raw


def word_piece() -> RawTokenizer:
    words = ["[UNK]", "the", "hello", "world", "st", "##op", "##x", *map(chr, range(33, 127))]
    raw = RawTokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return raw


RAW = {
    **{name: tokenizer._tokenizer for name, tokenizer in KINDS.items()},
    **{f"unigram {scheme}": unigram(scheme) for scheme in ("always", "first", "never")},
    "word piece": word_piece(),
}
SAFE = {
    "plain": [AddedToken(END, special=True, normalized=False)],
    "to the right": [AddedToken(END, special=True, normalized=False, rstrip=True)],
    "others": [
        AddedToken(END, special=True, normalized=False),
        AddedToken("<mask>", special=True, normalized=False, lstrip=True, rstrip=True),
        AddedToken("<s>", special=True, normalized=True),
        AddedToken("|>", special=False, normalized=False),
    ],
}
UNSAFE = {
    "normalized": [AddedToken(END, special=True, normalized=True)],
    "to the left": [AddedToken(END, special=True, normalized=False, lstrip=True)],
    "words alone": [AddedToken(END, special=True, normalized=False, single_word=True)],
    "in a longer one": [AddedToken(END, normalized=False), AddedToken("<|im_end|>\n", normalized=False, lstrip=True)],
    "overlapped": [AddedToken(END, normalized=False), AddedToken("x<", normalized=False)],
    "inside": [AddedToken(END, normalized=False), AddedToken("the<|im_end|>", normalized=False)],
}


@cache
def with_tokens(kind: str, added: str) -> Tokenizer:
    raw = copy(RAW[kind])
    raw.add_tokens((SAFE | UNSAFE)[added])
    ends = [("x", 7), ("y", 8)]
    around = processors.TemplateProcessing("x y $A y" if added in SAFE else "$A", special_tokens=ends)
    raw.post_processor = processors.Sequence([processors.ByteLevel(), around])
    return Tokenizer(raw)


@pytest.mark.parametrize("added", SAFE | UNSAFE)
@given(
    kind=st.sampled_from([*RAW]),
    texts=st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join), min_size=2, max_size=4),
)
def test_the_tokens_are_those_of_the_whole_text(added: str, kind: str, texts: list[str]) -> None:
    tokenizer = with_tokens(kind, added)
    known = TokenCache(tokenizer, tokenizer.borders(PIECES))
    for text in [*texts, *texts, "".join(texts)]:
        for special in (False, True):
            assert list(known.encode(text, OWNER, special_tokens=special)) == tokenizer.encode(
                text, special_tokens=special
            )


@pytest.mark.parametrize("kind", RAW)
def test_a_text_is_cut_where_that_changes_no_token(kind: str) -> None:
    assert all(END in with_tokens(kind, added).borders([END]) for added in SAFE)
    assert not any(END in with_tokens(kind, added).borders([END]) for added in UNSAFE)
    assert not with_tokens(kind, "plain").borders(["no token"])


def conversation(turns: int, head: str = "") -> str:
    return head + "".join(f"{END}{PROSE * 20} {number}" for number in range(turns))


def counted(most_bytes: int = 2**20) -> tuple[Counting, TokenCache]:
    raw = copy(tokenizers.byte_level())
    raw.add_special_tokens([END])
    tokenizer = Counting(raw)
    known = TokenCache(tokenizer, tokenizer.borders([END]), most_bytes)
    tokenizer.characters = 0
    return tokenizer, known


@pytest.mark.technique("Known tokens of a chat are not tokenized again")
def test_of_a_further_turn_only_what_is_new_is_tokenized() -> None:
    tokenizer, known = counted()
    known.encode(conversation(50, "first"), OWNER)
    assert tokenizer.characters == len(conversation(50, "first"))
    tokenizer.characters = 0
    tokens = known.encode(conversation(52, "other"), OWNER)  # a line at its head differs, as a date does
    assert tokenizer.characters == len("other") + len(conversation(52)) - len(conversation(50))
    assert list(tokens) == tokenizer.encode(conversation(52, "other"), special_tokens=False)
    assert 0.9 * len(tokens) < known.hits < len(tokens) < known.queries


def test_no_tenant_and_no_salt_finds_the_texts_of_another() -> None:
    tokenizer, known = counted()
    text = conversation(5)
    for owner in (OWNER, TextOwner("other", ""), TextOwner("", "salt"), TextOwner("other", "salt")):
        tokenizer.characters = 0
        known.encode(text, owner)
        assert tokenizer.characters == len(text)
        known.encode(text, owner)
        assert tokenizer.characters == len(text)


def test_a_tenant_with_many_texts_takes_no_room_from_others() -> None:
    tokenizer, known = counted(most_bytes=40_000)
    mine = conversation(3)
    known.encode(mine, OWNER)
    for number in range(100):
        known.encode(conversation(3, str(number)) + END + PROSE * number, TextOwner("busy", ""))
        assert known._bytes.total() <= 40_000
    tokenizer.characters = 0
    known.encode(mine, OWNER)
    assert tokenizer.characters == 0
    known.encode(conversation(3, "0") + END, TextOwner("busy", ""))
    assert tokenizer.characters == len("0") + len(END)  # those that it uses stay


def test_a_prompt_of_borders_alone_is_cut_into_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_MOST_PARTS", 10)
    tokenizer, known = counted()
    for text in (END * 1_000, f"head{END * 1_000}", f"head{END}the{END * 998}"):
        assert list(known.encode(text, OWNER)) == tokenizer.encode(text, special_tokens=False)
        tokenizer.characters = 0
        assert list(known.encode(text, OWNER)) == tokenizer.encode(text, special_tokens=False)
        assert tokenizer.characters == len(text)  # of the line above
    assert len(known._parts[""]) == 5


@pytest.mark.slow
async def test_a_second_turn_is_counted(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    async with door(tmp_path, template=template) as client:

        async def counted(queries: int, hits: int) -> None:
            async def seen() -> bool:
                async with client.http.get(f"{client.url}/metrics") as page:
                    pairs = re.findall(r"^baton_tokenizer_cache_(\w+)_total (.*)$", await page.text(), re.MULTILINE)
                return {name: float(value) for name, value in pairs} == {"queries": queries, "hits": hits}

            await eventually_async(seen)

        async def ask(*texts: str) -> int:
            messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in texts]
            status, answer, _ = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
            assert status == 200, answer
            return answer["usage"]["prompt_tokens"]

        first = await ask("hello", "yes")
        await counted(first, 0)
        second = first + await ask("hello", "yes", "stop")
        await counted(second, first)
        fields = {"prompt": ["the</s>quick", "the</s>quick"], "max_tokens": 2}
        status, answer, _ = await client.post("/v1/completions", fields)
        assert status == 200, answer
        bare = answer["usage"]["prompt_tokens"] // 2 - 1  # <s> is added
        await counted(second + 2 * bare, first + bare)
        await client.post("/v1/completions", fields | {"cache_salt": "other"})
        await counted(second + 4 * bare, first + 2 * bare)
        async with AsyncClient(client.router.addresses.grpc) as by_grpc:
            await by_grpc.generate("the</s>quick", max_tokens=2).result()
        await counted(second + 5 * bare, first + 3 * bare)
