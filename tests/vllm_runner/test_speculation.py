"""Proposals on vLLM's first model runner: tokens are those of steps without any. Needs an environment with vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from decode_worker.speculation import accepted
from deploy.local import LocalCluster
from engine.step.batch import Chunk, ComputedMask, LogitsEdits, Sampled, TokenDraw
from engine.vllm_runner.runner import VllmRunner
from tests.processes.test_speculation import OUTPUT, PROMPTS, SETTINGS
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest
from tests.support.cluster import load as load_of
from tests.support.eventually import eventually
from tests.support.metrics_page import metric
from tests.vllm_runner.driver import GREEDY, Generation, Loaded, load, prompt_of, run, step
from tests.vllm_runner.test_cluster import SETTINGS as VLLM
from tests.vllm_runner.test_cluster import path as path
from tests.vllm_runner.test_runner import paths as paths
from tests.vllm_runner.test_runner import runner as runner

COUNT = 30
DRAWS = (
    GREEDY,
    TokenDraw(temperature=0.9, top_p=0.95, seed=77, logprobs=3),
    TokenDraw(temperature=1.3, top_k=40, seed=5, index=1, edits=LogitsEdits(forbidden=np.array([5, 6], np.int64))),
    TokenDraw(temperature=1.0, seed=2**63),
)
LENGTHS = (70, 33, 5, 31)  # the last one begins its second page with a proposal


def members(draws: Sequence[TokenDraw] = DRAWS, adapter: str = "") -> list[Generation]:
    pairs = zip(LENGTHS, draws, strict=True)
    return [Generation(prompt_of(n, n), range(6 * i, 6 * i + 6), draw, adapter) for i, (n, draw) in enumerate(pairs)]


def with_proposals(one: Generation, guess: Sequence[int], late: int | None = None) -> Chunk:
    """Its next chunk, and so many proposals. The mask of the draw number `late` is not there yet."""
    known, one.tokens = one.tokens, [*one.tokens, *guess]
    chunk = one.chunk()
    one.tokens = known
    masks = {late: ComputedMask(None, ready=False)}
    draws = [TokenDraw(**{**fields(one.draw), "mask": masks.get(at)}) for at in range(len(guess) + 1)]
    return Chunk(chunk.tokens, chunk.start, chunk.pages, draws[-1], adapter=one.adapter, verify=draws[:-1])


def fields(draw: TokenDraw) -> dict[str, object]:
    return {name: getattr(draw, name) for name in TokenDraw.__struct_fields__}


def take(one: Generation, chunk: Chunk, drawn: Sequence[Sampled]) -> None:
    one.drawn += drawn
    one.tokens += [each.token for each in drawn]
    one.computed = len(one.tokens) - 1 if drawn else chunk.known - 1


def verify(model: VllmRunner, sequences: Sequence[Generation], right: Sequence[Generation], seed: int = 0) -> int:
    """Steps of random members with 0 to 5 proposals, of which some are wrong and some masks late, until all have drawn
    as much as `right`. Return how many proposals were right."""
    rng, count = random.Random(seed), 0
    while unfinished := [one for one in sequences if len(one.drawn) < COUNT]:
        running = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        chunks: list[Chunk] = []
        for one in running:
            texts = right[sequences.index(one)].drawn
            guess = [each.token for each in texts[len(one.drawn) : len(one.drawn) + rng.randint(0, 5)]]
            guess = guess[: COUNT - len(one.drawn) - 1]
            if guess and rng.random() < 0.4:
                guess[rng.randrange(len(guess))] = 3
            late = rng.randint(0, len(guess)) if rng.random() < 0.2 else None
            chunks.append(with_proposals(one, guess if one.drawn else (), late))
        results = step(model, *chunks)
        for number, (one, chunk) in enumerate(zip(running, chunks, strict=True)):
            drawn = accepted(chunk, (*results.verified.get(number, ()), results.sampled[number]))
            take(one, chunk, drawn)
            count += max(0, len(drawn) - 1)
    return count


def alike(ones: Sequence[Generation], others: Sequence[Generation]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.output == other.output
        pairs = [pair for pair in zip(one.drawn, other.drawn, strict=True) if pair[0].logprob is not None]
        assert all(mine.logprob == pytest.approx(right.logprob, abs=1e-4) for mine, right in pairs)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "qwen3-moe", "gpt-oss"])
def test_tokens_are_those_without_proposals(name: str, runner: Loaded):
    """In mixed steps, with drawn and ruled tokens, over the border of a page, and where masks are late."""
    model = runner(name)
    assert model.verifies
    single, several = members(), members()
    run(model, single, COUNT)
    assert verify(model, several, single) > COUNT
    alike(several, single)


def test_ranks_keep_the_same_tokens(paths: Callable[[str], Path]):
    model = load(paths("llama"), ranks=2)
    single, several = members(), members()
    run(model, single, COUNT)
    assert verify(model, several, single) > COUNT
    model.close()
    alike(several, single)


def test_a_sequence_moves_and_is_computed_again_after_a_wrong_proposal(paths: Callable[[str], Path], runner: Loaded):
    model = runner("llama")
    expected, _ = checkpoints.reference(paths("llama")).generate(prompt_of(60, 6), 20)
    one = Generation(prompt_of(60, 6), range(10))
    run(model, [one], 3)
    for wrong in ([3, 3, 3], [expected[len(one.drawn) + 1], 3]):
        chunk = with_proposals(one, wrong)
        results = step(model, chunk)
        take(one, chunk, accepted(chunk, (*results.verified[0], results.sampled[0])))
        model.duplicate(one.table[1], 30)
        one.table.exchange(1, 30)
    one.computed = 0
    run(model, [one], 20)
    assert one.output == expected


@pytest.mark.technique("Speculation by n-grams, token-identical")
def test_a_cluster_has_the_tokens_that_it_has_without_while_a_worker_dies(path: Path, tmp_path: Path) -> None:
    """With n-grams, and with the model as its own draft, which our own engine or vLLM runs. Then the pages of prompts
    have layers of the draft."""
    own = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 4}
    drafts = {"ngram": {}, "draft": {"model.draft_model": str(path)}, "vllm": {"model.speculative_config": own}}
    keeps_tokens_while_a_worker_dies(path, tmp_path, drafts, right=100)


def keeps_tokens_while_a_worker_dies(
    path: Path, folder: Path, drafts: Mapping[str, Mapping[str, object]], *, right: int, **settings: object
) -> None:
    """Greedy, drawn and ruled outputs of 24 at once, of 1P+2D with the settings of each of `drafts`, by
    `model.speculation`. At least `right` of the proposals are right."""
    requests = [(prompt, setting) for prompt in PROMPTS[:6] for setting in SETTINGS]
    more = {
        **VLLM,
        "cluster.heartbeat_ms": 100,
        "cluster.heartbeat_timeout_ms": 2_000,
        "router.disaggregation": "always",
        **settings,
    }

    def answers(cluster: LocalCluster, during: Callable[[], object] = lambda: None) -> list[Sequence[int]]:
        with ThreadPoolExecutor(len(requests)) as pool:
            futures = [
                pool.submit(workload.ask, cluster.address, prompt, OUTPUT, timeout=240.0, **setting)
                for prompt, setting in requests
            ]
            during()
            return [future.result().token_ids for future in futures]

    with LocalCluster(workload.settings(path, 1, 1, **more), folder / "off") as cluster:
        expected = answers(cluster)
        assert not metric(cluster, "decode-0", "spec_decode_num_drafts_total")
    for kind, draft in drafts.items():
        config = workload.settings(path, 1, 2, **more, **draft, **{"model.speculation": kind})
        with LocalCluster(config, folder / kind) as cluster:
            workers = ["decode-0", "decode-1"]

            def kill(cluster: LocalCluster = cluster, workers: list[str] = workers) -> None:
                """Kill the first worker that is seen to have several streams."""
                busy = eventually(
                    lambda: next((name for name in workers if load_of(cluster, name).running > 2), ""),
                    what="streams on a worker",
                )
                workers.remove(busy)
                cluster.kill(busy)

            assert answers(cluster, kill) == expected
            eventually(lambda: at_rest(cluster), what="everything freed")
            verified, hits = (
                metric(cluster, workers[0], f"spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted")
            )
            assert verified > max(100, hits)
            assert hits >= right
