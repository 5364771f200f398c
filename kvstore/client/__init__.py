"""The workers' side of the store. Workers import this package, and nothing else of the store but page keys and layout.

Owns a worker's connection, its copies between device and arena, and its device pages.
Never decides when a sequence runs.
"""
