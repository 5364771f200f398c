"""The global prefix map: which worker or store holds how much of a prefix.

Owns the map that the router builds from KV events, and the tracker that keeps it true.
Never guarantees a page: an entry is a hint, and a stale one costs a recompute.
"""
