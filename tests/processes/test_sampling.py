"""Seeded sampling gives the same tokens on every cluster shape and in every batch (float32)."""

import random
from collections.abc import Callable
from pathlib import Path

from deploy.local import LocalCluster
from tests.support import checkpoints, workload

rng = random.Random(3)
PROMPTS = [[rng.randrange(3, checkpoints.VOCAB) for _ in range(rng.choice([1, 5, 17, 40, 130]))] for _ in range(12)]
SETTINGS = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "seed": 8},
    {"temperature": 1.3, "top_k": 40, "seed": 9},
    {"temperature": 0.9, "min_p": 0.05, "seed": 10},
    {"temperature": 0.9, "seed": 11, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {9: 5.0}},
]


def test_the_same_seed_gives_the_same_tokens_everywhere(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    outputs = []
    for name, (prefill, decode) in {"split": (2, 1), "colocated": (0, 2)}.items():
        with LocalCluster(workload.settings(path, prefill, decode), tmp_path / name) as cluster:
            together = [
                [answer.token_ids for answer in workload.ask_all(cluster.address, PROMPTS, 24, **settings)]
                for settings in SETTINGS
            ]
            alone = workload.ask(cluster.address, PROMPTS[0], 24, **SETTINGS[0])
        assert alone.token_ids == together[0][0]
        outputs.append(together)
    assert outputs[0] == outputs[1]
    distinct = {tuple(tokens) for group in outputs[0] for tokens in group}
    assert len(distinct) == len(PROMPTS) * len(SETTINGS)


def test_without_a_seed_every_request_draws_its_own(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with LocalCluster(workload.settings(checkpoint("qwen3"), 0, 1), tmp_path) as cluster:
        answers = [workload.ask(cluster.address, [5, 6, 7], 24, temperature=1.0) for _ in range(2)]
        assert answers[0].token_ids != answers[1].token_ids
        again = workload.ask(cluster.address, [5, 6, 7], 24, temperature=1.0, seed=answers[0].seed)
        assert again.token_ids == answers[0].token_ids
