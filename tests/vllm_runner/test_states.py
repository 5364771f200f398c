"""Models with recurrent states: the state at the end of a page is a page, and only the last one moves."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from msgspec import structs

pytest.importorskip("vllm")

from baton.checkpoint_files import read_object
from baton.client import Generated
from baton.config import Config
from baton.messages import Grammar
from deploy.local import LocalCluster
from engine.sampling.grammars import GrammarCompiler
from engine.sampling.host_sampler import HostSampler
from engine.step.batch import Chunk, ComputedMask, Sampled, TokenDraw
from engine.vllm_runner.runner import VllmRunner
from kvstore.window_groups import WindowGroups
from tests.support import adapters, checkpoints, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric
from tests.vllm_runner import driver
from tests.vllm_runner.driver import Generation, agree, likely, prompt_of, texts

PAGE = 64  # tokens whose K and V take no less than a state, where layers keep any
STATES = 3  # groups of layers beside the main one, which has attention, or states as all have in Mamba 2
EXACT = ("granite4", "mamba2")
LIKELIEST = {"qwen3-next": "bfloat16"}
"""What vLLM's kernels for CPUs don't compute in float32."""
NEAR, SHARE = 0.4, 0.85
"""Logits have a deviation of 1.1. In bfloat16, transformers' own were off by 0.03, and at most by 0.26."""
PROMPTS = [prompt for prompt in workload.prompts(PAGE) if len(prompt) <= 700][::4]
LONG = 100  # tokens
LETTERS = Grammar("regex", "[a-f ]{200,210}", checkpoints.EOS, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        dtype = getattr(torch, LIKELIEST.get(name, "float32"))
        return checkpoints.make(name, tmp_path_factory.mktemp(name), dtype=dtype)

    return cache(make)


@pytest.fixture(params=[*EXACT, *LIKELIEST])
def path(request: pytest.FixtureRequest, paths: Callable[[str], Path]) -> Path:
    return paths(request.param)


def dtype_of(path: Path) -> str:
    return read_object(path / "config.json")["dtype"]


def settings_of(path: Path, prefill: int = 1, decode: int = 1, **more: object) -> Config:
    # What the length is where a config says nothing, as that of Mamba 2, is up to vLLM.
    own = {"model.max_model_len": 1024, "model.dtype": dtype_of(path)}
    return driver.settings(path, prefill, decode, PAGE, **(own | more))


def compare(path: Path, prompts: Sequence[list[int]], answers: Sequence[Generated], count: int) -> None:
    if dtype_of(path) == "float32":
        workload.compare(path, prompts, answers, workload.references(path, prompts, count))
        return
    assert {len(answer.token_ids) for answer in answers} == {count}
    texts = [(prompt, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    likely(checkpoints.reference(path), texts, NEAR, SHARE)


class Paged(Generation):
    """No chunk of it goes beyond a page."""

    def __init__(self, model: VllmRunner, *arguments: object) -> None:
        super().__init__(*arguments, page_size=PAGE)  # type: ignore[arg-type]
        self._groups = model.groups

    def chunk(self, size: int = driver.TOKENS) -> Chunk:
        return super().chunk(self._groups.longest_chunk(self.computed, size))


class Masked(Paged):
    """Its draws have masks, of which some are late: the token before such a draw comes again."""

    late = 0

    def chunk(self, size: int = driver.TOKENS) -> Chunk:
        chunk = super().chunk(size)
        if chunk.sample is None:
            return chunk
        late = (len(self.tokens) + self.late) % 3 == 0
        mask = ComputedMask(None if late else np.ones(checkpoints.VOCAB, np.bool_), ready=not late)
        return structs.replace(chunk, sample=structs.replace(chunk.sample, mask=mask))

    def take(self, chunk: Chunk, sampled: Sampled | None) -> None:
        if chunk.sample is None or sampled is not None:
            super().take(chunk, sampled)
        else:
            self.computed, self.late = chunk.end - 1, self.late + 1


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_greedy_tokens_are_those_of_transformers(eager: bool, path: Path) -> None:
    """Chunks of random sizes in steps of random members, also one launched before the other has ended, and with masks
    of which every third is late."""
    reference = checkpoints.reference(path)
    with closing(driver.load(path, dtype_of(path), eager=eager, page_size=PAGE, pages=40)) as model:
        assert model.groups == WindowGroups(STATES, 2, PAGE, states=True)
        lengths = (170, 2 * PAGE, 5)
        for run, kind in ((driver.run, Paged), (driver.run_ahead, Paged), (driver.run, Masked)):
            sequences = [kind(model, prompt_of(n, n), range(8 * i, 8 * i + 8)) for i, n in enumerate(lengths)]
            run(model, sequences, 70)
            assert kind is Paged or all(one.late > 30 for one in sequences)
            if model.layout.dtype == "bfloat16":
                likely(reference, texts(sequences), NEAR, SHARE)
                continue
            for length, one in zip(lengths, sequences, strict=True):
                agree(one, *reference.generate(prompt_of(length, length), 70))


@pytest.mark.parametrize("name", [*EXACT, *LIKELIEST])
def test_ranks_share_states(name: str, tmp_path: Path) -> None:
    """Each has as many heads of a state, and draws the tokens of transformers."""
    dtype = LIKELIEST.get(name, "float32")
    more = {"linear_num_key_heads": 2} if name in LIKELIEST else {}
    path = checkpoints.make(name, tmp_path, dtype=getattr(torch, dtype), **more)
    reference = checkpoints.reference(path)
    with closing(driver.load(path, dtype, ranks=2, page_size=PAGE, pages=40)) as model:
        assert model.layout.num_kv_heads % 2 == 0
        for kind in (Paged, Masked):
            one = kind(model, prompt_of(170, 170), range(8))
            driver.run(model, [one], 70)
            if dtype == "bfloat16":
                likely(reference, texts([one]), NEAR, SHARE)
            else:
                agree(one, *reference.generate(prompt_of(170, 170), 70))


def test_rows_have_their_adapters_beside_states(paths: Callable[[str], Path], tmp_path: Path) -> None:
    """A row with an adapter of attention's products, beside a plain one."""
    path = paths("granite4")
    adapter = adapters.make(tmp_path, path, 7)
    loras = {"lora_modules": {"one": str(adapter)}, "max_lora_rank": 8}
    with closing(driver.load(path, page_size=PAGE, pages=40, **loras)) as model:
        sequences = [Paged(model, prompt_of(170, 1), range(8 * at, 8 * at + 8)) for at in range(2)]
        sequences[1].adapter = model.adapters[0].digest
        driver.run(model, sequences, 40)
        for reference, one in zip(
            (checkpoints.reference(path), adapters.merged(path, adapter)), sequences, strict=True
        ):
            agree(one, *reference.generate(prompt_of(170, 1), 40))
        assert sequences[0].tokens != sequences[1].tokens


@pytest.mark.parametrize(
    ("shape", "ranks"), [((1, 1), 1), ((0, 1), 1), ((1, 1), 2)], ids=["1P+1D", "colocated", "1P+1D of 2 ranks"]
)
def test_requests_at_once_get_the_reference_tokens(
    shape: tuple[int, int], ranks: int, path: Path, tmp_path: Path
) -> None:
    if ranks > 1 and dtype_of(path) == "bfloat16":
        pytest.skip("its keys have one head")
    config = settings_of(path, *shape, **{"model.tensor_parallel_size": ranks})
    with LocalCluster(config, tmp_path, patience=200.0) as running:
        answers = workload.ask_all(running.address, PROMPTS)
        compare(path, PROMPTS, answers, workload.OUTPUT)
        assert not shape[0] or any(answer.work.pages_fetched for answer in answers)


@pytest.mark.technique("Snapshots of recurrent states")
def test_a_hand_off_has_one_state(path: Path, tmp_path: Path) -> None:
    """The store also has that behind the last full page, and from there a second turn goes on."""
    prompt, length = prompt_of(600, 1), 599
    pages = -(-length // PAGE)
    with LocalCluster(settings_of(path), tmp_path, patience=200.0) as running:
        answer = workload.ask(running.address, prompt)
        compare(path, [prompt], [answer], workload.OUTPUT)
        assert metric(running, "prefill-0", "pages_copied_total", direction="out") == pages + 2 * STATES
        assert metric(running, "decode-0", "pages_copied_total", direction="in") == pages + STATES
        longer = [*prompt, *answer.token_ids, *prompt_of(30, 2)]
        again = workload.ask(running.address, longer)
        compare(path, [longer], [again], workload.OUTPUT)
        assert again.work.tokens_computed < 2 * PAGE


def test_streams_outlive_the_death_of_a_rank(paths: Callable[[str], Path], tmp_path: Path) -> None:
    """Its worker ends, and the other one goes on with the states of both ranks' heads from the store."""
    path = paths("granite4")
    with (
        LocalCluster(settings_of(path, 1, 2, **{"model.tensor_parallel_size": 2}), tmp_path, patience=200.0) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        (vllm,) = psutil.Process(running.pids["decode-0"]).children()
        victim = [each for each in vllm.children() if each.name() != "python_resource_tracker"][-1]
        answers = pool.submit(workload.ask_all, running.address, PROMPTS, LONG)
        eventually(lambda: metric(running, "decode-0", "generation_tokens_total") > 0, what="the victim at work")
        victim.kill()
        compare(path, PROMPTS, (done := answers.result(timeout=300)), LONG)
        assert any(one.work.attempts > 1 for one in done)


@pytest.mark.parametrize(("role", "shape"), [("prefill", (2, 1)), ("decode", (1, 2))])
def test_streams_outlive_the_death_of_a_worker(role: str, shape: tuple[int, int], path: Path, tmp_path: Path) -> None:
    """Outputs go beyond the ends of pages, behind which another decode worker can go on."""
    prompts, workers = PROMPTS * 3, (f"{role}-0", f"{role}-1")
    with (
        LocalCluster(settings_of(path, *shape), tmp_path, patience=200.0) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        answers = pool.submit(workload.ask_all, running.address, prompts, LONG)
        name = {"prefill": "prompt_tokens_computed_total", "decode": "generation_tokens_total"}[role]
        victim = eventually(lambda: next((each for each in workers if metric(running, each, name)), None), what="work")
        os.kill(running.pids[victim], signal.SIGKILL)
        compare(path, prompts, (done := answers.result(timeout=300)), LONG)
        assert any(one.work.attempts > 1 for one in done)


def test_outputs_follow_a_grammar_on_the_next_worker_too(paths: Callable[[str], Path], tmp_path: Path) -> None:
    """Tokens are those drawn one by one from transformers' logits, though the worker that began with them has died."""
    path, prompts = paths("granite4"), [prompt_of(length, length) for length in (40, 60, 150)]
    drawing = {"structured_output": {"regex": LETTERS.text}, "temperature": 1.0, "seed": 5}
    with (
        LocalCluster(settings_of(path, 1, 2), tmp_path, patience=200.0) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        answers = pool.submit(workload.ask_all, running.address, prompts, 40, **drawing)
        eventually(lambda: metric(running, "decode-0", "generation_tokens_total") > 0, what="the victim at work")
        os.kill(running.pids["decode-0"], signal.SIGKILL)
        done = answers.result(timeout=300)
    assert any(one.work.attempts > 1 for one in done)
    reference, compiler = checkpoints.reference(path), GrammarCompiler(path, checkpoints.VOCAB, lambda: None)
    try:
        for prompt, answer in zip(prompts, done, strict=True):
            assert re.fullmatch("[a-f ]{40,}", answer.text)
            tokens = list(prompt)
            grammar = compiler.follow(LETTERS, (checkpoints.EOS,), prompt, len(prompt))
            eventually(lambda grammar=grammar: grammar.ready, what="the grammar")
            for token in answer.token_ids:
                (mask := grammar.mask(tokens)).compute()
                draw = TokenDraw(temperature=1.0, seed=5, mask=mask)
                (right,) = HostSampler().sample(reference.logits(tokens)[-1:], [draw], [len(tokens)])
                assert token == right.token
                tokens.append(token)
    finally:
        compiler.close()
