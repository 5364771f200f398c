"""`python -m prefill_worker`: a prefill worker without Ray."""

import sys

from baton.process import main
from prefill_worker.service import run

sys.exit(main("prefill_worker", run))
