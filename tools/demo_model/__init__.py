"""Make the demo's model: text of a small world, a tokenizer, training and evaluation. See `docs/demo-model.md`.

Owns everything between a seed and the checkpoint in `deploy/demo_model`. Nothing that runs in production imports it.
"""
