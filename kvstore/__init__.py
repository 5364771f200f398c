"""The KV store of one node, and all that says which page is where.

Owns page keys, page layout, the tiers (shared memory, disk, other stores) and the prefix map.
Never computes a page and never imports torch outside of `kvstore.client`.
"""
