"""Prefixes that an operator keeps cached.

Owns pinned prefixes: which exist, where their pages are computed, and when they expire.
Never delays a client's request: pinned prefixes are computed by prefill workers with room to spare.
"""
