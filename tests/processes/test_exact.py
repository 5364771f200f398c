"""Greedy output of whole clusters of real processes, token for token against transformers, in float32."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from deploy.local import LocalCluster
from engine.cpu import build
from engine.engine import Engine, layout_of
from engine.models.config import load_spec
from engine.models.quantize import quantize
from engine.spec import QUANTIZED_AT_LOAD
from engine.step.batch import Chunk, TokenDraw
from kvstore.layout import FP8, INT8
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest
from tests.support.engines import ENGINE
from tests.support.eventually import eventually
from tests.support.metrics_page import metric, nothing_held
from tests.support.thorough import cases, thorough
from tests.support.workload import PAGE

SHAPES = {"1P+1D": (1, 1, "always"), "2P+2D": (2, 2, "auto"), "colocated": (0, 1, "auto")}
RUNS = cases(
    [(family, shape) for family in checkpoints.FAMILIES for shape in SHAPES],
    [
        *(("llama", shape) for shape in SHAPES),
        ("qwen2", "2P+2D"),
        ("qwen3", "1P+1D"),
        ("mistral", "2P+2D"),
        ("phi3", "2P+2D"),
        ("gemma3", "1P+1D"),
        ("mixtral", "1P+1D"),
        ("qwen3-moe", "2P+2D"),
    ],
)
_FORMATS = [*((form, "auto") for form in QUANTIZED_AT_LOAD), *(("", held) for held in (INT8, FP8))]
FORMATS = cases(  # weights, pages, shape
    [(*formats, shape) for formats in _FORMATS for shape in SHAPES],
    [
        ("int8", "auto", "1P+1D"),
        ("int8", INT8, "colocated"),
        ("int4", FP8, "2P+2D"),
        ("", INT8, "1P+1D"),
        ("", FP8, "1P+1D"),
    ],
)
PROMPTS = workload.prompts()
_LONG = 100  # tokens, several times a window


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> Callable[[str], dict[tuple[int, ...], list[int]]]:
    return cache(lambda family: workload.references(checkpoint(f"wide-{family}"), prompts_of(family)))


def prompts_of(family: str) -> list[list[int]]:
    """All prompts for llama. Others differ in what no length of a prompt changes, so `make test` asks them less."""
    return PROMPTS if family == "llama" or thorough() else PROMPTS[::3]


@pytest.mark.technique("Continuous batching")
@pytest.mark.parametrize(("family", "shape"), RUNS)
def test_64_requests_at_once_get_the_reference_tokens(
    family: str,
    shape: str,
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], dict[tuple[int, ...], list[int]]],
    tmp_path: Path,
) -> None:
    path, prompts = checkpoint(f"wide-{family}"), prompts_of(family)
    prefill, decode, split = SHAPES[shape]
    more = {"router.disaggregation": split, "router.queue_timeout_ms": 300_000}
    with LocalCluster(workload.settings(path, prefill, decode, **more), tmp_path) as cluster:
        answers = workload.ask_all(cluster.address, prompts)
        workload.compare(path, prompts, answers, expected(family))
        if split == "always":
            assert any(answer.work.prefill_worker for answer in answers)
            assert any(answer.work.pages_fetched for answer in answers)
        # Again, now that everything is cached somewhere.
        repeats = prompts[:16]
        answers = workload.ask_all(cluster.address, repeats)
        workload.compare(path, repeats, answers, expected(family))
        for prompt, answer in zip(repeats, answers, strict=True):
            assert answer.usage.cached_tokens > 0 or len(prompt) <= PAGE  # of fewer tokens the worker that ran it knows
            assert answer.usage.cached_tokens < len(prompt)


@pytest.mark.technique("Paged KV cache")
@pytest.mark.parametrize("shape", ["1P+1D", "colocated"])
def test_pages_of_which_a_step_computes_a_part(
    shape: str,
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], dict[tuple[int, ...], list[int]]],
    tmp_path: Path,
) -> None:
    path = checkpoint("wide-llama")
    prefill, decode, split = SHAPES[shape]
    more = {"router.disaggregation": split, "pages.page_size": 512, "prefill.max_num_batched_tokens": 512}
    settings = workload.settings(path, prefill, decode, **more)
    with LocalCluster(settings, tmp_path) as cluster:
        for _ in range(2):  # the second time all whole pages are cached
            answers = workload.ask_all(cluster.address, PROMPTS[:24])
            workload.compare(path, PROMPTS[:24], answers, expected("llama"))
        assert any(answer.usage.cached_tokens >= 512 for answer in answers)


@pytest.mark.technique("Sliding windows")
@pytest.mark.skipif(ENGINE.name == "vllm", reason="its runner gives no page back before a sequence ends")
@pytest.mark.parametrize("shape", cases(list(SHAPES), ["1P+1D", "colocated"]))
def test_a_window_lets_contexts_exceed_the_pool(shape: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Every layer looks at 23 tokens, and a decode worker has pages for 640, of which eight requests share some."""
    path, page = checkpoint("wide-mistral-window"), 16
    prefill, decode, split = SHAPES[shape]
    page_bytes = layout_of(load_spec(path), "float32", page).page_bytes
    settings = workload.settings(
        path, prefill, decode, **{"router.disaggregation": split, "decode.kv_cache_bytes": 40 * page_bytes}
    )
    prompts = [prompt for prompt in PROMPTS if len(prompt) >= 500][:2] + PROMPTS[:6]
    assert max(map(len, prompts)) > 40 * page
    expected = workload.references(path, prompts, _LONG)
    with LocalCluster(settings, tmp_path) as cluster:
        answers = workload.ask_all(cluster.address, prompts, _LONG)
        workload.compare(path, prompts, answers, expected)
        if split == "always":
            assert any(answer.work.pages_fetched for answer in answers)
        short, count = min(prompts, key=len), 41 * page
        answers = workload.ask_all(cluster.address, [short], count)
        workload.compare(path, [short], answers, workload.references(path, [short], count))


