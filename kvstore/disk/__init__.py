"""The disk tier: pages in files, one each.

Owns the index of pages on disk (pure), the files' names, and the threads that read and write.
Never decides what a request loads: `kvstore.load_or_recompute` does.
"""
