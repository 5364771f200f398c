"""vLLM's model runner against transformers and against our own engine. Needs an environment with vLLM."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from baton.errors import DeviceLost, UnsupportedModel
from baton.messages import Grammar
from engine.engine import Engine
from engine.sampling.grammars import GrammarCompiler
from engine.step.batch import Chunk, ComputedMask, LogitsEdits, PromptScoring, TokenDraw
from engine.step.block_table import BlockTable
from engine.vllm_runner.runner import VllmRunner
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopyOut
from tests.support import checkpoints
from tests.support.eventually import eventually
from tests.vllm_runner import driver
from tests.vllm_runner.driver import GREEDY, PAGE, PAGES, Generation, Loaded, agree, load, prompt_of, run, step
from worker.calibration import calibrate


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints whose heads vLLM's kernels take."""
    return cache(lambda name: checkpoints.make(name, tmp_path_factory.mktemp(name), hidden_size=128, head_dim=32))


@pytest.fixture(scope="module")
def runner(paths: Callable[[str], Path]) -> Iterator[Loaded]:
    """`runner(name)`: the model of that checkpoint; "a prefill" has a second one of its own behind a slash."""
    yield from driver.loaded_once(lambda name: load(paths(name.split("/")[0])))


EXACT = (
    "llama", "qwen2", "qwen3", "mistral", "mistral-window", "phi3", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3-moe",
    "gpt-oss", "glm4-moe",
)  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_greedy_tokens_are_those_of_transformers(name: str, paths: Callable[[str], Path], runner: Loaded):
    driver.exact(runner(name), paths(name), (70, 33, 5, 31, 64), 24)


def test_soft_caps_of_scores_and_logits_are_those_of_transformers(paths: Callable[[str], Path], runner: Loaded):
    """A greedy token alone would not show the cap of logits, which keeps their order."""
    reference = checkpoints.reference(paths("gemma2"))
    one = Generation(prompt_of(50, 1), range(8), TokenDraw(temperature=0.0, logprobs=3))
    run(runner("gemma2"), [one], 12)
    expected = reference.logits(one.tokens)[49:-1].log_softmax(dim=-1)
    for sampled, right in zip(one.drawn, expected, strict=True):
        for token, logprob in sampled.top:
            assert logprob == pytest.approx(float(right[token]), abs=1e-3)


def test_scores_beyond_88_caps_are_right_or_said_to_be_not_finite(tmp_path: Path):
    """vLLM's kernel for AVX-512 makes NaN of them, that for AVX2 does not. A worker fails such a request."""
    path = checkpoints.make("gemma2", tmp_path, hidden_size=128, head_dim=32, query_pre_attn_scalar=24)
    model = load(path)
    one = Generation(prompt_of(50, 1), range(8))
    run(model, [one], 1)
    model.close()
    expected, gaps = checkpoints.reference(path).generate(prompt_of(50, 1), 1)
    if one.drawn[0].finite:
        agree(one, expected, gaps)


def native(path: Path) -> Engine:
    return Engine.load(path, "float32", "cpu", PAGES, PAGE, True, 1)


def test_draws_rules_and_log_probabilities_are_those_of_our_own_engine(paths: Callable[[str], Path], runner: Loaded):
    ours, theirs = native(paths("llama")), runner("llama")
    edits = LogitsEdits(
        forbidden=np.array([5, 6], np.int64),
        bias=(np.array([7], np.int64), np.array([3.0], np.float32)),
        repeated=np.array([8, 9], np.int64),
        repetition=1.3,
    )
    draws = [
        TokenDraw(temperature=0.9, top_p=0.95, seed=77, logprobs=3),
        TokenDraw(temperature=1.3, top_k=40, seed=5, index=1, edits=edits),
        TokenDraw(temperature=1.0, seed=2**63),
        TokenDraw(temperature=0.0, logprobs=0),
    ]
    sequences = [Generation(prompt_of(40, i), range(8 * i, 8 * i + 8), draw) for i, draw in enumerate(draws)]
    run(theirs, sequences, 20)
    for one in sequences:
        prompt = one.tokens[: len(one.tokens) - len(one.drawn)]
        for number, sampled in enumerate(one.drawn):
            tokens = one.tokens[: len(prompt) + number]
            (expected,) = ours.step([Chunk(tokens, 0, range(8), one.draw)])
            assert sampled.token == expected.token
            assert (sampled.logprob is None) == (expected.logprob is None)
            if expected.logprob is not None:
                assert sampled.logprob == pytest.approx(expected.logprob, abs=1e-3)
                assert [token for token, _ in sampled.top] == [token for token, _ in expected.top]


