"""The disk tier: pages in append-only segment files.

Owns the index of pages on disk (pure), the record format, and the threads that read and write.
Never decides what a request loads: `kvstore.load_or_recompute` does.
"""
