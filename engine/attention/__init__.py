"""Attention over pages of K and V, in torch.

Owns the gathering of pages for a batch.
Never allocates a page, and never decides what is in a batch.
"""
