"""Steps, draws and pages over vLLM's second model runner, its default on a GPU. Here Triton's interpreter runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw
from engine.vllm_runner.runner import VllmRunner
from tests.support import adapters, checkpoints
from tests.support.second_runner import second_runner
from tests.vllm_runner import driver
from tests.vllm_runner import test_runner as first
from tests.vllm_runner.driver import GREEDY, PAGE, PAGES, Generation, Loaded, agree, load, prompt_of, run, step
from tests.vllm_runner.test_runner import arena as arena  # fixtures, whose `runner` loads the second one here
from tests.vllm_runner.test_runner import paths as paths
from tests.vllm_runner.test_runner import runner as runner


@pytest.fixture(scope="module", autouse=True)
def _second_runner() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmRunner, "launch_child", staticmethod(second_runner))
        yield


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gemma3", "qwen3-moe", "gpt-oss"])
def test_greedy_tokens_are_those_of_transformers(name: str, paths: Callable[[str], Path], runner: Loaded):
    first.test_greedy_tokens_are_those_of_transformers(name, paths, runner)


test_draws = first.test_draws_rules_and_log_probabilities_are_those_of_our_own_engine
test_grammars = first.test_rows_follow_their_grammars_beside_rows_without_one
test_scores = first.test_prompt_tokens_are_scored
test_a_hand_over = first.test_a_prompt_is_handed_over
test_a_move = first.test_a_sequence_moves_is_put_aside_and_computed_again
test_steps_ahead = first.test_steps_ahead_draw_the_tokens_of_steps_that_waited
test_a_step_ahead_of_an_exchanged_page = first.test_a_step_ahead_of_a_sequence_whose_page_is_exchanged
test_a_chunk_that_follows_none = first.test_a_chunk_that_follows_one_without_a_token_draws_none_and_others_go_on
test_what_it_can_not_run = first.test_what_it_can_not_run_is_refused_and_touches_nothing


def test_a_corrected_draw_misleads_no_step_but_the_one_that_was_launched(runner: Loaded):
    model = runner("llama")

    def members() -> list[Generation]:
        draws = [TokenDraw(temperature=1.0, top_p=0.95, seed=seed) for seed in range(60, 66)]
        return [Generation(prompt_of(20 + n, n), range(8 * n, 8 * n + 4), draw) for n, draw in enumerate(draws)]

    ahead, waited = members(), members()
    driver.run_ahead(model, ahead, 20)
    assert any(one.misled for one in ahead)
    run(model, waited, 20)
    for one, other in zip(ahead, waited, strict=True):
        assert one.output == other.output


def test_a_corrected_draw_is_what_its_sequence_goes_on_with(paths: Callable[[str], Path], runner: Loaded):
    """Its next step waits here, so that it is told the token."""
    draws = [TokenDraw(temperature=1.0, top_p=0.95, seed=seed) for seed in range(70, 76)]
    tokens: list[list[int]] = []
    for model in (runner("llama"), Engine.load(paths("llama"), "float32", "cpu", PAGES, PAGE, True, 2)):
        members = [Generation(prompt_of(20 + n, n), range(8 * n, 8 * n + 4), draw) for n, draw in enumerate(draws)]
        while any(len(one.drawn) < 12 for one in members):
            chunks = [one.chunk() for one in members]
            for one, chunk, sampled in zip(members, chunks, model.launch(chunks).wait().sampled, strict=True):
                one.take(chunk, sampled)
        tokens.append([token for one in members for token in one.output])
    assert tokens[0] == tokens[1]


def test_adapters(tmp_path: Path):
    model = checkpoints.make("llama", tmp_path / "model", hidden_size=128, head_dim=32)
    modules = {"one": str(adapters.make(tmp_path / "adapter", model, 5))}
    runner = load(model, lora_modules=modules, max_lora_rank=8)
    plain, adapted = (
        Generation(prompt_of(45, 1), range(8)),
        Generation(prompt_of(45, 1), range(8, 16), GREEDY, runner.adapters[0].digest),
    )
    run(runner, [plain, adapted], 10)
    runner.close()
    for reference, one in (
        (checkpoints.reference(model), plain),
        (adapters.merged(model, Path(modules["one"])), adapted),
    ):
        agree(one, *reference.generate(prompt_of(45, 1), 10))
    assert plain.output != adapted.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_sequences_than_rows_take_turns(ranks: int, paths: Callable[[str], Path]):
    """This runner has one place for each row of a step, and would keep it for a sequence that waits."""
    rows = 3
    model = load(paths("llama"), ranks=ranks, rows=rows)
    prompts = [prompt_of(30 + 7 * number, number) for number in range(2 * rows + 1)]
    sequences = [Generation(prompt, range(8 * number, 8 * number + 8)) for number, prompt in enumerate(prompts)]
    passing = [Chunk(prompt_of(9, number), 0, [PAGES - 1]) for number in range(rows)]  # of one step alone
    step(model, *passing)
    for turn in range(3 * len(sequences)):
        members = [sequences[(turn + number) % len(sequences)] for number in range(rows)]
        run(model, members, max(len(one.drawn) for one in members) + 1, seed=turn)
    model.close()
    for prompt, one in zip(prompts, sequences, strict=True):
        agree(one, *checkpoints.reference(paths("llama")).generate(prompt, len(one.drawn)))
