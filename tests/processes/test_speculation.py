"""Speculation changes no token of whole clusters, greedy or drawn, while a decode worker dies."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.client import Client, Generated
from deploy.local import LocalCluster
from deploy.models import DEMO_MODEL, DRAFT_MODEL, HEADS
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest, load
from tests.support.eventually import eventually
from tests.support.metrics_page import metric
from tools.demo_model import evaluate
from tools.demo_model.heads import first_heads

pytestmark = pytest.mark.native  # its rows have one numerics
OUTPUT = 100  # tokens
_RNG = random.Random(5)
_TWO = {7: 30.0, 9: 27.0}
"""Outputs consist of these: mostly the first, and sometimes the second. So most guesses are right, and some wrong."""
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7, "logit_bias": _TWO},
    {"temperature": 0.8, "top_p": 0.9, "seed": 8, "logit_bias": _TWO, "frequency_penalty": 0.02},
    {"temperature": 1.0, "seed": 9, "logit_bias": _TWO, "logprobs": 2, "repetition_penalty": 1.05},
]
PROMPTS = [[_RNG.randrange(3, checkpoints.VOCAB) for _ in range(_RNG.choice([3, 20, 130, 300]))] for _ in range(16)]


def answers_of(cluster: LocalCluster, during: Callable[[], None] = lambda: None) -> list[Generated]:
    """The answers to 64 requests at once."""
    with ThreadPoolExecutor(64) as pool:
        futures = [
            pool.submit(workload.ask, cluster.address, prompt, OUTPUT, timeout=240.0, **settings)
            for prompt in PROMPTS
            for settings in SETTINGS
        ]
        during()
        return [future.result() for future in futures]


@pytest.mark.technique("Speculation by n-grams, token-identical")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_64_requests_at_once_have_the_tokens_that_they_have_without(path: Path, dtype: str, tmp_path: Path) -> None:
    more: dict[str, object] = {
        "model.dtype": dtype, "cluster.heartbeat_ms": 100, "cluster.heartbeat_timeout_ms": 1_000,
        "model.speculation": "ngram",  # what pays is a machine's matter
    }  # fmt: skip
    with LocalCluster(workload.settings(path, 1, 1, **{**more, "model.speculation": "off"}), tmp_path / "off") as off:
        expected = answers_of(off)
        assert not metric(off, "decode-0", "spec_decode_num_drafts_total")
    with LocalCluster(workload.settings(path, 1, 2, **more), tmp_path / "on") as cluster:
        killed: list[str] = []

        def kill() -> None:
            """Kill the first decode worker that is seen to have several streams."""

            def busy() -> str:
                return next((name for name in ("decode-0", "decode-1") if load(cluster, name).running > 4), "")

            killed.append(eventually(busy, what="streams on a worker"))
            cluster.kill(killed[0])

        answers = answers_of(cluster, kill)
        survivor = "decode-0" if killed == ["decode-1"] else "decode-1"
        for number, (answer, right) in enumerate(zip(answers, expected, strict=True)):
            assert answer.token_ids == right.token_ids, f"request {number}"
        assert max(answer.work.attempts for answer in answers) > 1
        eventually(lambda: at_rest(cluster), what="everything freed")

        def verified_some() -> bool:
            verified, accepted = (
                metric(cluster, survivor, f"spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted")
            )
            return verified > accepted > 100

        eventually(verified_some, what="proposals of which some were wrong")
        again = workload.ask(cluster.address, PROMPTS[0], OUTPUT, **SETTINGS[1])
        assert again.token_ids == expected[1].token_ids

        def explained() -> bool:
            """An output that repeats one token has proposals as soon as the worker knows what its steps take."""
            answer = workload.ask(cluster.address, PROMPTS[0], OUTPUT, logit_bias={7: 100.0})
            with Client(cluster.address, cluster.operator) as client:
                (attempt,) = client.explain(answer.request_id).attempts
            return attempt.proposals_verified >= attempt.proposals_accepted > 0

        eventually(explained, what="proposals that Explain shows")


@pytest.mark.technique("Speculation by a draft model, token-identical")
@pytest.mark.technique("Speculation by heads, token-identical")
@pytest.mark.technique("Speculation by EAGLE, token-identical")
@pytest.mark.parametrize(
    "drafter",
    [
        {"model.speculation": "draft", "model.draft_model": str(DRAFT_MODEL)},
        {"model.speculation": "heads", "model.speculation_heads": str(HEADS)},
        {"model.speculation": "heads", "model.speculation_heads": "eagle"},
    ],
)
def test_a_drafter_changes_no_token_while_a_worker_dies(drafter: dict[str, object], tmp_path: Path) -> None:
    questions = evaluate.prompts(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), 200, 6)
    samplings: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]
    more: dict[str, object] = {"cluster.heartbeat_ms": 100, "cluster.heartbeat_timeout_ms": 1_000}
    trained = drafter.get("model.speculation_heads") != "eagle"
    if not trained:
        drafter |= {"model.speculation_heads": str(first_heads("eagle", tmp_path / "eagle"))}

    def ask_all(cluster: LocalCluster, during: Callable[[], None] = lambda: None) -> list[Sequence[int]]:
        with ThreadPoolExecutor(12) as pool:
            futures = [
                pool.submit(workload.ask, cluster.address, one.tokens, OUTPUT, timeout=120.0, **sampling)
                for one in questions
                for sampling in samplings
            ]
            during()
            return [future.result().token_ids for future in futures]

    def metrics_of(cluster: LocalCluster, what: str) -> float:
        names = [name for name in ("decode-0", "decode-1") if name != killed[0]]
        return sum(metric(cluster, name, f"spec_decode_num_{what}_total") for name in names)

    killed: list[str] = []
    off = workload.settings(DEMO_MODEL, 1, 1, **more, **{"model.speculation": "off"})
    with LocalCluster(off, tmp_path / "off") as cluster:
        expected = ask_all(cluster)
    with LocalCluster(workload.settings(DEMO_MODEL, 1, 2, **more, **drafter), tmp_path / "on") as cluster:

        def kill() -> None:
            def busy() -> str:
                return next((name for name in ("decode-0", "decode-1") if load(cluster, name).running), "")

            killed.append(eventually(busy, what="streams on a worker"))
            cluster.kill(killed[0])

        assert ask_all(cluster, kill) == expected
        assert ask_all(cluster) == expected
        what = "accepted_tokens" if trained else "draft_tokens"
        eventually(lambda: metrics_of(cluster, what) > 100, what="guesses, right ones if the heads have learned")
        assert metrics_of(cluster, "draft_tokens") > metrics_of(cluster, "accepted_tokens")
        eventually(lambda: at_rest(cluster), what="everything freed")
