"""Text in and out of a real cluster: the tokenizer, stop strings, stop tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from baton.v1 import generation_pb2
from deploy.client import Client
from deploy.local import LocalCluster
from tests import checkpoints
from tests.support import workload

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


def stream(
    cluster: LocalCluster, **settings: object
) -> tuple[str, list[int], list[generation_pb2.TokenLogprob], generation_pb2.Finished]:
    """Text, tokens, log-probabilities and the end of one greedy request."""
    request = generation_pb2.GenerateRequest(
        **{"text": PROMPT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **settings}
    )  # type: ignore[arg-type]
    text, tokens, logprobs = "", [], []
    with Client(cluster.address) as client:
        for response in client.generate(request, timeout=60):
            text += response.delta.text
            tokens += response.delta.token_ids
            logprobs += response.delta.logprobs
            if response.HasField("finished"):
                return text, tokens, logprobs, response.finished
    raise AssertionError("the stream ended without a Finished")


def test_the_text_is_the_decoding_of_the_tokens(cluster: LocalCluster, path: Path, right: list[int]) -> None:
    text, tokens, _, finished = stream(cluster)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokens == right
    assert text == tokenizer.decode(right, skip_special_tokens=True)
    assert finished.finish_reason == generation_pb2.FINISH_REASON_LENGTH


def test_a_stop_string_ends_the_output_before_it(cluster: LocalCluster) -> None:
    whole, *_ = stream(cluster)
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    text, _, _, finished = stream(cluster, stop=[stop])
    assert text == whole[: whole.index(stop)]
    assert finished.finish_reason == generation_pb2.FINISH_REASON_STOP


def test_a_stop_token_ends_the_output_with_it(cluster: LocalCluster, right: list[int]) -> None:
    _, tokens, _, finished = stream(cluster, stop_token_ids=[right[7]])
    assert tokens == right[: right.index(right[7]) + 1]
    assert finished.finish_reason == generation_pb2.FINISH_REASON_STOP


def test_logprobs_are_the_models_own(cluster: LocalCluster, path: Path, right: list[int]) -> None:
    _, tokens, logprobs, _ = stream(cluster, logprobs=3, max_tokens=8)
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(PROMPT).ids
    expected = checkpoints.reference(path).logits([*ids, *right[:8]])[len(ids) - 1 : -1].log_softmax(-1)
    assert len(logprobs) == len(tokens) == 8
    for place, one in enumerate(logprobs):
        best = expected[place].topk(3)
        assert one.token_id == tokens[place]
        assert one.logprob == pytest.approx(float(expected[place][tokens[place]]), abs=1e-3)
        assert [other.token_id for other in one.top] == best.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([other.logprob for other in one.top]),
            best.values,
            atol=1e-3,
            rtol=0,
        )
