"""Measurements. Every script runs alone, as `.venv/bin/python bench/NAME.py`; docs/lab/benchmarks.md says how.

Python puts the folder of a script that is run as a file first on the module path. There `bench/kvstore.py` would shadow
the package `kvstore`. That folder is therefore removed from the path before anything else is imported.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
