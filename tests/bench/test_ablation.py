"""The ablation's arms are ones that a cluster starts with, and its figures those of the runs."""

from pathlib import Path

import pytest

from baton import config
from baton.messages import LoadReport
from baton.operator_api import Process, Status
from bench.cluster import ablation
from deploy.load.figures import Outcome
from tests.router import model as cluster_model


@pytest.mark.parametrize("name", ablation.ARMS)
def test_every_arm_is_a_configuration(name: str, tmp_path: Path) -> None:
    config.load(None, {"model.path": str(tmp_path), "disk.path": str(tmp_path), **ablation.ARMS[name].settings})


def test_pages_that_are_taken_count_on_every_worker() -> None:
    processes = [
        Process(name="p", role="prefill", pid=1, state="live", load=LoadReport(pages_free=3, pages_total=10)),
        Process(name="d", role="decode", pid=2, state="live", load=LoadReport(pages_free=8, pages_total=10)),
    ]
    model = cluster_model.card()
    assert ablation.held_bytes(Status(processes, model=model)) == 9 * model.page_bytes


def test_a_run_stands_beside_that_with_everything_on() -> None:
    full = [ablation.Seen([Outcome(0, 0, 1, (0.5, 1.0), prompt_tokens=10, cached_tokens=5)], 2**20)]
    slower = [ablation.Seen([Outcome(0, 0, 2, (1.0, 2.0), prompt_tokens=10)], 2**21)]
    lines = {each.case: each for each in ablation.results("paging", "chat", slower, full)}
    assert lines["chat, without paging: ttft p50"].ratio == 2.0
    assert lines["chat, without paging: cached prompt tokens"].value == 0.0
    assert lines["chat, without paging: memory held"].value == 2.0
