"""Long prompts: what can't fit is refused before it is tokenized, and the rest does not hold up other requests."""

import asyncio
import contextlib
import threading
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from baton.errors import ContextTooLong, InvalidRequest, Overloaded
from baton.messages import SamplingParams
from baton.operator_api import PinPrefix
from baton.v1 import generation_pb2 as pb
from kvstore.keys import unpack_tokens
from router.frontend import detokenizer, generation, served_model
from router.frontend.api.operator_server import checked
from router.frontend.detokenizer import Tokenizer
from router.frontend.off_loop import TokenizerLane, TokenizerThreads
from router.frontend.served_model import ServedModel
from router.queueing.admission import ModelLimits
from tests.router import tokenizers

SPACES = " " * 100
PROSE = "The quick brown fox jumps over the lazy dog, and naïve 東京タワー 🚀. "


def copy(raw: RawTokenizer) -> RawTokenizer:
    return RawTokenizer.from_str(raw.to_str())


def spacious() -> RawTokenizer:
    """One with a token of 100 spaces, as GPT-4's have them."""
    raw = copy(tokenizers.byte_level())
    raw.add_tokens([AddedToken(SPACES, normalized=False)])
    return raw


def normalizing() -> RawTokenizer:
    raw = copy(tokenizers.byte_level())
    raw.normalizer = normalizers.NFKC()
    return raw


KINDS = {
    "byte level": Tokenizer(tokenizers.byte_level()),
    "byte fallback": Tokenizer(tokenizers.byte_fallback()),
    "long token": Tokenizer(spacious()),
    "normalizing": Tokenizer(normalizing()),
}
KIND = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS.keys())


class Counting(Tokenizer):
    """Knows how much it has tokenized."""

    def __init__(self, raw: RawTokenizer) -> None:
        super().__init__(raw)
        self.characters = 0
        outer = self

        class Counted:
            def encode_batch_fast(self, texts: list[str], **options: bool) -> object:
                outer.characters += sum(map(len, texts))
                return raw.encode_batch_fast(texts, **options)

        self._tokenizer = Counted()


def model(tokenizer: Tokenizer, context: int) -> ServedModel:
    return ServedModel("small", tokenizer, ModelLimits(1_000, context), (), SamplingParams())


def tokens_of(prompt: str, served: ServedModel) -> list[int]:
    return unpack_tokens(generation.generation_request({"text": prompt}, "r", served, lambda: 1).tokens)


@pytest.mark.parametrize("raw", [tokenizers.byte_level(), tokenizers.byte_fallback()], ids=["bytes", "fallback"])
def test_a_text_that_can_not_fit_is_not_tokenized(raw: RawTokenizer) -> None:
    tokenizer = Counting(raw)
    with pytest.raises(ContextTooLong, match=r"at most \d+ bytes"):
        tokens_of(PROSE * 100_000, model(tokenizer, 1_000))
    with pytest.raises(ContextTooLong, match=r"at most \d+ bytes"):
        checked(PinPrefix(text=PROSE * 100_000), model(tokenizer, 1_000), 0.0)
    assert tokenizer.characters == 0


def test_a_long_token_does_not_have_much_more_tokenized_than_fits() -> None:
    """The bound is 100 bytes a token here, so 3 MB of prose are below it."""
    tokenizer = Counting(spacious())
    context = 35_000
    prompt = PROSE * (3_000_000 // len(PROSE.encode()))
    assert len(prompt.encode()) < tokenizer.max_bytes(context)
    with pytest.raises(ContextTooLong, match=r"35000 tokens. However, your prompt of .* has more"):
        tokens_of(prompt, model(tokenizer, context))
    assert tokenizer.characters < 300_000


@KIND
@given(data=st.data())
def test_no_prompt_that_fits_is_refused(tokenizer: Tokenizer, data: st.DataObject) -> None:
    pieces = st.sampled_from([PROSE, SPACES, " ", "\n", "the", "x", "123", "é", "e\u0301", "\ufb03", "🚀", "stop"])
    prompt = "".join(data.draw(st.lists(pieces, min_size=1, max_size=40)))
    fits = len(tokenizer.encode(prompt))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenizer, "_WINDOW", 16)  # with windows as small as they may be, and for every prompt
        patch.setattr(served_model, "_BYTES_PER_TOKEN", 0)
        assert tokens_of(prompt, model(tokenizer, fits)) == tokenizer.encode(prompt)
        with pytest.raises(ContextTooLong):
            tokens_of(prompt, model(tokenizer, fits - 1))


@KIND
@given(data=st.data())
def test_the_end_of_a_prompt_is_what_transformers_truncates_it_to(tokenizer: Tokenizer, data: st.DataObject) -> None:
    pieces = st.sampled_from([PROSE, SPACES, " ", "\n", "the", "x", "123", "é", "e\u0301", "\ufb03", "🚀", "stop"])
    prompt = "".join(data.draw(st.lists(pieces, min_size=1, max_size=40)))
    keep, special = data.draw(st.integers(1, 2 * len(prompt))), data.draw(st.booleans())
    peer = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, truncation_side="left")
    right = peer(prompt, truncation=True, max_length=keep, add_special_tokens=special)["input_ids"]
    tokenizer._tokenizer.no_truncation()  # both share it
    assert tokenizer.encode_end(prompt, keep, special_tokens=special) == right


