"""What a process finds of devices, and its pages on one: GPUs and their memory, the page pool, a CPU's copies.

Owns the answer to what a GPU is. Knows no model and no step.
"""
