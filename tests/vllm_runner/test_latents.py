"""Models with latent attention (MLA): a page holds one latent a token and layer, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from deploy.local import LocalCluster
from engine.vllm_runner.pages import largest_page
from engine.vllm_runner.requirements import LATENT_PAGE as PAGE
from engine.vllm_runner.runner import VllmRunner
from kvstore.arena.memory import Arena
from kvstore.layout import LATENT
from tests.support import checkpoints, workload
from tests.support.cluster import watching
from tests.support.eventually import eventually
from tests.vllm_runner import deaths, driver
from tests.vllm_runner.driver import Loaded, prompt_of

WIDE = {"hidden_size": 128, "initializer_range": 0.1, "head_dim": 64}
EXACT = ("deepseek-v2", "deepseek-v3")
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
PROMPTS = [prompt for prompt in workload.prompts() if len(prompt) <= 1_100][::6]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: checkpoints.make(name, tmp_path_factory.mktemp(name), **WIDE))


@pytest.fixture(scope="module")
def runner(paths: Callable[[str], Path]) -> Iterator[Loaded]:
    yield from driver.loaded_once(lambda ranks, stages=1: load(paths("deepseek-v3"), ranks=ranks, stages=stages))


@pytest.fixture
def arena(runner: Loaded) -> Iterator[Arena]:
    yield from driver.arena_of(runner(1))


def load(path: Path, **options: object) -> VllmRunner:
    return driver.load(path, page_size=PAGE, **options)


@pytest.mark.technique("Latent attention")
@pytest.mark.parametrize(("name", "eager"), [*((name, True) for name in EXACT), (EXACT[-1], False)])
def test_greedy_tokens_are_those_of_transformers(name: str, eager: bool, paths: Callable[[str], Path]) -> None:
    with closing(load(paths(name), eager=eager)) as model:
        assert model.layout == largest_page(checkpoints.config(name, **WIDE).to_dict(), "float32", PAGE, "auto")
        assert model.layout.form == LATENT
        driver.exact(model, paths(name), page_size=PAGE)


@pytest.mark.parametrize("eager", [True, False])
def test_plain_rotary_embeddings(eager: bool, tmp_path: Path) -> None:
    """vLLM's own operation for them leaves the tensors of latent attention unrotated."""
    path = checkpoints.make("deepseek-v3", tmp_path, **WIDE, **PLAIN)
    with closing(load(path, eager=eager)) as model:
        driver.exact(model, path, page_size=PAGE)


@pytest.mark.parametrize(
    ("makers", "takers"), [((1,), (1,)), ((2,), (1,)), ((1,), (2,)), ((2, 2), (1,)), ((1,), (4, 2))]
)
def test_a_prompt_is_handed_over_between_degrees(
    makers: Sequence[int], takers: Sequence[int], paths: Callable[[str], Path], runner: Loaded, arena: Arena
) -> None:
    """Every rank of a stage has whole latents: one of them copies pages out, all copy them in."""
    driver.hand_over(runner(*makers), runner(*takers), arena, paths("deepseek-v3"), PAGE)


@pytest.mark.parametrize("shape", [(1, 1), (0, 1)], ids=["1P+1D", "colocated"])
def test_requests_at_once_get_the_reference_tokens(
    shape: tuple[int, int], paths: Callable[[str], Path], tmp_path: Path
) -> None:
    path = paths("deepseek-v3")
    driver.at_once(driver.settings(path, *shape, PAGE), path, tmp_path, PROMPTS)


@pytest.mark.parametrize("name", EXACT)
def test_streams_outlive_the_death_of_any_process(name: str, paths: Callable[[str], Path], tmp_path: Path) -> None:
    """SIGKILL under load of a prefill worker, a decode worker, vLLM's process beneath another, and the store."""
    path = paths(name)
    eager = {"model.enforce_eager": True, "prefill.max_num_batched_tokens": 4 * PAGE}
    config = driver.settings(path, 1, 2, PAGE, **eager)
    with LocalCluster(config, tmp_path, patience=200.0) as running, ThreadPoolExecutor(1) as pool:
        for number, victim in enumerate(("prefill-0", "decode-0", "vLLM of decode-1", "store-0")):
            prompts = [prompt_of(length, 10 * number + seed) for seed, length in enumerate((1_000, 700, 400, 250, 60))]
            expected = workload.references(path, prompts)
            worker = deaths.owner_of(victim)
            busy = "prefill-0" if victim == "store-0" else worker
            with watching(running, busy) as works:
                answers = pool.submit(workload.ask_all, running.address, prompts)
                eventually(works, what=f"{busy} at work")
            deaths.kill(running, victim)
            workload.compare(path, prompts, answers.result(timeout=200), expected)
            deaths.start_again(running, worker)
        deaths.hand_over(running)
