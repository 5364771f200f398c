"""Clusters whose workers go on while their devices work, and whose decode workers launch a step ahead: the tokens are
those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from deploy.local import LocalCluster
from tests.support import workload
from tests.support.cluster import at_rest
from tests.support.eventually import eventually
from tests.support.metrics_page import metric, nothing_held

PROMPTS = workload.prompts()


def test_64_requests_at_once_get_the_reference_tokens(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("wide-llama")
    overlapped = {role: ["tests.support.threaded_worker", role] for role in ("prefill", "decode")}
    settings = workload.settings(path, **{"store.verify_pages": True})
    with patch.dict("deploy.local._MODULES", overlapped), LocalCluster(settings, tmp_path) as cluster:
        fetched = 0
        for wanted in (PROMPTS, PROMPTS[:16]):
            answers = workload.ask_all(cluster.address, wanted)
            workload.compare(path, wanted, answers, workload.references(path, wanted))
            fetched += sum(answer.work.pages_fetched for answer in answers)
        assert fetched
        eventually(lambda: metric(cluster, "decode-0", "steps_launched_ahead_total") > 100, what="steps ahead")
        eventually(lambda: at_rest(cluster), what="everything freed")
        eventually(lambda: nothing_held(cluster, "store-0"), what="nothing held in the store")
