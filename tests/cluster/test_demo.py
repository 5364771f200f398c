"""`make demo` does what it says, where nothing else runs."""

import re
import sys

import pytest

from tests.cluster.machine import Machine

pytestmark = [pytest.mark.cluster, pytest.mark.alone]


def test_the_demo(machine: Machine):
    demo = machine.run(sys.executable, "-m", "deploy.commands.demo", timeout=120)
    assert demo.status == 0, demo
    assert "it should say" not in demo.out
    assert "the same tokens to the end" in demo.out
    assert re.search(r"\b[2-9] attempts", demo.out), "the kill costs an attempt, and a busy machine perhaps one more"
    assert "nothing is left" in demo.out
    assert machine.left_behind() == []
