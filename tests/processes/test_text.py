"""Text in and out of a real cluster: the tokenizer, stop strings, stop tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from baton.client import Client, Generated
from deploy.local import LocalCluster
from tests.support import checkpoints, workload

PROMPT = "bonfan korles dimin taras"


@pytest.fixture(scope="module")
def path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(workload.settings(path, 1, 1), tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def right(path: Path) -> list[int]:
    """What the model says to PROMPT."""
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(PROMPT).ids
    return checkpoints.reference(path).generate(ids, 40)[0]


def generated(cluster: LocalCluster, **settings: Any) -> Generated:
    """The result of one greedy request."""
    settings = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **settings}
    with Client(cluster.address) as client:
        return client.generate(PROMPT, timeout=60, **settings).result()


def test_the_text_is_the_decoding_of_the_tokens(cluster: LocalCluster, path: Path, right: list[int]) -> None:
    result = generated(cluster)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert result.token_ids == right
    assert result.text == tokenizer.decode(right, skip_special_tokens=True)
    assert result.finish_reason == "length"


def test_logprobs_are_the_models_own(cluster: LocalCluster, path: Path, right: list[int]) -> None:
    result = generated(cluster, logprobs=3, max_tokens=8)
    tokens, logprobs = result.token_ids, result.logprobs
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(PROMPT).ids
    expected = checkpoints.reference(path).logits([*ids, *right[:8]])[len(ids) - 1 : -1].log_softmax(-1)
    assert len(logprobs) == len(tokens) == 8
    for place, one in enumerate(logprobs):
        best = expected[place].topk(3)
        assert one.token_id == tokens[place]
        assert one.logprob == pytest.approx(float(expected[place][tokens[place]]), abs=1e-3)
        assert [token for token, _ in one.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in one.top]), best.values, atol=1e-3, rtol=0)
