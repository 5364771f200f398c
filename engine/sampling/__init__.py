"""From logits to tokens: temperature, top-k, top-p, min-p, and a draw that every worker repeats.

Owns the counter-based random numbers that belong to (seed, position, token).
Never keeps a state between steps, so that a fail-over continues with the same tokens.
"""
