"""The prefill worker's decisions: which prompts are computed in which chunks, and which pages are stored.

Owns prefill requests from `Prefill` to `Prefilled`.
Never samples a token, and never speaks to a decode worker.
"""
