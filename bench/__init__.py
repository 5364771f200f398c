"""Measurements, in folders by question: bench/README.md names each question, its script and its table.

Every script runs from the project's root as a module, `python -m bench.store.tiers`, and prints its results as
`bench.report` has them.
"""
