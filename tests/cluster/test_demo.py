"""`make demo` does what it says, where nothing else runs."""

import sys

import pytest

from tests.cluster.machine import Machine

pytestmark = [pytest.mark.cluster, pytest.mark.alone]


def test_the_demo(machine: Machine):
    demo = machine.run(sys.executable, "-m", "deploy.commands.demo", timeout=120)
    assert demo.status == 0, demo
    assert "it should say" not in demo.out
    assert "the same tokens to the end" in demo.out
    assert "2 attempts" in demo.out
    assert "nothing is left" in demo.out
    assert machine.left_behind() == []
