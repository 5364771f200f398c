"""The model families: each file reads one family's config.json, and says where its tensors lie.

Owns the decision whether this engine can run a checkpoint at all. Nothing else in the engine asks for a family by name.
A new dense family is one file here, its name in `registry`, and a recipe in `tests/support/checkpoints.py`.
"""
