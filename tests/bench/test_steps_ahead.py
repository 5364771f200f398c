"""The benchmark of steps ahead runs, and a device waits less for its worker."""

from __future__ import annotations

import json

import pytest

from bench.steps_ahead import main


def test_a_step_ahead_hides_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--rows", "6"]) == 0
    found = {line["case"]: line["value"] for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(found) == {
        f"6 rows, {how}: {what}" for how in ("each step waits", "one step ahead") for what in ("step", "gap")
    }
    assert found["6 rows, one step ahead: gap"] < found["6 rows, each step waits: gap"]
