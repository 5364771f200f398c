"""Model families: a config.json as a checked configuration, its weights, and the forward pass.

Owns what differs between models.
Never knows a request, a page table's owner or a sampling parameter.
"""
