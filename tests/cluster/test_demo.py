"""`make demo` does what it says, where nothing else runs."""

import re
import sys

import pytest

from tests.cluster.machine import Machine
from tests.support.real_weights import needs_smollm2

pytestmark = [pytest.mark.cluster, pytest.mark.alone]


@pytest.mark.parametrize("model", [pytest.param("smollm2", marks=needs_smollm2), "baton-demo"])
def test_the_demo(model: str, machine: Machine):
    """The machine has no network, so an empty cache leaves the model that comes with Baton."""
    environment = machine.without_models() if model == "baton-demo" else {}
    with machine.start(sys.executable, "-m", "deploy.demo", **environment) as demo:
        assert demo.stdout is not None
        output = ""
        while (watch := re.search(r"watch all of this at (\S+)", output)) is None:
            line = demo.stdout.readline()
            assert line, f"the demo has ended: {output}"
            output += line
        page = machine.run("curl", "-sS", "--max-time", "20", "-w", "%{http_code}", watch[1])
        rest, _ = demo.communicate(timeout=200)
    output += rest
    assert page.out.endswith("200"), page
    assert "<html" in page.out
    assert f"demo serves {model}" in output
    assert ("can't be fetched" in output) == (model == "baton-demo")
    assert demo.returncode == 0, output
    assert "it should say" not in output
    assert "the same tokens to the end" in output
    assert re.search(r"\b[2-9] attempts", output), "the kill costs an attempt, and a busy machine perhaps one more"
    assert "nothing is left" in output
    assert machine.left_behind() == []
