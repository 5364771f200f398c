"""A process that fuzzes one target.

    python -m tests.fuzz.attacker TARGET ARGUMENTS       arguments as JSON

It prints `READY` once it makes cases. It goes on until its stdin closes or some cases have found something. Then it
prints one line of JSON: its counts by kind, and what was found. It runs at a low priority, because an attacker has a
machine of its own.
"""

import json
import os
import select
import sys
from contextlib import suppress

from tests.fuzz.case import SlowStarter, fuzz
from tests.fuzz.targets import TARGETS

READY = b"ready\n"

_NICENESS = 10


def _stdin_open() -> bool:
    return not select.select([sys.stdin], [], [], 0)[0]


def main() -> None:
    os.nice(_NICENESS)
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    seed, first, most = arguments.pop("seed"), arguments.pop("first", 0), arguments.pop("most", 2**62)
    target = TARGETS[name](**arguments)
    if isinstance(target, SlowStarter):
        target.start()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    ended = fuzz(name, target, seed, first, most, _stdin_open)
    print(json.dumps({"counts": ended.counts, "findings": ended.findings}), flush=True)
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(0)  # threads of gRPC and ZMQ may still wait


if __name__ == "__main__":
    main()
