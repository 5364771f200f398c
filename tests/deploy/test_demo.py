"""The ends of the demo, without a cluster. `tests/cluster/test_interrupts.py` has those of a real one."""

import os
import signal
from collections.abc import Callable

import pytest

from baton.errors import StartupError
from deploy.commands.demo_chat import BUNDLED
from deploy.commands.terminal import OutputClosed
from deploy.control_plane.state_file import State
from deploy.demo import DemoCluster, run
from deploy.interrupts import held


class Fake(DemoCluster):
    """A cluster whose start ends the demo."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self._end = end
        self.downs = 0

    def up(self, *arguments: str) -> State:
        self._end()
        raise StartupError("it went on")

    def down(self) -> list[str]:
        os.kill(os.getpid(), signal.SIGINT)  # one more Ctrl-C
        self.downs += 1
        return []


def _raises(error: Exception) -> Callable[[], object]:
    def end() -> None:
        raise error

    return end


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), 130, "interrupted"),
        (lambda: signal.raise_signal(signal.SIGTERM), 143, "interrupted"),
        (lambda: signal.raise_signal(signal.SIGHUP), 129, "interrupted"),
        (_raises(StartupError("no Ray")), 1, "the demo failed: no Ray"),
        (_raises(ValueError("odd")), 1, "the demo failed: ValueError: odd"),
        (_raises(OutputClosed()), 141, "nothing is left"),
    ],
    ids=["SIGINT", "SIGTERM", "SIGHUP", "our error", "another error", "a closed pipe"],
)
def test_every_end_takes_the_cluster_down_and_has_a_status(
    end: Callable[[], object],
    status: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("deploy.demo.forget_stdout", lambda: None)
    monkeypatch.setattr("deploy.demo.choose", lambda say: BUNDLED)
    cluster = Fake(end)
    with pytest.raises(KeyboardInterrupt), held():  # the Ctrl-C during the teardown comes after it
        assert run(cluster) == status
    assert cluster.downs == 1
    assert says in capsys.readouterr().out
