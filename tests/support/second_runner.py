"""vLLM's second model runner on a CPU: its kernels are Triton's, which Triton's interpreter runs there.

vLLM's build for CPUs takes Triton only where that has a backend for CPUs, and the one on PyPI has none. So this process
names a backend that is never asked to compile anything, and then goes on as the child that runs vLLM. Draws with a
filter look at few tokens first, so that some are corrected when they are collected.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace

from engine.sampling.device_sampler import DeviceSampler
from engine.vllm_runner import child, draw


def second_runner(fd: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process as `engine.vllm_runner.runner.launch_child` does."""
    own = {**environment, "VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", __name__, str(fd)]
    return subprocess.Popen(command, pass_fds=[fd], env=own, stdin=subprocess.DEVNULL)


def _name_a_backend() -> None:
    from triton.backends import backends  # pyright: ignore[reportMissingImports]

    backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: False))


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    _name_a_backend()
    draw.DeviceSampler = partial(DeviceSampler, prefix=4)  # type: ignore[misc]
    child.main(int(sys.argv[1]))