def test_rows_follow_their_grammars_beside_rows_without_one(paths: Callable[[str], Path], runner: Loaded):
    """A mask that is late leaves its row without a token, and the row comes again."""
    ours, theirs = native(paths("llama")), runner("llama")
    grammar = Grammar("regex", "[a-f ]{200,210}", checkpoints.EOS, ignore_eos=True)
    draws = [GREEDY, TokenDraw(temperature=1.0, seed=5, logprobs=2), TokenDraw(temperature=1.2, top_k=20, seed=9)]
    rows = [Generation(prompt_of(30 + i, i), range(8 * i, 8 * i + 8), draws[i % 3]) for i in range(6)]
    with closing(GrammarCompiler(paths("llama"), checkpoints.VOCAB, lambda: None)) as compiler:
        followed = [compiler.follow(grammar, (checkpoints.EOS,), one.tokens, len(one.tokens)) for one in rows[::2]]
        eventually(lambda: all(one.ready for one in followed), what="the grammars")
        for number in range(15):
            chunks = [one.chunk() for one in rows]
            for at, one in enumerate(followed):
                (mask := one.mask(rows[2 * at].tokens)).compute()
                late = ComputedMask(None, ready=False)
                draw = msgspec.structs.replace(rows[2 * at].draw, mask=late if number % 4 == at else mask)
                chunks[2 * at] = msgspec.structs.replace(chunks[2 * at], sample=draw)
            for at, (one, chunk, drawn) in enumerate(zip(rows, chunks, step(theirs, *chunks).sampled, strict=True)):
                assert (drawn is None) == (at % 2 == 0 and number % 4 == at // 2)
                if drawn is not None:
                    (expected,) = ours.step([Chunk(one.tokens, 0, range(8), chunk.sample)])
                    assert (drawn.token, drawn.finite) == (expected.token, True)
                    one.take(chunk, drawn)


def test_prompt_tokens_are_scored(paths: Callable[[str], Path], runner: Loaded):
    ours, theirs = native(paths("llama")), runner("llama")
    prompt = prompt_of(50, 1)
    chunk = Chunk(prompt, 0, range(2), GREEDY, PromptScoring(10, prompt[11:], 2))
    other = Chunk(prompt_of(20, 2), 0, range(4, 6), GREEDY)
    expected, output = ours.run([chunk]), step(theirs, other, chunk)
    assert list(output.scores) == [1]
    for mine, right in zip(output.scores[1], expected.scores[0], strict=True):
        assert (mine.token, mine.rank) == (right.token, right.rank)
        assert mine.logprob == pytest.approx(right.logprob, abs=1e-3)
    assert output.sampled[1] == expected.sampled[0]


@pytest.fixture
def arena(runner: Loaded) -> Iterator[Arena]:
    yield from driver.arena_of(runner("llama"))


def test_a_prompt_is_handed_over(paths: Callable[[str], Path], runner: Loaded, arena: Arena):
    """One child computes the prompt's pages, another goes on from them."""
    driver.hand_over(runner("llama/prefill"), runner("llama"), arena, paths("llama"))


def test_pages_have_the_form_that_their_layout_names(paths: Callable[[str], Path], runner: Loaded, arena: Arena):
    """The numbers of our own engine up to rounding: of each head and layer K transposed, and then V."""
    ours, theirs = native(paths("llama")), runner("llama")
    if theirs.layout.form != "cpu-vec":
        pytest.skip(f"the kernels here pack K and V as {theirs.layout.form}")
    prompt = prompt_of(PAGE, 4)
    ours.step([Chunk(prompt, 0, [1])])
    step(theirs, Chunk(prompt, 0, [40]))
    mover = theirs.mover(verify=False)
    mover.attach(arena)
    mover.start([CopyOut(1, 0, 40, 2)]).wait()
    page = torch.frombuffer(arena.slot(2), dtype=torch.float32).view(theirs.layout.shape)
    heads, layers, _, size, dim = ours.layout.shape
    keys, values = page.view(heads, layers, 2, size * dim).unbind(2)
    unpacked = torch.stack([keys.view(heads, layers, dim, size).transpose(2, 3), values.view(heads, layers, size, dim)])
    torch.testing.assert_close(unpacked, ours.pool[1].transpose(0, 2).transpose(1, 2), atol=1e-4, rtol=1e-4)


def test_a_sequence_moves_is_put_aside_and_computed_again(paths: Callable[[str], Path], runner: Loaded):
    model = runner("llama")
    expected, _ = checkpoints.reference(paths("llama")).generate(prompt_of(60, 6), 30)
    one = Generation(prompt_of(60, 6), range(10))
    run(model, [one], 8)
    other = Generation(prompt_of(40, 7), range(40, 50))
    run(model, [other], 5)  # meanwhile it has no step
    run(model, [one], 12)
    model.duplicate(one.table[0], 30)
    one.table.exchange(0, 30)
    run(model, [one], 16)
    one.table = BlockTable(range(50, 56))  # elsewhere, from the start
    one.computed = 0
    run(model, [one], 30)
    assert one.output == expected


def test_steps_ahead_draw_the_tokens_of_steps_that_waited(paths: Callable[[str], Path], runner: Loaded):
    model, warm = runner("llama"), TokenDraw(temperature=0.9, top_p=0.95, seed=77)

    def members() -> list[Generation]:
        draws = [GREEDY, warm, GREEDY, warm, GREEDY]
        return [Generation(prompt_of(n, n), range(8 * n, 8 * n + 6), draw) for n, draw in enumerate(draws, 2)]

    waited, ahead = members(), members()
    run(model, waited, 40)
    assert driver.run_ahead(model, ahead, 40) > 60
    for one, other in zip(waited, ahead, strict=True):
        assert one.output == other.output


def test_a_step_ahead_of_a_sequence_whose_page_is_exchanged(paths: Callable[[str], Path], runner: Loaded):
    """To vLLM it is a new one then, and its last token is known to the child alone."""
    model = runner("llama")
    one = Generation(prompt_of(40, 9), range(6))
    run(model, [one], 3)
    first = one.chunk()
    running = model.launch([first])
    model.duplicate(one.table[0], 30)
    one.table.exchange(0, 30)
    ahead = one.follow(0)
    after = model.launch([ahead])
    one.take(first, *running.wait().sampled)
    one.take(ahead, *after.wait().sampled)
    driver.run_ahead(model, [one], 20)
    expected, _ = checkpoints.reference(paths("llama")).generate(prompt_of(40, 9), 20)
    assert one.output == expected


def test_a_chunk_that_follows_one_without_a_token_draws_none_and_others_go_on(
    paths: Callable[[str], Path], runner: Loaded
):
    model = runner("llama")
    one, other = Generation(prompt_of(20, 4), range(6)), Generation(prompt_of(30, 5), range(8, 14))
    silent, drawing = one.chunk(10), other.chunk()
    first = model.launch([silent, drawing])
    ahead = [one.follow(0), other.follow(1)]
    second = model.launch(ahead)
    third = model.launch([one.follow(0)])
    for sequence, chunk, sampled in zip((one, other), (silent, drawing), first.wait().sampled, strict=True):
        sequence.take(chunk, sampled)
    none, token = second.wait().sampled
    assert none is None
    other.take(ahead[1], token)
    assert third.wait().sampled == [None]
    run(model, [one, other], 12)
    for sequence, (length, seed) in ((one, (20, 4)), (other, (30, 5))):
        expected, _ = checkpoints.reference(paths("llama")).generate(prompt_of(length, seed), 12)
        assert sequence.output == expected


def test_a_pool_that_is_smaller_than_the_context(paths: Callable[[str], Path]):
    """The context is the model's, and no token is drawn that has no page."""
    pages = 3
    context = json.loads((paths("llama") / "config.json").read_text())["max_position_embeddings"]
    model = load(paths("llama"), pages=pages)
    assert model.max_positions == context > pages * PAGE
    one = Generation(prompt_of(pages * PAGE - 2, 1), range(pages))
    run(model, [one], 2)
    with pytest.raises(ValueError, match=f"needs a position below {pages * PAGE}"):
        step(model, one.chunk())
    calibrate(lambda one: model.launch(one).wait().seconds, time.monotonic, PAGE, pages, context, decodes=True)
    model.close()
    agree(one, *checkpoints.reference(paths("llama")).generate(prompt_of(pages * PAGE - 2, 1), 2))


def test_what_it_can_not_run_is_refused_and_touches_nothing(paths: Callable[[str], Path], runner: Loaded):
    model = runner("llama")
    one = Generation(prompt_of(40, 8), range(8))
    run(model, [one], 4)
    for bad in (
        Chunk([1, 2], 0, [PAGES], GREEDY),
        Chunk([1, 2], 0, [-1], GREEDY),
        Chunk([checkpoints.VOCAB], 0, [9], GREEDY),
        Chunk([1] * 40, 0, [9], GREEDY),
        Chunk([], 0, [9], GREEDY),
    ):
        with pytest.raises(ValueError, match=r"page|token"):
            step(model, bad)
    run(model, [one], 10)
    expected, _ = checkpoints.reference(paths("llama")).generate(prompt_of(40, 8), 10)
    assert one.output == expected


def test_a_page_size_that_the_kernels_do_not_take(paths: Callable[[str], Path]):
    with pytest.raises(UnsupportedModel, match=r"page|block"):
        VllmRunner.load(paths("llama"), "float32", PAGES, 16, max_rows=4, max_tokens=64, threads=1, eager=True)


def test_a_killed_child_is_a_lost_device(paths: Callable[[str], Path]):
    model = load(paths("llama"))
    rung: list[bool] = []
    model.wake(lambda: rung.append(True))
    step(model, Chunk(prompt_of(9, 1), 0, [1], GREEDY))
    os.kill(model.process_id, signal.SIGKILL)

    def until_it_is_gone() -> None:
        for _ in range(1000):
            step(model, Chunk(prompt_of(9, 1), 0, [1], GREEDY))

    with pytest.raises(DeviceLost, match="vLLM"):
        until_it_is_gone()
    assert rung
    with pytest.raises(DeviceLost):
        model.mover(verify=False).start([CopyOut(1, 0, 1, 1)])
    model.close()


def test_a_compiled_model_has_the_tokens_of_transformers(paths: Callable[[str], Path]):
    with closing(load(paths("llama"), eager=False)) as model:
        driver.exact(model, paths("llama"), (70, 5))
