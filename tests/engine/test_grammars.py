"""Grammars: masks, ends, other rules beside them, and the state after a fail-over."""

import json
import math
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer

from baton.messages import Grammar, LogitsRules
from engine.engine import Engine
from engine.sampling import mask_threads
from engine.sampling.grammars import FollowedGrammar, GrammarCompiler
from engine.sampling.host_sampler import HostSampler
from engine.sampling.logits_rules import LogitsEditor
from engine.sampling.mask_threads import MaskThreads
from engine.step.batch import Sampled, TokenDraw, TokenMask
from router.frontend.detokenizer import DEFAULT_TEXT, TextStream
from router.frontend.detokenizer import Tokenizer as Text
from tests.engine.driver import Running, prompt_of
from tests.engine.grammar_texts import assert_matches, json_grammar, random_grammar
from tests.router.tokenizers import byte_fallback, byte_level
from tests.support.checkpoints import EOS, VOCAB
from tests.support.eventually import eventually
from tests.support.thorough import examples

PROMPT = [5, 6, 7]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    result = GrammarCompiler(folder, VOCAB, lambda: None)
    yield result
    result.close()


@pytest.fixture(scope="module")
def text_of(folder: Path) -> Callable[[Sequence[int]], str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True)


@pytest.fixture(scope="module")
def ids(folder: Path) -> Callable[[str], int]:
    """The token that stands for one character."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids[0]


def followed(
    compiler: GrammarCompiler, grammar: Grammar, output: Sequence[int] = (), ends: Collection[int] = (EOS,)
) -> FollowedGrammar:
    state = compiler.follow(grammar, ends, [*PROMPT, *output], len(PROMPT))
    eventually(lambda: state.ready, "the grammar is compiled")
    return state


def allowed(grammar: FollowedGrammar, output: Sequence[int]) -> list[int]:
    """The tokens that may come after this output."""
    mask = grammar.mask([*PROMPT, *output])
    if mask.begin():
        mask.compute()
    assert mask.failure == ""
    assert mask.allowed is not None
    return np.flatnonzero(mask.allowed).tolist()


def some_logits(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def draw(
    grammar: FollowedGrammar, output: Sequence[int], seed: int, temperature: float, editor: LogitsEditor | None = None
) -> Sampled:
    mask = grammar.mask([*PROMPT, *output])
    if mask.begin():
        mask.compute()
    edits = None if editor is None else editor.edits([*PROMPT, *output])
    token_draw = TokenDraw(temperature=temperature, seed=seed, edits=edits, mask=mask)
    return HostSampler().sample(some_logits(seed * 1_000 + len(output)), [token_draw], [len(PROMPT) + len(output)])[0]


def generated(
    grammar: FollowedGrammar, seed: int, temperature: float, output: Sequence[int] = (), most: int = 300
) -> list[int]:
    tokens = list(output)
    while len(tokens) < most and EOS not in tokens:
        tokens.append(draw(grammar, tokens, seed, temperature).token)
    return tokens


@pytest.mark.technique("Structured output")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_ends_matches(
    compiler: GrammarCompiler, text_of: Callable[[Sequence[int]], str], temperature: float
) -> None:
    for seed in range(10):
        tokens = generated(followed(compiler, json_grammar(SCHEMA)), seed, temperature)
        assert tokens[-1] == EOS
        assert_matches(json_grammar(SCHEMA), text_of(tokens))


@pytest.mark.technique("Structured output")
@examples(60)
@given(number=st.integers(0, 500), seed=st.integers(0, 99), cut=st.integers(0, 60))
def test_a_fail_over_changes_nothing(compiler: GrammarCompiler, number: int, seed: int, cut: int) -> None:
    """The masks of a grammar that has followed the output token by token, and of one that begins in the middle."""
    grammar = random_grammar(number)
    one, tokens = followed(compiler, grammar), list[int]()
    while len(tokens) < 60 and EOS not in tokens:
        before = allowed(one, tokens)
        if len(tokens) >= cut:
            assert allowed(followed(compiler, grammar, tokens), tokens) == before
        tokens.append(draw(one, tokens, seed, 1.0).token)
    begun = min(cut, len(tokens))
    if EOS not in tokens[:begun]:
        again = generated(followed(compiler, grammar, tokens[:begun]), seed, 1.0, tokens[:begun], len(tokens))
        assert again == tokens


def test_the_same_tokens_have_the_same_mask_and_it_is_computed_once(compiler: GrammarCompiler) -> None:
    grammar = followed(compiler, Grammar("regex", "[a-d]{3}", EOS))
    mask = grammar.mask(PROMPT)
    assert mask.begin()
    assert not mask.begin()
    mask.compute()
    assert grammar.mask(PROMPT) is mask
    assert grammar.mask([*PROMPT, allowed(grammar, [])[0]]) is not mask


@pytest.mark.technique("Forced tokens without a step")
def test_what_must_come_is_told_in_tokens(compiler: GrammarCompiler, text_of: Callable[[Sequence[int]], str]) -> None:
    schema = {"type": "object", "properties": {"temperature": {"enum": [1, 2]}}, "required": ["temperature"]}
    grammar = json_grammar(schema | {"additionalProperties": False})
    output, texts = list[int](), list[str]()
    while EOS not in output:
        mask = followed(compiler, grammar, output).mask([*PROMPT, *output])
        mask.compute()
        texts += [text_of(mask.forced)] if mask.forced else []
        for token in mask.forced or allowed(followed(compiler, grammar, output), output)[:1]:
            assert token in allowed(followed(compiler, grammar, output), output)
            output.append(token)
    assert text_of(output) == '{"temperature":1}'
    assert texts == ['{"temperature":', "}"]


def test_an_end_may_come_where_the_grammar_accepts_it(compiler: GrammarCompiler, ids: Callable[[str], int]) -> None:
    x, stop = ids("x"), ids("y")
    grammar = followed(compiler, Grammar("regex", "x{2,3}", EOS), ends=(EOS, stop))
    assert allowed(grammar, []) == allowed(grammar, [x]) == [x]
    assert allowed(grammar, [x, x]) == sorted([EOS, stop, x])
    assert allowed(grammar, [x, x, x]) == sorted([EOS, stop])


def test_without_eos_it_ends_where_nothing_else_may_come(compiler: GrammarCompiler, ids: Callable[[str], int]) -> None:
    x = ids("x")
    grammar = followed(compiler, Grammar("regex", "x{2,3}", EOS, ignore_eos=True))
    assert allowed(grammar, [x, x]) == [x]
    assert allowed(grammar, [x, x, x]) == [EOS]


def test_a_stop_token_with_a_text_of_its_own_comes_at_an_end_alone(
    compiler: GrammarCompiler, ids: Callable[[str], int]
) -> None:
    """Its text is not part of the output, so it ends the output before it."""
    x, y = ids("x"), ids("y")
    grammar = followed(compiler, Grammar("regex", "[xy]{2}", EOS), ends=(EOS, y))
    assert allowed(grammar, []) == allowed(grammar, [x]) == [x]
    assert allowed(grammar, [x, x]) == sorted([EOS, y])


def editor(**rules: Any) -> LogitsEditor:
    return LogitsEditor(LogitsRules(**rules), PROMPT, (EOS,))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_rules_hold_beside_a_grammar(
    compiler: GrammarCompiler, ids: Callable[[str], int], temperature: float
) -> None:
    x, y, z = map(ids, "xyz")

    def run(**rules: Any) -> list[int]:
        one, tokens, rule = followed(compiler, Grammar("regex", "[xyz]{1,9}", EOS)), list[int](), editor(**rules)
        while EOS not in tokens:
            drawn = draw(one, tokens, 7, temperature, rule)
            assert drawn == Sampled(drawn.token)
            tokens.append(drawn.token)
        return tokens

    assert len(run(min_tokens=6)) >= 7
    assert set(run(bad_words=((x,), (y,)), min_tokens=4)) == {z, EOS}
    assert len(run(min_tokens=50)) == 10  # the natural end comes first
    assert run(allowed_token_ids=(x, 900)) == [x] * 9 + [EOS]  # which lack the end
    assert run(logit_bias=((y, 100.0),), min_tokens=3)[:3] == [y] * 3


class FixedMask:
    ready, may_end, failure, ends, slow, forced = True, False, "", (), False, ()

    def __init__(self, allowed: Collection[int]) -> None:
        self.allowed = np.isin(np.arange(VOCAB), list(allowed))

    def begin(self) -> bool:
        return False

    def compute(self) -> None: ...


@examples(300)
@given(
    allowed=st.one_of(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=9), st.just(set(range(3, VOCAB)))),
    seed=st.integers(0, 999),
    ties=st.booleans(),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    filters=st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 500, "top_p": 0.99}]),
)
def test_a_masked_draw_is_one_among_the_tokens_that_are_left(
    allowed: set[int], seed: int, ties: bool, temperature: float, filters: dict[str, Any]
) -> None:
    """The same token as from a row of logits whose other tokens are minus infinity."""
    logits = some_logits(seed)
    if ties:
        logits = logits.round()
    draw = TokenDraw(temperature=temperature, seed=seed, **filters)
    left = torch.full_like(logits, -math.inf)
    left[0, sorted(allowed)] = logits[0, sorted(allowed)]
    right = HostSampler().sample(left, [draw], [7])
    masked = TokenDraw(temperature=temperature, seed=seed, mask=FixedMask(allowed), **filters)
    assert HostSampler().sample(logits, [masked], [7]) == right


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_no_token_are_told(
    compiler: GrammarCompiler, ids: Callable[[str], int], temperature: float
) -> None:
    grammar, x = followed(compiler, Grammar("regex", "x{3}", EOS)), ids("x")
    drawn = draw(grammar, [x], 1, temperature, editor(bad_words=((x,),)))
    assert not drawn.finite
    assert "leave no token" in drawn.failure


def test_an_output_that_does_not_match_is_told(compiler: GrammarCompiler, ids: Callable[[str], int]) -> None:
    a = ids("a")
    for grammar, output in (
        (followed(compiler, Grammar("regex", "b{3}", EOS), [a]), [a]),  # known when it began
        (followed(compiler, Grammar("regex", "b{3}", EOS)), [a]),
        (followed(compiler, Grammar("regex", "b{3}", EOS), [a] * 200), [a] * 200),
    ):
        drawn = draw(grammar, output, 1, 1.0)
        assert not drawn.finite
        assert "match" in drawn.failure or "regular expression" in drawn.failure


def test_logits_that_are_not_finite_are_not_the_grammars_fault(compiler: GrammarCompiler) -> None:
    mask = followed(compiler, Grammar("regex", "a", EOS)).mask(PROMPT)
    mask.compute()
    for value in (math.nan, math.inf, -math.inf):
        logits = torch.full((1, VOCAB), value)
        (drawn,) = HostSampler().sample(logits, [TokenDraw(temperature=0, mask=mask)], [1])
        assert (drawn.finite, drawn.failure) == (False, "")


def test_a_checkpoint_without_a_tokenizer_fails_the_request(tmp_path: Path) -> None:
    woken = threading.Event()
    compiler = GrammarCompiler(tmp_path, VOCAB, woken.set)
    grammar = followed(compiler, Grammar("regex", "a", EOS))
    assert woken.wait(10)
    mask = grammar.mask(PROMPT)
    mask.compute()
    assert "tokenizer.json" in mask.failure
    compiler.close()


def test_masks_are_computed_once_on_several_threads(compiler: GrammarCompiler) -> None:
    threads = MaskThreads()
    masks = [followed(compiler, random_grammar(number)).mask(PROMPT) for number in range(12)]
    for _ in range(2):
        threads.wait(threads.start(masks))
    eventually(lambda: all(mask.ready for mask in masks), "the masks")
    eventually(lambda: idle(threads, masks), "nothing under way")
    assert all(mask.failure == "" and mask.allowed is not None and mask.allowed.any() for mask in masks)


def idle(threads: MaskThreads, masks: Sequence[TokenMask]) -> bool:
    under_way = threads.start(masks)
    return not under_way.quick and not under_way.slow


class Hung:
    """A mask that is late until `release`."""

    ready, allowed, may_end, failure, ends, forced = False, None, False, "late", (), ()

    def __init__(self, *, slow: bool = False) -> None:
        self.slow = slow
        self.begun = False
        self.release = threading.Event()

    def begin(self) -> bool:
        begun, self.begun = self.begun, True
        return not begun

    def compute(self) -> None:
        self.release.wait(30)
        self.ready = True


def test_a_late_mask_delays_no_other_row(engine: Callable[..., Engine]) -> None:
    one = engine("llama")
    hung = Hung()
    late = Running(prompt_of(5), [0], TokenDraw(temperature=0, mask=hung))
    other = Running(prompt_of(5), [1])
    try:
        drawn = one.step([late.chunk(9), other.chunk(9)])
        assert drawn[0] is None
        assert drawn[1] == one.step([other.chunk(9)])[0]
    finally:
        hung.release.set()


def test_nothing_waits_for_a_slow_mask_but_what_waits_for_nothing_else(compiler: GrammarCompiler) -> None:
    threads, hung, waiting = MaskThreads(), Hung(slow=True), Hung(slow=True)
    try:
        quick = followed(compiler, Grammar("regex", "a", EOS)).mask(PROMPT)
        under_way = threads.start([hung, quick, waiting])
        assert len(under_way.quick) == len(under_way.slow) == 1  # slow ones wait for each other
        eventually(lambda: quick.ready, "the quick one")
        again = threads.start([hung, waiting])
        assert (list(again.quick), list(again.slow)) == ([], list(under_way.slow))
    finally:
        hung.release.set()
        waiting.release.set()
    threads.wait(again)
    eventually(lambda: idle(threads, [hung, waiting]), "those that were slow")
    assert waiting.ready


def test_a_step_that_has_another_behind_it_does_not_wait_for_slow_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, hung, awaited = MaskThreads(), Hung(slow=True), []
    monkeypatch.setattr(mask_threads, "wait", lambda futures, seconds: awaited.append(futures) or wait(futures, 0))
    try:
        under_way = threads.start([hung])
        threads.wait(under_way, slow=False)
        assert awaited == []
        threads.wait(under_way)
        assert [len(futures) for futures in awaited] == [1]
    finally:
        hung.release.set()


def test_200_random_grammars(
    engine: Callable[..., Engine], compiler: GrammarCompiler, text_of: Callable[[Sequence[int]], str]
) -> None:
    """Every finished answer matches, by the word of libraries that have nothing to do with llguidance."""
    one, count, batch = engine("llama"), 200, 8
    finished = 0
    for first in range(0, count, batch):
        grammars = [random_grammar(number) for number in range(first, min(first + batch, count))]
        answers = answered(one, compiler, grammars, first)
        for grammar, tokens in zip(grammars, answers, strict=True):
            if tokens[-1] == EOS:
                finished += 1
                assert_matches(grammar, text_of(tokens))
    assert finished > 0.75 * count, f"{finished} of {count} answers came to an end"


def answered(one: Engine, compiler: GrammarCompiler, grammars: Sequence[Grammar], seed: int) -> list[list[int]]:
    """The outputs of one batch, greedy and warm ones side by side."""
    prompt, pages = prompt_of(6, seed), len(one.pool) // len(grammars)
    most = min(pages * 16 - len(prompt), 250)
    rows = [Running(list(prompt), range(row * pages, (row + 1) * pages)) for row in range(len(grammars))]
    follow = [compiler.follow(grammar, (EOS,), prompt, len(prompt)) for grammar in grammars]
    eventually(lambda: all(each.ready for each in follow), "all are compiled")
    while running := [row for row in range(len(rows)) if not ended(rows[row], most)]:
        for row in running:
            mask = follow[row].mask(rows[row].tokens)
            rows[row].draw = TokenDraw(temperature=row % 2, seed=seed + row, mask=mask)
        chunks = [rows[row].chunk(99) for row in running]
        for row, chunk, drawn in zip(running, chunks, one.step(chunks), strict=True):
            if drawn is not None:  # else its mask was late, and the row is computed again
                assert drawn.failure == "", grammars[row]
                rows[row].take(chunk, drawn)
    return [row.tokens[len(prompt) :] for row in rows]


def ended(row: Running, most: int) -> bool:
    return len(row.drawn) >= most or (bool(row.drawn) and row.drawn[-1].token == EOS)


@pytest.mark.parametrize(("tokenizer", "eos"), [(byte_level(), 1), (byte_fallback(), 2)], ids=["bytes", "fallback"])
def test_what_clients_read_matches_with_every_kind_of_tokenizer(tmp_path: Path, tokenizer: Tokenizer, eos: int) -> None:
    """The router's text of random tokens behind a prompt, for the two kinds of tokenizers that models have."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, tokenizer.get_vocab_size(), lambda: None)
    prompt, finished = tokenizer.encode("hello world", add_special_tokens=False).ids, 0
    for number in range(40):
        grammar, rng, tokens = replace(random_grammar(number), eos=eos), random.Random(number), list[int]()
        one = compiler.follow(grammar, (eos,), prompt, len(prompt))
        eventually(lambda one=one: one.ready)
        while len(tokens) < 200 and eos not in tokens:
            mask = one.mask([*prompt, *tokens])
            mask.compute()
            assert mask.allowed is not None, mask.failure
            tokens.append(int(rng.choice(np.flatnonzero(mask.allowed))))
        if tokens[-1] == eos:
            finished += 1
            text = TextStream(Text(tokenizer), prompt, (), frozenset({eos}), DEFAULT_TEXT)
            assert_matches(grammar, "".join(text.feed([token]).text for token in tokens) + text.flush().text)
    compiler.close()
    assert finished > 20


def test_the_text_of_a_choice_is_one_of_them(
    compiler: GrammarCompiler, text_of: Callable[[Sequence[int]], str]
) -> None:
    choices = ['a "quoted" one', "back\\slash", "line\nbreak", "日本語", "🙂", "plain"]
    lark = "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
    texts = {text_of(generated(followed(compiler, Grammar("lark", lark, EOS)), seed, 1.0)) for seed in range(40)}
    assert texts <= set(choices)
    assert len(texts) > 3
