"""Models with recurrent states: the state at the end of a page is a page, and only the last one moves."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from deploy.local import LocalCluster
from engine.step.batch import Chunk
from engine.vllm_runner.runner import VllmRunner
from kvstore.window_groups import WindowGroups
from tests.support import checkpoints, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric
from tests.vllm_runner import driver
from tests.vllm_runner.driver import Generation, agree, prompt_of

PAGE = 64  # tokens whose K and V take no less than a state
STATES = 3  # groups of layers that have one
EXACT = ("granite4",)
PROMPTS = [prompt for prompt in workload.prompts(PAGE) if len(prompt) <= 700][::4]
LONG = 100  # tokens
SETTINGS = {
    "model.engine": "vllm",
    "pages.page_size": PAGE,
    "router.queue_timeout_ms": 300_000,
    "router.attempt_timeout_ms": 300_000,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("granite4", tmp_path_factory.mktemp("granite4"))


class Paged(Generation):
    """No chunk of it goes beyond a page."""

    def __init__(self, model: VllmRunner, *arguments: object) -> None:
        super().__init__(*arguments, page_size=PAGE)  # type: ignore[arg-type]
        self._groups = model.groups

    def chunk(self, size: int = driver.TOKENS) -> Chunk:
        return super().chunk(self._groups.longest_chunk(self.computed, size))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_greedy_tokens_are_those_of_transformers(name: str, eager: bool, path: Path) -> None:
    """Chunks of random sizes in steps of random members, also one launched before the other has ended."""
    model = driver.load(path, eager=eager, page_size=PAGE, pages=40)
    try:
        assert model.groups == WindowGroups(STATES, 2, PAGE, states=True)
        lengths = (170, 2 * PAGE, 5)
        for run in (driver.run, driver.run_ahead):
            sequences = [Paged(model, prompt_of(n, n), range(8 * i, 8 * i + 8)) for i, n in enumerate(lengths)]
            run(model, sequences, 70)
            for length, one in zip(lengths, sequences, strict=True):
                agree(one, *checkpoints.reference(path).generate(prompt_of(length, length), 70))
    finally:
        model.close()


@pytest.mark.parametrize("shape", [(1, 1), (0, 1)], ids=["1P+1D", "colocated"])
def test_requests_at_once_get_the_reference_tokens(shape: tuple[int, int], path: Path, tmp_path: Path) -> None:
    own = {**SETTINGS, "router.disaggregation": "always" if shape[0] else "auto"}
    with LocalCluster(workload.settings(path, *shape, **own), tmp_path, patience=200.0) as running:
        answers = workload.ask_all(running.address, PROMPTS)
        workload.compare(path, PROMPTS, answers, workload.references(path, PROMPTS))
        assert not shape[0] or any(answer.work.pages_fetched for answer in answers)


@pytest.mark.technique("Snapshots of recurrent states")
def test_a_hand_off_has_one_state(path: Path, tmp_path: Path) -> None:
    """The store also has that behind the last full page, and from there a second turn goes on."""
    prompt, length = prompt_of(600, 1), 599
    pages = -(-length // PAGE)
    with LocalCluster(workload.settings(path, **SETTINGS), tmp_path, patience=200.0) as running:
        answer = workload.ask(running.address, prompt)
        workload.compare(path, [prompt], [answer], workload.references(path, [prompt]))
        assert metric(running, "prefill-0", "pages_copied_total", direction="out") == pages + 2 * STATES
        assert metric(running, "decode-0", "pages_copied_total", direction="in") == pages + STATES
        longer = [*prompt, *answer.token_ids, *prompt_of(30, 2)]
        again = workload.ask(running.address, longer)
        workload.compare(path, [longer], [again], workload.references(path, [longer]))
        assert again.work.tokens_computed < 2 * PAGE


@pytest.mark.parametrize(("victim", "shape"), [("prefill-0", (2, 1)), ("decode-0", (1, 2))])
def test_streams_outlive_the_death_of_a_worker(victim: str, shape: tuple[int, int], path: Path, tmp_path: Path) -> None:
    """Outputs go beyond the ends of pages, behind which another decode worker can go on."""
    expected = workload.references(path, PROMPTS, LONG)
    with (
        LocalCluster(workload.settings(path, *shape, **SETTINGS), tmp_path, patience=200.0) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        answers = pool.submit(workload.ask_all, running.address, PROMPTS, LONG)
        name = {"p": "prompt_tokens_computed_total", "d": "generation_tokens_total"}[victim[0]]
        eventually(lambda: metric(running, victim, name) > 0, what="the victim at work")
        os.kill(running.pids[victim], signal.SIGKILL)
        workload.compare(path, PROMPTS, (done := answers.result(timeout=300)), expected)
        assert any(one.work.attempts > 1 for one in done)