@pytest.mark.technique("Prefill and decode apart")
def test_prefill_on_one_node_and_decode_on_another(
    checkpoint: Callable[[str], Path], expected: Callable[[str], dict[tuple[int, ...], list[int]]], tmp_path: Path
) -> None:
    """Every page of a prompt passes from store to store."""
    path = checkpoint("wide-llama")
    settings = workload.settings(path, 1, 1)
    with LocalCluster(settings, tmp_path, nodes=["a", "b"], placed={"decode-0": "a", "prefill-0": "b"}) as cluster:
        answers = workload.ask_all(cluster.address, PROMPTS)
        workload.compare(path, PROMPTS, answers, expected("llama"))
        split = [answer.work for answer in answers if answer.work.prefill_worker]
        assert len(split) > len(PROMPTS) / 4
        assert any(work.pages_fetched for work in split)
        eventually(lambda: metric(cluster, "store-0", "tier_loads_total", tier="remote"), what="pages from the other")
        eventually(lambda: at_rest(cluster), what="everything freed")
        stores = ("store-0", "store-1")
        eventually(lambda: all(nothing_held(cluster, store) for store in stores), what="nothing held in any store")


@pytest.mark.technique("Pages in codes, with a scale for each token and head")
@pytest.mark.native
@pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: torch's last bits, or refused there")
@pytest.mark.parametrize(("form", "held", "shape"), FORMATS)
def test_a_cluster_with_formats_has_the_tokens_of_one_engine(
    form: str, held: str, shape: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """`form` of weights that are quantized when they are loaded, beside an engine with the checkpoint that `baton
    quantize` writes. `held`: of pages."""
    path, prompts = checkpoint("wide-llama"), PROMPTS[::3]
    if form:
        quantize(path, tmp_path / "written", QUANTIZED_AT_LOAD[form], 128, False, lambda _: None)
    written = tmp_path / "written" if form else path
    alone = Engine.load(written, "float32", "cpu", 160, 16, head=True, threads=1, kv_cache_dtype=held)
    prefill, decode, split = SHAPES[shape]
    more = {"model.quantization": form, "model.kv_cache_dtype": held, "router.disaggregation": split}
    more |= {"router.queue_timeout_ms": 300_000}
    with LocalCluster(workload.settings(path, prefill, decode, **more), tmp_path) as cluster:
        answers = workload.ask_all(cluster.address, prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            alone.step([Chunk(prompt[:-1], 0, range(160))] if len(prompt) > 1 else [])
            assert list(answer.token_ids) == _greedy(alone, prompt, range(160))
        if split != "always":
            return
        fetched = sum(answer.work.pages_fetched for answer in answers)
        moved = fetched * alone.layout.page_bytes
        assert moved > 0
        assert held == "auto" or moved <= 0.55 * fetched * replace(alone.layout, dtype="bfloat16").page_bytes
        eventually(
            lambda: metric(cluster, "decode-0", "bytes_copied_total", direction="in") == moved, what="bytes of pages"
        )


@pytest.mark.technique("Paged KV cache")
@pytest.mark.native
def test_a_lost_page_is_seen(checkpoint: Callable[[str], Path]) -> None:
    """The comparison can fail: zeroing any one page of the prompt changes at least 95 % of the outputs."""
    rng = random.Random(1)
    changed = total = 0
    for family in checkpoints.FAMILIES:
        engine = Engine.load(checkpoint(f"wide-{family}"), "float32", "cpu", 160, 16, head=True, threads=2)
        for prompt in [p for p in PROMPTS if len(p) > 16][::8]:
            pages = list(range(math.ceil((len(prompt) + workload.OUTPUT) / 16)))
            engine.pool.zero_()
            engine.step([Chunk(prompt[:-1], 0, pages)] if len(prompt) > 1 else [])
            whole = engine.pool.clone()
            right = _greedy(engine, prompt, pages)
            for lost in rng.sample(range((len(prompt) - 1) // 16), min(2, (len(prompt) - 1) // 16)):
                engine.pool.copy_(whole)
                engine.pool[lost].zero_()
                changed += _greedy(engine, prompt, pages) != right
                total += 1
    assert changed >= 0.95 * total, f"only {changed} of {total} outputs changed"


@torch.inference_mode()
def _greedy(engine: Engine, prompt: list[int], pages: Sequence[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(workload.OUTPUT):
        (drawn,) = engine.step([Chunk(tokens[-1:], len(tokens) - 1, pages, TokenDraw(temperature=0.0))])
        tokens.append(drawn.token)
    return tokens[len(prompt) :]
