"""`python -m decode_worker`: a decode worker without Ray."""

import sys

from baton.process import main
from decode_worker.service import run

sys.exit(main("decode_worker", run))