@pytest.mark.parametrize("raw", [tokenizers.byte_level(), tokenizers.byte_fallback(), spacious()])
def test_of_a_long_prompt_only_an_end_is_tokenized(raw: RawTokenizer) -> None:
    tokenizer = Counting(raw)
    prompt = "".join(f"{PROSE} {number} " for number in range(50_000))
    right = raw.encode(prompt[-100_000:], add_special_tokens=False).ids
    for keep in (1, 2, 500, 9_000):
        tokenizer.characters = 0
        assert tokenizer.encode_end(prompt, keep, special_tokens=False) == right[-keep:]
        assert tokenizer.characters < 400_000 < len(prompt) / 8


def test_an_end_of_long_tokens_is_read_far_enough() -> None:
    tokenizer = KINDS["long token"]
    end = tokenizer.encode_end("x" * 100_000 + SPACES * 4_000, 3_000)
    assert end == tokenizer.encode(SPACES * 2_999)


def test_a_prompt_that_is_to_be_truncated_may_exceed_the_context() -> None:
    served = model(KINDS["byte level"], 100)

    def prompt(keep: int, max_tokens: int = 0, **more: Any) -> list[int]:
        message = pb.GenerateRequest(truncate_prompt_tokens=keep, **more)
        if max_tokens:
            message.max_tokens = max_tokens
        fields = generation.message_fields(message)
        return unpack_tokens(generation.generation_request(fields, "r", served, lambda: 1).tokens)

    long = PROSE * 10_000
    right = KINDS["byte level"].encode(PROSE * 30)
    assert prompt(7, text=long) == [right[0], *right[-6:]]
    assert prompt(-1, text=long) == [right[0], *right[-98:]]
    assert prompt(-1, 30, text=long) == [right[0], *right[-69:]]
    ids = pb.TokenIds(ids=range(300))
    assert prompt(7, token_ids=ids) == list(range(293, 300))
    assert prompt(70, 30, token_ids=ids) == list(range(230, 300))
    assert prompt(-1, text="hello") == KINDS["byte level"].encode("hello")
    for keep, most, text in ((0, 0, "at least 1"), (-2, 0, "at least 1"), (100, 0, "room for 99"), (71, 30, "for 70")):
        with pytest.raises(InvalidRequest, match=text):
            prompt(keep, most, text="hello")
    with pytest.raises(InvalidRequest, match="room for 0"):
        prompt(-1, 100, text="hello")


def test_a_prompt_of_the_longest_tokens_fits() -> None:
    served = model(KINDS["long token"], 3_001)
    assert len(tokens_of(SPACES * 3_000, served)) == 3_001  # with <s>
    with pytest.raises(ContextTooLong):
        tokens_of(SPACES * 3_001, served)


def test_the_longest_token_by_kind_of_tokenizer() -> None:
    spelt = [KINDS["byte level"].decode([token]) for token in range(tokenizers.byte_level().get_vocab_size())]
    assert KINDS["byte level"].longest == max(len(one.encode()) for one in spelt if "\ufffd" not in one)
    assert KINDS["long token"].longest == 100
    assert KINDS["byte fallback"].longest == len("▁hello".encode())
    # NFKC makes fewer bytes of a text, so more bytes may fit.
    assert KINDS["normalizing"].max_bytes(10) > KINDS["byte level"].max_bytes(10)
    # Nothing but runs of spaces would come to 100 bytes a token.
    assert KINDS["long token"].max_bytes(1_000_000) == 32_000_000


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """Compared within one run: with the GIL held, the longest stall is as long as the tokenizing."""
    prompt = PROSE * 20_000
    spent = list[float]()

    def tokenize() -> None:
        began = time.monotonic()
        KINDS["byte level"].encode(prompt)
        spent.append(time.monotonic() - began)

    thread = threading.Thread(target=tokenize)
    longest, last = 0.0, time.monotonic()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    thread.join()
    assert longest < spent[0] / 2


# --- the threads ---


async def test_what_waits_for_a_thread_is_bounded() -> None:
    go = threading.Event()
    lane = TokenizerLane("test", threads=1, max_jobs=3, max_bytes=100)
    with contextlib.closing(lane):
        first = asyncio.create_task(lane.run(1_000, go.wait))  # nothing else is here, so it may be of any length
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1 jobs with 1000 bytes"):
            await lane.run(10, go.wait)
        go.set()
        assert await first
        go.clear()
        waiting = [asyncio.create_task(lane.run(10, go.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="3 jobs"):
            await lane.run(10, go.wait)
        waiting[2].cancel()  # its client has gone before a thread began
        with pytest.raises(asyncio.CancelledError):
            await waiting[2]
        another = asyncio.create_task(lane.run(10, go.wait))
        await asyncio.sleep(0)
        waiting[0].cancel()  # a thread is at it, so it counts until that is done
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        with pytest.raises(Overloaded, match="3 jobs"):
            await lane.run(10, go.wait)
        go.set()
        assert await waiting[1]
        assert await another
        assert await lane.run(10, lambda: "free again") == "free again"


async def test_very_long_prompts_do_not_keep_the_others_from_a_thread() -> None:
    go = threading.Event()
    with contextlib.closing(TokenizerThreads()) as tokenizing:
        long = [asyncio.create_task(tokenizing.run(10_000_000, go.wait)) for _ in range(4)]
        await asyncio.sleep(0)
        assert await tokenizing.run(100_000, threading.current_thread) is not threading.main_thread()
        assert await tokenizing.run(100, threading.current_thread) is threading.main_thread()
        go.set()
        assert all(await asyncio.gather(*long))
