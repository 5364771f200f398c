"""Log-probabilities of tokens: joined, their texts are the text and their bytes its UTF-8, and no value takes another
one's place."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from openai.types import Completion
from openai.types.chat import ChatCompletion
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from baton.messages import TokenLogprob
from router.frontend.api.token_logprobs import TokenNames, added_texts, chat_logprobs, completion_logprobs
from router.frontend.detokenizer import LOST, TextOptions, TextStream, Tokenizer
from tests.router import tokenizers
from tests.router.test_api import door

BYTES, WORDS = Tokenizer(tokenizers.byte_level()), Tokenizer(tokenizers.byte_fallback())
SAMPLE = "Größe 東京 안녕 🙂🚀 naïve fox"
KINDS = pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["byte level", "byte fallback"])


def shown(tokenizer: Tokenizer, tokens: list[int], prompt: list[int], options: TextOptions | None = None) -> Any:
    """The chat's log-probabilities of some tokens, and their text."""
    silent = frozenset[int]()
    stream, whole = (TextStream(tokenizer, prompt, (), silent, options or TextOptions()) for _ in range(2))
    texts = added_texts(stream, tokens)
    if texts:
        texts[-1] += stream.flush().text
    scored = [TokenLogprob(token, -1.0) for token in tokens]
    return chat_logprobs(TokenNames(tokenizer), scored, texts).content, whole.feed(tokens).text + whole.flush().text


@KINDS
@given(text=st.text(st.sampled_from("ab é東京🙂🚀\U0010ffff  "), max_size=16), cut=st.integers(0, 8))
def test_joined_they_are_the_text(tokenizer: Tokenizer, text: str, cut: int) -> None:
    tokens = tokenizer.encode(text)
    prompt, output = tokens[:cut], tokens[cut:]
    if LOST in tokenizer.decode(prompt):
        return  # the output begins inside a character
    content, whole = shown(tokenizer, output, prompt)
    assert "".join(one.token for one in content) == whole
    assert b"".join(bytes(one.bytes) for one in content) == whole.encode()


@KINDS
def test_a_character_of_several_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🚀", special_tokens=False)
    content, _ = shown(tokenizer, tokens, tokenizer.encode("a"))
    *parts, last = [one for one in content if bytes(one.bytes) != b" "]
    assert [one.token for one in parts] == [""] * len(parts)
    assert last.token == "🚀"
    assert b"".join(bytes(one.bytes) for one in content).strip() == "🚀".encode()
    assert tokenizer.text_of(tokens[-1]).startswith("bytes:\\x")


@given(st.lists(st.integers(0, 399), max_size=30))
def test_whatever_comes_they_are_the_text(tokens: list[int]) -> None:
    for options in (TextOptions(), TextOptions(special_tokens=True), TextOptions(shown=frozenset({1}))):
        content, whole = shown(BYTES, tokens, [5], options)
        assert "".join(one.token for one in content) == whole


def test_a_word_keeps_its_space_but_at_the_beginning() -> None:
    tokens = WORDS.encode("hello world")
    assert WORDS.text_of(WORDS.encode("hello")[0]) == " "
    content, _ = shown(WORDS, tokens, [])
    assert "".join(one.token for one in content) == "hello world"
    assert b"".join(bytes(one.bytes) for one in content) == b"hello world"


def test_a_hidden_token_adds_nothing() -> None:
    content, text = shown(BYTES, [BYTES.encode("fox")[-1], 1], [5])
    assert [one.token for one in content] == [text, ""]
    assert content[1].bytes == []


