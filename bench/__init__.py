"""Measurements. Every script runs alone, as `.venv/bin/python bench/NAME.py`; docs/benchmarks.md says how.

A script that is run as a file finds its own folder first where modules are looked up, and there `kvstore.py` would pass
for the package of that name: so that folder is taken out before anything else is imported.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
