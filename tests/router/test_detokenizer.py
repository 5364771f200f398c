"""Text: whole characters only, stop strings never shown in part, and nothing lost."""

import math
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from baton.errors import ModelError
from router.frontend.detokenizer import Detokenizer, StopMatcher, TextStream, Tokenizer
from tests.router import tokenizers

BYTES = Tokenizer(tokenizers.byte_level())
WORDS = Tokenizer(tokenizers.byte_fallback())
LOST = "\N{REPLACEMENT CHARACTER}"
SAMPLE = "Größe 東京 안녕 🙂🚀 naïve fox"

KINDS = pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["byte level", "byte fallback"])


def pieces(tokenizer: Tokenizer, tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@KINDS
def test_characters_of_several_tokens_come_whole(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(SAMPLE)
    out = pieces(tokenizer, tokens)
    assert "".join(out) == SAMPLE
    assert not any(LOST in piece for piece in out)
    assert "🙂" in out or any("🙂" in piece for piece in out)
    assert out[-1] == ""  # nothing was held back at the end


@given(st.lists(st.integers(0, 399), max_size=60))
def test_any_bytes_add_up_to_the_whole_decoding(tokens: list[int]) -> None:
    assert "".join(pieces(BYTES, tokens)) == BYTES.decode(tokens)


@given(st.text(max_size=30).filter(lambda text: LOST not in text))
def test_any_text_comes_back_without_a_broken_character(text: str) -> None:
    out = pieces(BYTES, BYTES.encode(text))
    assert "".join(out) == text
    assert not any(LOST in piece for piece in out)


def test_output_continues_the_prompt() -> None:
    hello, world = WORDS.encode("hello")[-1:], WORDS.encode("hello world")[-6:]
    assert "".join(pieces(WORDS, world)) == "world"  # where a text begins, its first space is no space
    assert "".join(pieces(WORDS, world, prompt=hello)) == " world"


@settings(max_examples=500)
@given(prompt=st.lists(st.integers(0, 399), max_size=12), tokens=st.lists(st.integers(0, 399), max_size=40))
def test_the_texts_of_prompt_and_output_are_the_text_of_the_whole(prompt: list[int], tokens: list[int]) -> None:
    # But for the U+FFFD at the end of the prompt's text that stand for a character which the output completes.
    before, whole = BYTES.decode(prompt), BYTES.decode(prompt + tokens)
    while before.endswith(LOST) and not whole.startswith(before):
        before = before[:-1]
    assert before + "".join(pieces(BYTES, tokens, prompt)) == whole


@KINDS
@given(data=st.data())
def test_so_they_are_wherever_a_text_is_cut(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(st.sampled_from("ab é東京🙂🚀\U0010ffff"), max_size=20))
    tokens = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(tokens)))
    prompt, output = tokens[:cut], tokens[cut:]
    # One decoder tells the prompt's whole characters at once, the other only without the bytes of the last.
    ends = [prompt[: max(0, len(prompt) - end)] for end in (range(4) if tokenizer is WORDS else [0])]
    before = next(
        text for end in ends if LOST not in (text := tokenizer.decode(end).rstrip(LOST * (tokenizer is BYTES)))
    )
    if output:
        assert before + "".join(pieces(tokenizer, output, prompt)) == tokenizer.decode(tokens)


def test_a_character_that_the_output_completes_is_in_its_text() -> None:
    tokens = BYTES.encode("a🚀b")
    for cut in range(2, len(tokens)):
        assert "".join(pieces(BYTES, tokens[cut:], tokens[:cut])) in ("🚀b", "b")
    assert "".join(pieces(BYTES, tokens[3:], tokens[:3])) == "🚀b"


def test_half_a_character_at_the_end_is_told_by_flush() -> None:
    tokens = BYTES.encode("a🚀")[:-1]
    out = pieces(BYTES, tokens)
    assert "".join(out[:-1]) == "a"
    assert set(out[-1]) == {LOST}


