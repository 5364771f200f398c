"""The host pool: pages in shared memory that all processes of a node map.

Owns the memory, its slots, the radix tree of cached pages and the order of eviction.
Never knows which process holds a lease, and never speaks to another store.
"""
