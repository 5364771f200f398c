"""vLLM's runner on CUDA: the tests of the other files over a GPU. Needs vLLM's build for CUDA.

    python -m pytest -m gpu tests/vllm_runner/test_gpu.py -p no:cacheprovider --timeout 120

Two runners share the GPU. Each has as many pages as it is told, so that vLLM measures no free memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm_runner import driver
from tests.vllm_runner import test_exact_steps as exact
from tests.vllm_runner import test_runner as first
from tests.vllm_runner import test_second_runner as second
from tests.vllm_runner.driver import Loaded, load, loaded_once
from tests.vllm_runner.test_runner import arena as arena  # fixtures, whose `runner` is on the GPU here
from tests.vllm_runner.test_runner import paths as paths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]


def _has_flash_attention() -> bool:
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any([*Path(folder).glob("vllm_flash_attn/_vllm_fa3_C*.so")] for folder in folders)


BACKENDS = (
    "TRITON_ATTN",
    pytest.param("FLASH_ATTN", marks=pytest.mark.skipif(not _has_flash_attention(), reason="vLLM has no FA3 here")),
)


@pytest.fixture(scope="module", autouse=True)
def _products_of_float32_are_exact() -> Iterator[None]:
    """Triton rounds the factors of a product in float32 to 10 bits, unless it is told not to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        yield


@pytest.fixture(scope="module")
def runner(paths: Callable[[str], Path]) -> Iterator[Loaded]:
    yield from loaded_once(lambda name: load(paths(name.split("/")[0]), device="cuda"))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_greedy_tokens_are_those_of_transformers(name: str, paths: Callable[[str], Path], runner: Loaded):
    first.test_greedy_tokens_are_those_of_transformers(name, paths, runner)


test_draws = first.test_draws_rules_and_log_probabilities_are_those_of_our_own_engine
test_scores = first.test_prompt_tokens_are_scored
test_a_hand_over = first.test_a_prompt_is_handed_over
test_a_move = first.test_a_sequence_moves_is_put_aside_and_computed_again
test_steps_ahead = first.test_steps_ahead_draw_the_tokens_of_steps_that_waited
test_a_step_ahead_of_an_exchanged_page = first.test_a_step_ahead_of_a_sequence_whose_page_is_exchanged
test_a_chunk_that_follows_none = first.test_a_chunk_that_follows_one_without_a_token_draws_none_and_others_go_on
test_a_corrected_draw = second.test_a_corrected_draw_is_what_its_sequence_goes_on_with


def test_pages_are_blocks_as_they_lie(runner: Loaded):
    assert runner("llama").layout.form == "paired"


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_depend_on_no_companions_and_no_borders(backend: str, tmp_path: Path):
    with closing(load(exact.wide(tmp_path), "bfloat16", device="cuda", attention_backend=backend)) as runner:
        exact.test_bits_depend_on_no_companions_and_no_borders(runner)


def _greedy(path: Path, *, eager: bool) -> None:
    with closing(load(path, device="cuda", eager=eager, exact=False)) as runner:
        driver.exact(runner, path, (70, 5))


def test_the_first_model_runner(paths: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    _greedy(paths("llama"), eager=True)


def test_a_compiled_model_with_graphs(paths: Callable[[str], Path]):
    _greedy(paths("llama"), eager=False)
