"""Checkpoints in Hugging Face's layout: the tensors in them.

Owns safetensors headers and checks of what a file claims.
Never executes anything that a checkpoint brings.
"""