def twins() -> Tokenizer:
    vocab = {word: index for index, word in enumerate(["<unk>", "<0x41>", "A", "▁", "b", "▁A"])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(raw)


@pytest.mark.parametrize("chosen", [1, 2])
def test_two_tokens_with_one_text_keep_their_values(chosen: int) -> None:
    top = ((2, -0.13), (1, -2.09), (4, -2.5), (3, -3.0), (5, -4.0))
    one = TokenLogprob(chosen, dict(top)[chosen], top)
    names = TokenNames(twins())
    logprobs = completion_logprobs(names, [one], ["A"], 7)
    assert logprobs.tokens == ["A"]
    assert logprobs.top_logprobs[0]["A"] == logprobs.token_logprobs[0] == dict(top)[chosen]
    assert logprobs.top_logprobs[0][f"token_id:{3 - chosen}"] == dict(top)[3 - chosen]
    assert {key: value for key, value in logprobs.top_logprobs[0].items() if value < -2.1} == {
        "b": -2.5, " ": -3.0, " A": -4.0,
    }  # fmt: skip
    entries = chat_logprobs(names, [one], ["A"]).content[0].top_logprobs
    assert [(each.token, each.logprob) for each in entries[:2]] == [("A", -0.13), ("A", -2.09)]
    assert len(entries) == 5


def test_a_token_beyond_the_likeliest_leaves_its_name_to_none_of_them() -> None:
    logprobs = completion_logprobs(TokenNames(twins()), [TokenLogprob(1, -9.0, ((2, -0.1),))], ["A"], 0)
    assert logprobs.top_logprobs == [{"token_id:2": -0.1}]


def test_names_by_id_leave_offsets_alone() -> None:
    logprobs = completion_logprobs(TokenNames(twins(), as_ids=True), [TokenLogprob(2, -1.0)] * 2, ["A", "A"], 3)
    assert (logprobs.tokens, logprobs.text_offset) == (["token_id:2"] * 2, [3, 4])


@KINDS
async def test_at_the_door(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emoji among words, whole and streamed, in chats and completions."""
    raw = tokenizers.byte_level() if tokenizer is BYTES else tokenizers.byte_fallback()
    monkeypatch.setattr("tests.router.served.tokenizers.byte_level", lambda: raw)
    output, begun = tokenizer.encode(SAMPLE, special_tokens=False), dict[int, int]()
    monkeypatch.setattr("tests.router.model.token_at", lambda seed, at: output[at - begun.setdefault(seed, at)])
    basis = {"max_tokens": len(output), "ignore_eos": True}

    def check(text: str, parts: list[Any]) -> None:
        """Check the log-probabilities of a completion."""
        tokens = [token for part in parts for token in part["tokens"]]
        offsets = [offset for part in parts for offset in part["text_offset"]]
        assert "".join(tokens) == text
        assert text.strip() == SAMPLE
        assert all(text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))
        assert all(len(entry) == 5 for part in parts for entry in part["top_logprobs"])

    async with door(tmp_path) as client:
        fields = basis | {"prompt": [7] * 5, "logprobs": 5}
        (choice,) = (answer := await client.complete(**fields, seed=1))["choices"]
        Completion.model_validate(answer)
        check(choice["text"], [choice["logprobs"]])
        events = await client.events("/v1/completions", fields | {"stream": True, "seed": 2})
        pieces = [event["choices"][0] for event in events]
        check("".join(one["text"] for one in pieces), [one["logprobs"] for one in pieces if one["logprobs"]])
        body = basis | {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 5}
        _, answer, _ = await client.post("/v1/chat/completions", body | {"seed": 3})
        ChatCompletion.model_validate(answer)
        content = answer["choices"][0]["logprobs"]["content"]
        text = "".join(one["token"] for one in content)
        assert text.strip() == SAMPLE == answer["choices"][0]["message"]["content"].strip()
        assert b"".join(bytes(one["bytes"]) for one in content) == text.encode()
        assert all(len(one["top_logprobs"]) == 5 for one in content)


@KINDS
@pytest.mark.parametrize(
    ("stop", "keeps"), [("東", False), ("ö", False), ("fo", False), ("e 東京", False), ("naïve", True), ("zz", False)]
)
async def test_a_stop_string_takes_back_what_tokens_add(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str, keeps: bool
) -> None:
    raw = tokenizers.byte_level() if tokenizer is BYTES else tokenizers.byte_fallback()
    monkeypatch.setattr("tests.router.served.tokenizers.byte_level", lambda: raw)
    tokens, begun = tokenizer.encode(SAMPLE, special_tokens=False), dict[int, int]()
    monkeypatch.setattr("tests.router.model.token_at", lambda seed, at: tokens[at - begun.setdefault(seed, at)])
    limits = {"max_tokens": len(tokens), "ignore_eos": True, "stop": stop, "include_stop_str_in_output": keeps}

    def check(text: str, content: list[Any], count: int) -> None:
        """Check the log-probabilities of a chat."""
        assert "".join(one["token"] for one in content) == text
        assert b"".join(bytes(one["bytes"]) for one in content) == text.encode()
        assert len(content) == count

    async with door(tmp_path) as client:
        fields = limits | {"prompt": [7] * 5, "logprobs": 5}
        answer = await client.complete(**fields, seed=1)
        (choice,), count = answer["choices"], answer["usage"]["completion_tokens"]
        before = SAMPLE.partition(stop)
        assert choice["text"].strip() == (before[0] + (before[1] if keeps else "")).strip()
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert len(logprobs["tokens"]) == count
        assert max(logprobs["text_offset"]) <= len(choice["text"])
        events = await client.events("/v1/completions", fields | {"stream": True, "seed": 2})
        parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
        assert [token for part in parts for token in part["tokens"]] == logprobs["tokens"]
        assert [offset for part in parts for offset in part["text_offset"]] == logprobs["text_offset"]
        body = limits | {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 5}
        _, chat, _ = await client.post("/v1/chat/completions", body | {"seed": 3})
        check(chat["choices"][0]["message"]["content"], chat["choices"][0]["logprobs"]["content"], count)
        pieces = await client.events("/v1/chat/completions", body | {"stream": True, "seed": 4})
        choices = [event["choices"][0] for event in pieces]
        text = "".join(one["delta"].get("content", "") for one in choices)
        check(text, [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]], count)
