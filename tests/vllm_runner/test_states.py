"""Models with recurrent states: the state at the end of a page is a page, and only the last one moves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from baton.checkpoint_files import read_object
from baton.client import Generated
from baton.config import Config
from deploy.local import LocalCluster
from engine.step.batch import Chunk
from engine.vllm_runner.runner import VllmRunner
from kvstore.window_groups import WindowGroups
from tests.support import checkpoints, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric
from tests.vllm_runner import driver
from tests.vllm_runner.driver import Generation, agree, likely, prompt_of

PAGE = 64  # tokens whose K and V take no less than a state, where layers keep any
STATES = 3  # groups of layers beside the main one, which has attention, or states as all have in Mamba 2
EXACT = ("granite4", "mamba2")
LIKELIEST = {"qwen3-next": "bfloat16"}
"""What vLLM's kernels for CPUs don't compute in float32."""
NEAR, SHARE = 0.4, 0.85
"""Logits have a deviation of 1.1. In bfloat16, transformers' own were off by 0.03, and at most by 0.26."""
PROMPTS = [prompt for prompt in workload.prompts(PAGE) if len(prompt) <= 700][::4]
LONG = 100  # tokens
SETTINGS = {
    "model.engine": "vllm",
    "pages.page_size": PAGE,
    "model.max_model_len": 1024,  # what it is where a config says nothing, as that of Mamba 2, is up to vLLM
    "router.queue_timeout_ms": 300_000,
    "router.attempt_timeout_ms": 300_000,
}


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


def settings_of(path: Path, *shape: int, **more: object) -> Config:
    return workload.settings(path, *shape, **{**SETTINGS, "model.dtype": dtype_of(path), **more})


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


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_greedy_tokens_are_those_of_transformers(eager: bool, path: Path) -> None:
    """Chunks of random sizes in steps of random members, also one launched before the other has ended."""
    model = driver.load(path, dtype_of(path), eager=eager, page_size=PAGE, pages=40)
    reference = checkpoints.reference(path)
    try:
        assert model.groups == WindowGroups(STATES, 2, PAGE, states=True)
        lengths = (170, 2 * PAGE, 5)
        for run in (driver.run, driver.run_ahead):
            sequences = [Paged(model, prompt_of(n, n), range(8 * i, 8 * i + 8)) for i, n in enumerate(lengths)]
            run(model, sequences, 70)
            if model.layout.dtype == "bfloat16":
                likely(reference, [(one.tokens[:-70], one.tokens[-70:]) for one in sequences], NEAR, SHARE)
                continue
            for length, one in zip(lengths, sequences, strict=True):
                agree(one, *reference.generate(prompt_of(length, length), 70))
    finally:
        model.close()


@pytest.mark.parametrize("shape", [(1, 1), (0, 1)], ids=["1P+1D", "colocated"])
def test_requests_at_once_get_the_reference_tokens(shape: tuple[int, int], path: Path, tmp_path: Path) -> None:
    own = {"router.disaggregation": "always" if shape[0] else "auto"}
    with LocalCluster(settings_of(path, *shape, **own), tmp_path, patience=200.0) as running:
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


@pytest.mark.parametrize(("victim", "shape"), [("prefill-0", (2, 1)), ("decode-0", (1, 2))])
def test_streams_outlive_the_death_of_a_worker(victim: str, shape: tuple[int, int], path: Path, tmp_path: Path) -> None:
    """Outputs go beyond the ends of pages, behind which another decode worker can go on."""
    with (
        LocalCluster(settings_of(path, *shape), tmp_path, patience=200.0) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        answers = pool.submit(workload.ask_all, running.address, PROMPTS, LONG)
        name = {"p": "prompt_tokens_computed_total", "d": "generation_tokens_total"}[victim[0]]
        eventually(lambda: metric(running, victim, name) > 0, what="the victim at work")
        os.kill(running.pids[victim], signal.SIGKILL)
        compare(path, PROMPTS, (done := answers.result(timeout=300)), LONG)
        assert any(one.work.attempts > 1 for one in done)