def test_what_never_becomes_a_character_is_not_waited_for() -> None:
    byte = next(token for token in range(399) if BYTES.decode([token]) == LOST)
    out = pieces(BYTES, [byte] * 40)
    assert any(out[:-1])


def test_special_tokens_have_no_text_but_are_added_to_prompts() -> None:
    assert BYTES.encode("fox")[0] == 0
    assert BYTES.decode([0, *BYTES.encode("fox"), 1]) == "fox"


def test_truncation_and_padding_of_the_file_are_undone(tmp_path: Path) -> None:
    raw = tokenizers.byte_level()
    copy = type(raw).from_str(raw.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=50)
    copy.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path / "tokenizer.json").encode(SAMPLE) == BYTES.encode(SAMPLE)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(file)


# --- stop strings ---


def first_stop(text: str, stops: list[str]) -> str | None:
    """The definition: cut before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@given(
    parts=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_by_their_definition_however_text_is_cut(parts: list[str], stops: list[str]) -> None:
    whole = "".join(parts)
    expected = first_stop(whole, stops)
    matcher, shown = StopMatcher(stops), ""
    for part in parts:
        safe, stopped = matcher.feed(part)
        shown += safe
        if stopped:
            assert shown == expected
            return
        assert whole.startswith(shown)
        assert expected is None or len(shown) <= len(expected)
    assert expected is None
    assert shown + matcher.flush() == whole


def test_text_that_is_held_back_is_let_go_in_proportion_to_its_length() -> None:
    """Compared within one run: 64 times the text takes about 64 times as long. It once took 350 times as long."""

    def seconds(length: int) -> float:
        best = math.inf
        for _ in range(5):
            matcher = StopMatcher(["a" * length + "b"])
            assert matcher.feed("a" * length) == ("", None)
            began = time.perf_counter()
            assert matcher.feed("c") == ("a" * length + "c", None)
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(64_000) < 180 * seconds(1_000)


def test_without_a_possible_stop_nothing_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("hello\n") == ("hello", None)
    assert matcher.feed("there") == ("\nthere", None)
    assert matcher.feed("x\n\nUs") == ("x", None)
    assert matcher.feed("er: no") == ("", "\n\nUser:")


# --- both in a row ---


def stream(stops: list[str], silent: frozenset[int] = frozenset(), tokenizer: Tokenizer | None = BYTES) -> TextStream:
    return TextStream(tokenizer, [], stops, silent)


def test_a_stop_string_across_tokens_cuts_text_and_tokens() -> None:
    tokens = BYTES.encode("The fox\n\nUser: hello there")
    out = stream(["\n\nUser:"])
    piece = out.feed(tokens)
    assert (piece.text, piece.stopped) == ("The fox", True)
    assert BYTES.decode(tokens[: piece.count]).startswith("The fox\n\nUser:")
    assert not BYTES.decode(tokens[: piece.count - 1]).startswith("The fox\n\nUser:")


def test_what_was_held_back_comes_at_the_end() -> None:
    out = stream(["dog house"])
    assert out.feed(BYTES.encode("lazy dog")).text == "lazy "
    assert out.flush().text == "dog"


def test_bytes_held_back_can_still_complete_a_stop_string() -> None:
    out = stream([LOST])
    assert out.feed(BYTES.encode("a🚀")[:-1]).text == "a"
    assert out.flush().stopped


def test_the_token_that_ends_the_output_has_no_text() -> None:
    (_, *tokens) = BYTES.encode("fox dog")
    out = stream([], silent=frozenset(tokens[-1:]))
    piece = out.feed(tokens)
    assert piece.count == len(tokens)
    assert "fox dog".startswith(piece.text + out.flush().text)
    assert piece.text != "fox dog"


def test_without_a_tokenizer_tokens_pass_through() -> None:
    out = stream([], tokenizer=None)
    assert (out.feed([5, 6]).text, out.feed([7]).count, out.flush().text) == ("", 1, "")
