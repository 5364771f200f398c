"""`python -m worker` with an engine whose steps and copies go on beside the worker's loop, as on a GPU."""

import sys
from functools import partial
from unittest.mock import patch

from baton.process import main
from tests.support.threaded_device import ThreadedEngine
from worker.process import run

if __name__ == "__main__":
    role = "decode" if sys.argv[1] == "decode" else "prefill"
    with patch("worker.load_runner.Engine", ThreadedEngine):
        sys.exit(main("worker", partial(run, role), sys.argv[2:]))
