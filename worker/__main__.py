"""`python -m worker prefill|decode`: a worker without Ray, and the role that it begins with."""

import sys
from functools import partial

from baton.process import main
from worker.process import run

match sys.argv[1:2]:
    case ["prefill" | "decode" as role]:
        sys.exit(main(f"worker {role}", partial(run, role), sys.argv[2:]))
    case _:
        sys.exit("usage: python -m worker prefill|decode --config FILE --name NAME --router ENDPOINT")
