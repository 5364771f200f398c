"""Models with latent attention (MLA): a page holds one latent a token and layer, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from deploy.local import LocalCluster
from engine.step.batch import Chunk
from engine.vllm_runner.pages import largest_page
from engine.vllm_runner.requirements import LATENT_PAGE as PAGE
from engine.vllm_runner.runner import VllmRunner
from kvstore.arena.memory import Arena
from kvstore.checksum import page_checksum
from kvstore.client.transfer import CopiedIn, CopiedOut, CopyIn, CopyOut
from kvstore.layout import LATENT
from tests.support import checkpoints, workload
from tests.support.cluster import watching
from tests.support.eventually import eventually
from tests.vllm_runner import deaths, driver
from tests.vllm_runner.driver import agree, prompt_of, run, step, untimed

Loaded = Callable[..., VllmRunner]
WIDE = {"hidden_size": 128, "initializer_range": 0.1, "head_dim": 64}
EXACT = ("deepseek-v2", "deepseek-v3")
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
PROMPTS = [prompt for prompt in workload.prompts() if len(prompt) <= 1_100][::6]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: checkpoints.make(name, tmp_path_factory.mktemp(name), **WIDE))


@pytest.fixture(scope="module")
def runner(paths: Callable[[str], Path]) -> Iterator[Loaded]:
    runners: list[VllmRunner] = []

    @cache
    def loaded(ranks: int, stages: int = 1) -> VllmRunner:
        runners.append(load(paths("deepseek-v3"), ranks=ranks, stages=stages))
        return runners[-1]

    yield loaded
    for one in runners:
        one.close()


def load(path: Path, **options: object) -> VllmRunner:
    return driver.load(path, page_size=PAGE, **options)


def sequence(prompt: list[int], pages: range) -> driver.Generation:
    return driver.Generation(prompt, pages, page_size=PAGE)


def generate(model: VllmRunner, path: Path) -> None:
    """Compare mixed batches of chunks with transformers."""
    lengths = (70, 33, 5)
    sequences = [sequence(prompt_of(n, n), range(8 * i, 8 * i + 8)) for i, n in enumerate(lengths)]
    run(model, sequences, 20)
    for length, one in zip(lengths, sequences, strict=True):
        agree(one, *checkpoints.reference(path).generate(prompt_of(length, length), 20))


@pytest.mark.technique("Latent attention")
@pytest.mark.parametrize(("name", "eager"), [*((name, True) for name in EXACT), (EXACT[-1], False)])
def test_greedy_tokens_are_those_of_transformers(name: str, eager: bool, paths: Callable[[str], Path]) -> None:
    model = load(paths(name), eager=eager)
    try:
        assert model.layout == largest_page(checkpoints.config(name, **WIDE).to_dict(), "float32", PAGE, "auto")
        assert model.layout.form == LATENT
        generate(model, paths(name))
    finally:
        model.close()


@pytest.mark.parametrize("eager", [True, False])
def test_plain_rotary_embeddings(eager: bool, tmp_path: Path) -> None:
    """vLLM's own operation for them leaves the tensors of latent attention unrotated."""
    path = checkpoints.make("deepseek-v3", tmp_path, **WIDE, **PLAIN)
    model = load(path, eager=eager)
    try:
        generate(model, path)
    finally:
        model.close()


@pytest.mark.parametrize(
    ("makers", "takers"), [((1,), (1,)), ((2,), (1,)), ((1,), (2,)), ((2, 2), (1,)), ((1,), (4, 2))]
)
def test_a_prompt_is_handed_over_between_degrees(
    makers: Sequence[int], takers: Sequence[int], paths: Callable[[str], Path], runner: Loaded
) -> None:
    """Every rank of a stage has whole latents: one of them copies pages out, all copy them in."""
    prefill, decode = runner(*makers), runner(*takers)
    assert prefill.layout == decode.layout
    page_bytes = prefill.layout.page_bytes
    arena = Arena.create(32 * page_bytes)
    arena.divide(page_bytes)
    out, into = prefill.mover(verify=True), decode.mover(verify=True)
    out.attach(arena)
    into.attach(arena)
    prompt = prompt_of(3 * PAGE + 7, 3)
    step(prefill, Chunk(prompt[: 3 * PAGE], 0, [9, 3, 4]))
    copied = out.start([CopyOut(1, i, page, 10 + i) for i, page in enumerate([9, 3, 4])]).wait()
    assert untimed(copied) == CopiedOut(1, 0, tuple(page_checksum(arena.slot(slot), 1) for slot in (10, 11, 12)))
    torch.frombuffer(arena.slot(0), dtype=torch.float32).fill_(float("nan"))
    into.start([CopyIn(2, i, 0, page, page_checksum(arena.slot(0), 1)) for i, page in enumerate(range(20, 28))]).wait()
    copies = [CopyIn(3, i, 10 + i, 20 + i, checksum) for i, checksum in enumerate(copied.checksums)]
    assert untimed(into.start(copies).wait()) == CopiedIn(3, (0, 1, 2), ())
    one = sequence(prompt, range(20, 28))
    one.chunk(3 * PAGE)  # takes the pages
    one.computed = 3 * PAGE
    run(decode, [one], 20)
    agree(one, *checkpoints.reference(paths("deepseek-v3")).generate(prompt, 20))
    arena.slot(11)[-5] ^= 1
    assert untimed(into.start(copies).wait()) == CopiedIn(3, (0, 2), (1,))
    arena.close()


def cluster_of(path: Path, prefill: int, decode: int, folder: Path, **more: object) -> LocalCluster:
    own = {
        "model.engine": "vllm",
        "pages.page_size": PAGE,
        "router.disaggregation": "always" if prefill else "auto",
        "router.queue_timeout_ms": 300_000,
        "router.attempt_timeout_ms": 300_000,
    }
    return LocalCluster(workload.settings(path, prefill, decode, **(own | more)), folder, patience=200.0)


@pytest.mark.parametrize("shape", [(1, 1), (0, 1)], ids=["1P+1D", "colocated"])
def test_requests_at_once_get_the_reference_tokens(
    shape: tuple[int, int], paths: Callable[[str], Path], tmp_path: Path
) -> None:
    path = paths("deepseek-v3")
    with cluster_of(path, *shape, tmp_path) as running:
        answers = workload.ask_all(running.address, PROMPTS)
        workload.compare(path, PROMPTS, answers, workload.references(path, PROMPTS))
        assert not shape[0] or any(answer.work.pages_fetched for answer in answers)


@pytest.mark.parametrize("name", EXACT)
def test_streams_outlive_the_death_of_any_process(name: str, paths: Callable[[str], Path], tmp_path: Path) -> None:
    """SIGKILL under load of a prefill worker, a decode worker, vLLM's process beneath another, and the store."""
    path = paths(name)
    eager = {"model.enforce_eager": True, "prefill.max_num_batched_tokens": 4 * PAGE}
    with cluster_of(path, 1, 2, tmp_path, **eager) as running, ThreadPoolExecutor(1) as pool:
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
