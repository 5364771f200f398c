"""KV events: every change of the set of cached pages, published in vLLM's wire format.

Owns the log of changes, its digest, snapshots and replay.
Never waits for a reader, and never reads events itself.
"""
