"""From logits to tokens: temperature, top-k, top-p, min-p, and a draw that every worker repeats.

In reading order: `sampler` (the seam), `host_sampler` (NumPy, the oracle), `device_sampler` (torch, where the logits
are), `filter_edges` (numbers that both cut at), `counter_rng` and `device_rng` (the noise), `logits_rules`, `grammars`.
Owns the counter-based random numbers that belong to (seed, position, token).
Never keeps a state between steps, so that a fail-over continues with the same tokens.
"""
