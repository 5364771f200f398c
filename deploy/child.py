"""`python -m deploy.child PARENT MODULE ARGUMENTS…` runs a module that dies with its parent.

The child requests the parent-death signal itself, after its own start. A request between fork and exec would run Python
in a copy of a process with other threads, which may hold locks.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    run(int(sys.argv[1]), sys.argv[2:])


def run(parent: int, argv: list[str]) -> None:
    """Run the module `argv[0]` with the other arguments, in this process, until it or the parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the request
        sys.exit(f"the process {parent} that started {argv[0]} has gone")
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
