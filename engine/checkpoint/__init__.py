"""Checkpoints in Hugging Face's layout: where their files are, and the tensors in them.

Owns safetensors headers, downloads and checks of what a file claims.
Never executes anything that a checkpoint brings.
"""
