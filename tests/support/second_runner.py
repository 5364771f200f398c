"""vLLM's second model runner on a CPU: its kernels are Triton's, which Triton's interpreter runs there.

vLLM's build for CPUs takes Triton only where that has a backend for CPUs, and the one on PyPI has none. So this process
names a backend that is never asked to compile anything, and then goes on as the child that runs vLLM.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace

from engine.vllm_runner import child


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
    child.main(int(sys.argv[1]))
