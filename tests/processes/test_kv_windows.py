"""Requests with sinks, a window and chosen pages have the same tokens on whole clusters: after hand-offs, in small
pools, beside others, with proposals verified, and when a decode worker dies."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.client import Generated
from baton.errors import UnsupportedField
from deploy.local import LocalCluster
from engine.engine import layout_of
from engine.models.config import load_spec
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest, load
from tests.support.engines import ENGINE
from tests.support.eventually import eventually

PAGE, OUTPUT = 16, 300
_RNG = random.Random(5)
PROMPTS = [[_RNG.randrange(3, checkpoints.VOCAB) for _ in range(_RNG.choice([3, 20, 130, 300]))] for _ in range(6)]
WINDOWS = [
    {"kind": "window", "window": 40},
    {"kind": "window", "window": 100, "sinks": 20},
    {"kind": "snapkv", "window": 40, "keep": 48},
    {"kind": "h2o", "window": 40, "keep": 48},
    None,
]


def answers_of(cluster: LocalCluster, at_once: int, during: Callable[[], None] = lambda: None) -> Sequence[Generated]:
    with ThreadPoolExecutor(at_once) as pool:
        orders = [(prompt, window) for prompt in PROMPTS for window in WINDOWS]

        def answer(order: tuple[list[int], dict[str, Any] | None]) -> Generated:
            prompt, window = order
            count = OUTPUT if window else 60
            return workload.ask(cluster.address, prompt, count, timeout=240.0, kv_compression=window, temperature=0.0)

        futures = [pool.submit(answer, order) for order in orders]
        during()
        return [future.result() for future in futures]


@pytest.mark.skipif(ENGINE.name == "vllm", reason="its runner attends to every page")
@pytest.mark.technique("Attention sinks with a window, of a request")
@pytest.mark.technique("Attention sinks, a window and pages chosen by attention, of a request")
def test_outputs_with_a_window_are_the_same_however_they_are_computed(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = checkpoint("wide-llama")
    common = {"model.dtype": "bfloat16", "cluster.heartbeat_ms": 100, "cluster.heartbeat_timeout_ms": 1_000}
    with LocalCluster(workload.settings(path, 0, 1, **common), tmp_path / "alone") as alone:
        expected = answers_of(alone, 1)
    assert all(len(answer.token_ids) in (OUTPUT, 60) for answer in expected)
    pool = 50 * layout_of(load_spec(path), "bfloat16", PAGE).page_bytes
    more = {**common, "decode.kv_cache_bytes": pool, "router.disaggregation": "always", "model.speculation": "ngram"}
    with LocalCluster(workload.settings(path, 1, 2, **more), tmp_path / "crowd") as cluster:

        def kill() -> None:
            def busy() -> str:
                return next((name for name in ("decode-0", "decode-1") if load(cluster, name).running > 1), "")

            cluster.kill(eventually(busy, what="streams on a worker"))

        answers = answers_of(cluster, 24, kill)
        for number, (answer, right) in enumerate(zip(answers, expected, strict=True)):
            assert answer.token_ids == right.token_ids, f"request {number}"
        assert max(answer.work.attempts for answer in answers) > 1
        assert any(answer.work.pages_fetched for answer in answers)
        eventually(lambda: at_rest(cluster), what="everything freed")
        # An output may be longer than the pool.
        longest = workload.ask(cluster.address, PROMPTS[0], 60 * PAGE, timeout=240.0, kv_compression=WINDOWS[0])
        assert len(longest.token_ids) == 60 * PAGE


def test_a_model_that_can_not_have_one_says_so(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("wide-mistral-window")
    with (
        LocalCluster(workload.settings(path, 0, 1), tmp_path) as cluster,
        pytest.raises(UnsupportedField, match=r"kv_compression is not served: .*; leave it out"),
    ):
        workload.ask(cluster.address, PROMPTS[0], 5, kv_compression=WINDOWS[0])
