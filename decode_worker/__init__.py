"""Decode workers: continuous batching, sampling, and the only producers of tokens."""
