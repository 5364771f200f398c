"""Models whose layers form groups, some with a window: a page is one group's, and only pages in the window move."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from deploy.local import LocalCluster
from engine.vllm_runner.pages import largest_page
from kvstore.window_groups import WindowGroups
from tests.support import checkpoints, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric
from tests.vllm_runner import driver
from tests.vllm_runner.driver import PAGE, Generation, agree, prompt_of, run

WINDOW = 70  # tokens
GROUPS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"sliding_window": WINDOW, "initializer_range": 0.1},
    "gemma3": {"sliding_window": WINDOW, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
}
EXACT = ("gpt-oss", "gemma3")
COUNT = {"gpt-oss": 1, "gemma3": 3}
"""Groups with a window, each of as many layers as the group without."""
PROMPTS = [prompt for prompt in workload.prompts() if len(prompt) <= 1_100][::4]
SETTINGS = {
    "model.engine": "vllm",
    "pages.page_size": PAGE,
    "router.queue_timeout_ms": 300_000,
    "router.attempt_timeout_ms": 300_000,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: checkpoints.make(name, tmp_path_factory.mktemp(name), **GROUPS[name]))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_greedy_tokens_are_those_of_transformers(name: str, eager: bool, paths: Callable[[str], Path]) -> None:
    """A page is the layers of one group, and the pool has as many more of them."""
    model = driver.load(paths(name), eager=eager)
    try:
        groups, raw = model.groups, checkpoints.config(name, **GROUPS[name]).to_dict()
        assert groups == WindowGroups(COUNT[name], WINDOW, PAGE)
        assert model.layout.page_bytes * (1 + groups.count) == largest_page(raw, "float32", PAGE, "auto").page_bytes
        assert model.num_pages == driver.PAGES * (1 + groups.count)
        lengths = (170, 33, 5)
        sequences = [Generation(prompt_of(n, n), range(8 * i, 8 * i + 8)) for i, n in enumerate(lengths)]
        run(model, sequences, 20)
        for length, one in zip(lengths, sequences, strict=True):
            agree(one, *checkpoints.reference(paths(name)).generate(prompt_of(length, length), 20))
    finally:
        model.close()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", [(1, 1), (0, 1)], ids=["1P+1D", "colocated"])
def test_requests_at_once_get_the_reference_tokens(
    name: str, shape: tuple[int, int], paths: Callable[[str], Path], tmp_path: Path
) -> None:
    own = {**SETTINGS, "router.disaggregation": "always" if shape[0] else "auto"}
    path = paths(name)
    with LocalCluster(workload.settings(path, *shape, **own), tmp_path, patience=200.0) as running:
        answers = workload.ask_all(running.address, PROMPTS)
        workload.compare(path, PROMPTS, answers, workload.references(path, PROMPTS))
        assert not shape[0] or any(answer.work.pages_fetched for answer in answers)


@pytest.mark.technique("Pages by groups of layers")
@pytest.mark.parametrize("name", EXACT)
def test_a_hand_off_has_the_pages_of_the_window_only(name: str, paths: Callable[[str], Path], tmp_path: Path) -> None:
    """The store also has those that a prompt needs which goes on behind the last full page."""
    path, prompt, length = paths(name), prompt_of(1_000, 1), 999
    pages, full = -(-length // PAGE), length // PAGE * PAGE
    moved, stored = (pages + (pages - (end - WINDOW + 1) // PAGE) * COUNT[name] for end in (length, full))
    assert moved < stored < 0.6 * pages * (1 + COUNT[name])
    with LocalCluster(workload.settings(path, **SETTINGS), tmp_path, patience=200.0) as running:
        answer = workload.ask(running.address, prompt)
        workload.compare(path, [prompt], [answer], workload.references(path, [prompt]))
        assert metric(running, "prefill-0", "pages_copied_total", direction="out") == stored
        assert metric(running, "decode-0", "pages_copied_total", direction="in") == moved


@pytest.mark.parametrize(("victim", "shape"), [("prefill-0", (2, 1)), ("decode-0", (1, 2))])
def test_streams_outlive_the_death_of_a_worker(
    victim: str, shape: tuple[int, int], paths: Callable[[str], Path], tmp_path: Path
) -> None:
    path = paths("gpt-oss")
    expected = workload.references(path, PROMPTS)
    with (
        LocalCluster(workload.settings(path, *shape, **SETTINGS), tmp_path, patience=200.0) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        answers = pool.submit(workload.ask_all, running.address, PROMPTS)
        name = {"p": "prompt_tokens_computed_total", "d": "generation_tokens_total"}[victim[0]]
        eventually(lambda: metric(running, victim, name) > 0, what="the victim at work")
        os.kill(running.pids[victim], signal.SIGKILL)
        workload.compare(path, PROMPTS, answers.result(timeout=300), expected)
