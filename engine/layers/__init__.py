"""Layers that all model families share: linear layers and rotary position embedding.

Owns their weights' layout in memory.
Never reads a checkpoint's files.
"""
