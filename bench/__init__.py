"""Measurements. Every script runs alone, as `.venv/bin/python bench/NAME.py`; docs/benchmarks.md says how."""
