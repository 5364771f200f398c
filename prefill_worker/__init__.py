"""Prefill workers: the KV pages of prompts, computed in chunks and sealed into the store. They never sample."""
