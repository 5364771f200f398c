"""Models: a config.json as a ModelSpec, its weights, the products they make, and the forward pass.

Owns what differs between models.
Never knows a request, a page table's owner or a sampling parameter.
"""
