"""Several outputs of one prompt on a real cluster: one prefill, shared pages, and the tokens of single requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import torch

from baton.v1 import generation_pb2, generation_pb2_grpc
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest, load
from tests.support.eventually import DEADLINE, eventually

_RNG = random.Random(5)
PROMPT = [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(150)]
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "ignore_eos": True}


class Outputs:
    """What comes of a request, output by output."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._address = cluster.address
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ends: dict[int, generation_pb2.Finished] = {}

    def run(self, prompt: Sequence[int], count: int, **fields: Any) -> Outputs:
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt), max_tokens=count, **fields
        )
        with grpc.insecure_channel(self._address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            for response in stub.Generate(request, timeout=DEADLINE):
                if response.HasField("finished"):
                    assert response.finished.index not in self.ends
                    self.ends[response.finished.index] = response.finished
                else:
                    delta = response.delta
                    self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
                    self.logprobs.setdefault(delta.index, []).extend(one.logprob for one in delta.logprobs)
        return self


def singles(cluster: LocalCluster, prompt: Sequence[int], n: int, count: int, **fields: Any) -> list[Outputs]:
    return [Outputs(cluster).run(prompt, count, **(fields | {"seed": fields["seed"] + number})) for number in range(n)]


@pytest.mark.technique("Several outputs of one prompt")
def test_each_sample_has_the_tokens_of_its_seed_and_the_prompt_is_computed_once(cluster: LocalCluster) -> None:
    prompt = [*PROMPT, 3]
    many = Outputs(cluster).run(prompt, 20, n=4, **DRAWN)
    assert sorted(many.ends) == [0, 1, 2, 3]
    alone = singles(cluster, prompt, 4, 20, **DRAWN)
    assert [many.tokens[number] for number in range(4)] == [one.tokens[0] for one in alone]
    assert len({tuple(tokens) for tokens in many.tokens.values()}) == 4
    assert [many.ends[number].seed for number in range(4)] == [11, 12, 13, 14]
    assert many.ends[0].usage.cached_tokens < len(prompt) - workload.PAGE
    for number in (1, 2, 3):
        assert many.ends[number].usage.cached_tokens == len(prompt) - 1
        assert many.ends[number].work.decode_workers == many.ends[0].work.decode_workers
    eventually(lambda: at_rest(cluster), what="everything freed")


def test_the_best_of_several_has_the_highest_mean_log_probability(cluster: LocalCluster) -> None:
    prompt = [*PROMPT, 4]
    alone = singles(cluster, prompt, 5, 12, logprobs=0, **DRAWN)
    means = [sum(one.logprobs[0]) / 12 for one in alone]
    best = sorted(range(5), key=lambda number: -means[number])[:2]
    chosen = Outputs(cluster).run(prompt, 12, n=2, best_of=5, **DRAWN)
    assert [chosen.tokens[0], chosen.tokens[1]] == [alone[number].tokens[0] for number in best]
    assert not any(chosen.logprobs.values()), "log-probabilities that were not asked for"


@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_beam_search_finds_what_transformers_finds(cluster: LocalCluster, path: Path, penalty: float) -> None:
    prompt = PROMPT[:45]
    model: Any = checkpoints.reference(path).model
    with torch.inference_mode():
        theirs = model.generate(
            torch.tensor([prompt]), num_beams=3, num_return_sequences=2, max_new_tokens=20, do_sample=False,
            length_penalty=penalty, pad_token_id=0, eos_token_id=checkpoints.EOS,
        )  # fmt: skip
    ours = Outputs(cluster).run(
        prompt, 20, n=2, best_of=3, beam_search=generation_pb2.BeamSearch(length_penalty=penalty)
    )
    for number in (0, 1):
        right = [token for token in theirs[number].tolist()[45:] if token != 0]
        assert ours.tokens[number] == right
    base: Any = cluster.addresses
    with openai.OpenAI(base_url=f"http://{base.api}/v1", api_key="none") as client:
        extra = {"use_beam_search": True, "length_penalty": penalty, "return_token_ids": True}
        answer: Any = client.completions.create(
            model="", prompt=prompt, max_tokens=20, n=2, best_of=3, extra_body=extra
        )
        assert [choice.token_ids for choice in answer.choices] == [ours.tokens[0], ours.tokens[1]]
    eventually(lambda: at_rest(cluster), what="everything freed")


def _running(cluster: LocalCluster) -> str | None:
    """The decode worker that runs all three samples."""
    return next((name for name in ("decode-0", "decode-1") if load(cluster, name).running == 3), None)


def test_samples_fail_over_one_by_one(path: Path, tmp_path: Path) -> None:
    quick: dict[str, Any] = {"cluster.heartbeat_ms": 100, "cluster.heartbeat_timeout_ms": 1_000}
    with LocalCluster(workload.settings(path, 1, 2, **quick, **workload.SLOW_ENGINE), tmp_path) as cluster:
        alone = singles(cluster, PROMPT, 3, 400, **DRAWN)
        many = Outputs(cluster)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(many.run, PROMPT, 400, n=3, **DRAWN)
            eventually(lambda: all(len(many.tokens.get(number, ())) > 10 for number in range(3)), what="all under way")
            cluster.kill(eventually(lambda: _running(cluster) or "", what="the worker in the status"))
            future.result(DEADLINE)
        assert [many.tokens[number] for number in range(3)] == [one.tokens[0] for one in alone]
        assert any(end.work.attempts > 1 for end in many.ends.values())
        eventually(lambda: at_rest(cluster), what="everything freed")
